"""What one dimension sends: a collective, and its conjugate, where a region begins or ends."""

from dataclasses import dataclass
from functools import cached_property

from tpcourse.comm.placement import Placement
from tpcourse.measure import Row
from tpcourse.predict.messages import Axis, message
from tpcourse.predict.shares import Shares


@dataclass(frozen=True)
class OneD:
    """`schemes.OneD` on P ranks, as formulas; every method says what one rank sends, of all phases.

    n tokens; k input and m output features; e bytes a number, f bytes where sums are in float32 at least.
    Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3; sequence parallelism: Korthikanti et al. 2022
    (arXiv:2205.05198), section 4.2.
    """

    size: int
    sequence_parallel: bool = False
    name: str = "tp"

    @property
    def axis(self) -> Axis:
        """The one dimension."""
        return Axis(self.name, self.size)

    @property
    def mesh(self) -> dict[str, int]:
        """Its dimensions, the last varying fastest."""
        return {self.name: self.size}

    @property
    def heads(self) -> str:
        """The mesh dimension over which heads are split."""
        return self.name

    @cached_property
    def outer(self) -> Placement:
        """Tokens are the same on every rank; with sequence parallelism each has its own."""
        return Placement.on(self.mesh, (self.name,) if self.sequence_parallel else (), ())

    @property
    def shares(self) -> Shares:
        """Inner features are split; with sequence parallelism outer tokens too."""
        return Shares(self.size if self.sequence_parallel else 1, 1, 1, self.size)

    def entering_linear(self, n: int, k: int, m: int, bias: bool, e: int) -> list[Row]:
        """Without sequence parallelism dX is summed; with it X is gathered, and once more for dW."""
        if not self.sequence_parallel:
            return message("all_reduce", self.axis, n * k * e, "backward")
        return (message("all_gather", self.axis, n * k * e, "forward")
                + message("all_gather", self.axis, n * k * e, "backward")
                + message("reduce_scatter", self.axis, n * k * e, "backward"))

    def leaving_linear(self, n: int, k: int, m: int, bias: bool, e: int) -> list[Row]:
        """Y is summed; with sequence parallelism scattered, and its gradient gathered."""
        if not self.sequence_parallel:
            return message("all_reduce", self.axis, n * m * e, "forward")
        return (message("reduce_scatter", self.axis, n * m * e, "forward")
                + message("all_gather", self.axis, n * m * e, "backward"))

    def embedding(self, n: int, vocab: int, h: int, e: int) -> list[Row]:
        """A leaving linear on one-hot rows."""
        return self.leaving_linear(n, vocab, h, False, e)

    def position_embedding(self, n: int, positions: int, h: int, e: int) -> list[Row]:
        """With sequence parallelism the table's gradient is summed over the tokens' ranks."""
        return self._gradient(positions * h * e)

    def norm(self, n: int, h: int, parameters: int, e: int, f: int) -> list[Row]:
        """With sequence parallelism the gradients of its `parameters` numbers a feature are summed."""
        return self._gradient(parameters * h * e)

    def _gradient(self, size: int) -> list[Row]:
        """The sum of a whole parameter's gradient where each rank has its own tokens."""
        return message("all_reduce", self.axis, size, "backward") if self.sequence_parallel else []

    def last(self, n: int, m: int, e: int) -> list[Row]:
        """Of a leaving linear the forward message after which nothing is kept."""
        return [row for row in self.leaving_linear(n, 0, m, False, e) if row.phase == "forward"]

    def loss(self, n: int, f: int) -> list[Row]:
        """The greatest logit; then, together, the sum of exponentials and the target's logit."""
        return (message("all_reduce", self.axis, n * f, "forward")
                + message("all_reduce", self.axis, 2 * n * f, "forward"))
