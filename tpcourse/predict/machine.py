"""What predictions ask of a machine: seconds of products, of other kernels and of messages."""

from typing import Protocol

from tpcourse.measure import Row


class Machine(Protocol):
    """`gpus` in nodes of `node`, each with `memory` bytes. Data sheets say the seconds, or a calibration.

    A machine can be hashed, so that what it takes for something is worked out once.
    """

    @property
    def gpus(self) -> int:
        """All of them."""

    @property
    def node(self) -> int:
        """GPUs of a node, which links inside it connect."""

    @property
    def memory(self) -> float:
        """Bytes of a GPU."""

    @property
    def overlap(self) -> float:
        """Of a message and a product under way together: the share of the shorter one's seconds that is saved."""

    def product(self, n: int, k: int, m: int, e: int, batch: int = 1) -> float:
        """Seconds of [n, k] @ [k, m], numbers of e bytes; of `batch` such products in one kernel."""

    def kernel(self, kind: str, nbytes: float) -> float:
        """Seconds of another kernel, of a kind in `work.KINDS`, that reads and writes so many bytes.

        The optimizer's are affine in the bytes, so that what a part adds to an update does not depend on others.
        """

    def message(self, row: Row, here: int) -> float:
        """Seconds of a row of the ledger, affine in its bytes; `here` ranks of its group are in one node."""
