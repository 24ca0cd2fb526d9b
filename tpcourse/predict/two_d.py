"""What SUMMA sends: panels along rows and columns, q of each for every product."""

from dataclasses import dataclass
from functools import cached_property

from tpcourse.comm.placement import Placement
from tpcourse.measure import Row
from tpcourse.predict.messages import Axis, message
from tpcourse.predict.shares import Shares


@dataclass(frozen=True)
class TwoD:
    """`schemes.TwoD` on q x q (x d) ranks, as formulas; every method says what one rank sends, of all phases.

    n tokens; k input and m output features; e bytes a number, f bytes where sums are in float32 at least.
    Source: Xu et al. 2021 (arXiv:2104.05343), section 3; depth: Wang et al. 2021
    (arXiv:2105.14500), section 3.
    """

    q: int
    d: int = 1
    names: tuple[str, str, str] = ("rows", "columns", "depth")

    @property
    def rows(self) -> Axis:
        """Tokens, and inputs of weights."""
        return Axis(self.names[0], self.q)

    @property
    def columns(self) -> Axis:
        """Features, and outputs of weights."""
        return Axis(self.names[1], self.q)

    @property
    def depth(self) -> Axis:
        """Other tokens, the same weights."""
        return Axis(self.names[2], self.d)

    @property
    def tokens(self) -> Axis:
        """All that hold other tokens."""
        if 1 in (self.q, self.d):
            return self.rows if self.d == 1 else self.depth
        return Axis(f"{self.names[0]}_{self.names[2]}", self.q * self.d)

    @property
    def mesh(self) -> dict[str, int]:
        """Its dimensions, the last varying fastest."""
        return dict(zip(self.names, (self.q, self.q, self.d)))

    @property
    def heads(self) -> str:
        """The mesh dimension over which heads are split."""
        return self.names[1]

    @cached_property
    def outer(self) -> Placement:
        """Tokens over rows and depth, features over columns."""
        return Placement.on(self.mesh, (self.names[0], self.names[2]), (self.names[1],))

    @property
    def shares(self) -> Shares:
        """Outer and inner layouts are one; every depth looks up the ids of its tokens."""
        return Shares(self.q * self.d, self.q, self.q * self.d, self.q, looked_up=self.d)

    def _panels(self, kind: str, axis: Axis, size: int, phase: str) -> list[Row]:
        return message(kind, axis, size, phase, calls=self.q)

    def entering_linear(self, n: int, k: int, m: int, bias: bool, e: int) -> list[Row]:
        """A B forward; A B^T and A^T B backward; then the sums of dW over depth and of db over tokens."""
        x, w = self._block(n, k, e), k * m // self.q**2 * e
        return (self._panels("broadcast", self.columns, x, "forward")
                + self._panels("broadcast", self.rows, w, "forward")
                + self._panels("broadcast", self.rows, w, "backward")  # dX = dY W^T
                + self._panels("reduce", self.columns, x, "backward")
                + self._panels("broadcast", self.columns, x, "backward")  # dW = X^T dY
                + self._panels("reduce", self.rows, w, "backward")
                + message("all_reduce", self.depth, w, "backward")
                + message("all_reduce", self.tokens, bias * (m // self.q) * e, "backward"))

    def _block(self, n: int, features: int, e: int) -> int:
        return n // (self.q * self.d) * (features // self.q) * e

    def leaving_linear(self, n: int, k: int, m: int, bias: bool, e: int) -> list[Row]:
        """The same: there is one layout."""
        return self.entering_linear(n, k, m, bias, e)

    def head(self, n: int, h: int, vocab: int, e: int) -> list[Row]:
        """A B^T forward, with the table as B; A B for dX, and A^T B for the table's gradient."""
        w, y = vocab * h // self.q**2 * e, self._block(n, vocab, e)
        return (self._panels("broadcast", self.rows, w, "forward")
                + self._panels("reduce", self.columns, y, "forward")
                + self._panels("broadcast", self.columns, y, "backward")  # dX = dY E
                + self._panels("broadcast", self.rows, w, "backward")
                + self._panels("broadcast", self.columns, y, "backward")  # dE = dY^T X
                + self._panels("reduce", self.rows, w, "backward")
                + message("all_reduce", self.depth, w, "backward"))

    def embedding(self, n: int, vocab: int, h: int, e: int) -> list[Row]:
        """Each column of the grid adds up the tokens at its depth; backward gathers, and sums over depth."""
        y = n // self.d * (h // self.q) * e
        return (message("reduce_scatter", self.rows, y, "forward")
                + message("all_gather", self.rows, y, "backward")
                + message("all_reduce", self.depth, vocab * h // self.q**2 * e, "backward"))

    def position_embedding(self, n: int, positions: int, h: int, e: int) -> list[Row]:
        """The table's gradient is summed over the ranks with other tokens."""
        return message("all_reduce", self.tokens, positions * (h // self.q) * e, "backward")

    def norm(self, n: int, h: int, parameters: int, e: int, f: int) -> list[Row]:
        """Statistics over columns: mean and variance gathered, or squares summed; backward sums as many."""
        tokens = n // self.tokens.size
        if parameters == 2:
            rows = message("all_gather", self.columns, self.q * 2 * tokens * f, "forward")
        else:
            rows = message("all_reduce", self.columns, tokens * f, "forward")
        rows += message("all_reduce", self.columns, parameters * tokens * f, "backward")
        return rows + message("all_reduce", self.tokens, parameters * (h // self.q) * e, "backward")

    def last(self, n: int, m: int, e: int) -> list[Row]:
        """None: the messages of SUMMA's product come before its end, where what is kept is known."""
        return []

    def loss(self, n: int, f: int) -> list[Row]:
        """As in one dimension over columns, of this rank's tokens; then the sum of all tokens' losses."""
        tokens = n // self.tokens.size
        return (message("all_reduce", self.columns, tokens * f, "forward")
                + message("all_reduce", self.columns, 2 * tokens * f, "forward")
                + message("all_reduce", self.tokens, f, "forward"))
