"""What the cube sends: tokens along j and l, weights along i."""

from dataclasses import dataclass
from functools import cache, cached_property

from tpcourse.comm.placement import Placement
from tpcourse.measure import Row
from tpcourse.predict.messages import Axis, message
from tpcourse.predict.shares import Shares


@dataclass(frozen=True)
class ThreeD:
    """`schemes.ThreeD` on i x j x l ranks, as formulas; every method says what one rank sends, of all phases.

    n tokens; k input and m output features; e bytes a number, f bytes where sums are in float32 at least.
    Source: Bian et al. 2021 (arXiv:2105.14450), section 3.
    """

    i: int
    j: int
    l: int
    leave: str = "reduce_scatter"
    keep_gathered: bool = True
    names: tuple[str, str, str] = ("i", "j", "l")

    @property
    def scatter(self) -> bool:
        """Whether tokens are split over the leaving axis too."""
        return self.leave == "reduce_scatter"

    @property
    def mesh(self) -> dict[str, int]:
        """Its dimensions, the last varying fastest."""
        return dict(zip(self.names, (self.i, self.j, self.l)))

    @property
    def heads(self) -> str:
        """The mesh dimension over which heads are split."""
        return self.names[1]

    @cached_property
    def outer(self) -> Placement:
        """Tokens over i and, if scattered, j; features over l."""
        return Placement.on(self.mesh, self.names[:2] if self.scatter else self.names[:1], self.names[2:])

    @property
    def shares(self) -> Shares:
        """Features are split over l outside and j inside, tokens over i and, if scattered, j or l."""
        return Shares(self.i * self.j if self.scatter else self.i, self.l,
                      self.i * self.l if self.scatter else self.i, self.j,
                      looked_up=self.i, storage=self.i, keeps_gathered=self.keep_gathered)

    @cache
    def axes(self, letters: str) -> Axis:
        """One axis, or two as one group: its name joins those of the axes with several ranks."""
        sizes = dict(zip("ijl", (self.i, self.j, self.l)))
        names = dict(zip("ijl", self.names))
        several = [letter for letter in letters if sizes[letter] > 1] or [letters[0]]
        size = 1
        for letter in several:
            size *= sizes[letter]
        everybody = len(several) > 1 and size == self.i * self.j * self.l
        return Axis("world" if everybody else "_".join(names[letter] for letter in several), size)

    def entering_linear(self, n: int, k: int, m: int, bias: bool, e: int) -> list[Row]:
        """Enters over j, leaves over l."""
        return self._linear(n, k, m, bias, e, "j", "l")

    def leaving_linear(self, n: int, k: int, m: int, bias: bool, e: int) -> list[Row]:
        """Enters over l, leaves over j."""
        return self._linear(n, k, m, bias, e, "l", "j")

    def _linear(self, n: int, k: int, m: int, bias: bool, e: int, enter: str, leave: str) -> list[Row]:
        over_in, over_out, storage = self.axes(enter), self.axes(leave), self.axes("i")
        x = n // self.i * (k // over_out.size) * e  # X gathered
        w = m // over_in.size * (k // over_out.size) * e  # W gathered
        b = m // over_in.size * e * bias
        rows = self._gathered(w) + self._gathered(b) + self.leave_tokens(n, m, e, over_in, over_out)
        rows += message("all_gather", over_in, x, "forward") if self.scatter else []
        rows += message("reduce_scatter" if self.scatter else "all_reduce", over_in, x, "backward")
        if not self.keep_gathered:
            rows += message("all_gather", storage, w, "backward")
            rows += message("all_gather", over_in, x, "backward") if self.scatter else []
        return rows

    def _gathered(self, size: int) -> list[Row]:
        """A parameter gathered over i; backward scatters the sum of its gradient."""
        return (message("all_gather", self.axes("i"), size, "forward")
                + message("reduce_scatter", self.axes("i"), size, "backward"))

    def leave_tokens(self, n: int, m: int, e: int, over_in: Axis, over_out: Axis) -> list[Row]:
        """The sum of Y over the axis that a linear leaves by; if it is scattered, backward gathers dY."""
        y = n // self.i * (m // over_in.size) * e
        if not self.scatter:
            return message("all_reduce", over_out, y, "forward")
        return (message("reduce_scatter", over_out, y, "forward")
                + message("all_gather", over_out, y, "backward"))

    def embedding(self, n: int, vocab: int, h: int, e: int) -> list[Row]:
        """A leaving linear on one-hot rows, of which only the table is gathered."""
        table = vocab // self.j * (h // self.l) * e
        return self._gathered(table) + self.leave_tokens(n, h, e, self.axes("l"), self.axes("j"))

    @property
    def _outer(self) -> Axis:
        return self.axes("ij" if self.scatter else "i")

    @property
    def _inner(self) -> Axis:
        return self.axes("il" if self.scatter else "i")

    def position_embedding(self, n: int, positions: int, h: int, e: int) -> list[Row]:
        """The table's gradient is summed over the ranks with other tokens."""
        return message("all_reduce", self._outer, positions * (h // self.l) * e, "backward")

    def norm(self, n: int, h: int, parameters: int, e: int, f: int) -> list[Row]:
        """Statistics over l: mean and variance gathered, or squares summed; backward sums as many numbers."""
        tokens = n // self._outer.size
        if parameters == 2:
            rows = message("all_gather", self.axes("l"), self.l * 2 * tokens * f, "forward")
        else:
            rows = message("all_reduce", self.axes("l"), tokens * f, "forward")
        rows += message("all_reduce", self.axes("l"), parameters * tokens * f, "backward")
        return rows + message("all_reduce", self._outer, parameters * (h // self.l) * e, "backward")

    def last(self, n: int, m: int, e: int) -> list[Row]:
        """Of a leaving linear the forward message after which nothing is kept."""
        rows = self.leave_tokens(n, m, e, self.axes("l"), self.axes("j"))
        return [row for row in rows if row.phase == "forward"]

    def loss(self, n: int, f: int) -> list[Row]:
        """As in one dimension over j, of this rank's tokens; then the sum of the losses over all tokens."""
        tokens = n // self._inner.size
        return (message("all_reduce", self.axes("j"), tokens * f, "forward")
                + message("all_reduce", self.axes("j"), 2 * tokens * f, "forward")
                + message("all_reduce", self._inner, f, "forward"))
