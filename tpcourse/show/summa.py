"""SUMMA step by step on real numbers: who sends which panel, and what every rank has after each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import Tensor

from tpcourse.show.blocks import card
from tpcourse.show.colours import FAINT, INK, PAPER, ink_on, rank_colour, rank_hatch
from tpcourse.show.controls import Slider
from tpcourse.show.figure import Drawing, Picture, canvas, write
from tpcourse.show.slider import slide

if TYPE_CHECKING:
    from collections.abc import Sequence

ENTRY, GAP, HEAD, CAPTION, SIDE = 0.29, 0.4, 0.45, 0.72, 0.3  # inches: a number, between matrices, around
Matrix = list[list["float | None"]]  # None: there is nothing yet

# Which of the factors and of the result lies left of the grid, above it, and in its place; what moves how.
PLACES = {"ab": ("A", "B", "C"), "abt": ("C", "B", "A"), "atb": ("A", "C", "B")}
WORDS = {"ab": "{left} along rows, {top} along columns",
         "abt": "{top} along columns, {left} summed along rows",
         "atb": "{left} along rows, {top} summed along columns"}


@dataclass(frozen=True)
class Step:
    """What there is after step `index` of a product: the matrices left of the grid, above it and in it."""

    index: int
    caption: str
    left: Matrix
    top: Matrix
    centre: Matrix


def summa(product: str, a: Tensor, b: Tensor, q: int, names: Sequence[str] = ("A", "B", "C")) -> SummaFilm:
    """The q steps of a product on a grid of q x q ranks, computed from the numbers of a and b.

    Args:
        product: "ab" for C = A B, "abt" for A B^T, "atb" for A^T B.
        a, b: the whole factors, of small whole numbers.
        q: rows and columns of the grid; it divides all sizes.
        names: of a, b and the result, as the text calls them.

    Each block stands in its owner's place and colour. What is pale rests in a step. One matrix never moves;
    it is drawn in the middle, those that move along the grid's rows left of it, along its columns above.

    Raises:
        ValueError: a product that is not there, or a size that q does not divide.
    """
    if product not in PLACES:
        raise ValueError(f"no product {product!r}; there are {', '.join(PLACES)}")
    for size in (*a.shape, *b.shape):
        if size % q:
            raise ValueError(f"a size of {size} is not divisible by the q={q} rows of the grid")
    return SummaFilm(product, q, tuple(names), tuple(_steps(product, a, b, q, names)))


def summa_slider(product: str, a: Tensor, b: Tensor, q: int,
                 names: Sequence[str] = ("A", "B", "C")) -> Slider:
    """The steps of `summa` one at a time; it moves only while a kernel runs."""
    return slide(summa(product, a, b, q, names))


def _steps(product: str, a: Tensor, b: Tensor, q: int, names: Sequence[str]) -> list[Step]:
    shapes = {"ab": (len(a), b.size(1)), "abt": (len(a), len(b)), "atb": (a.size(1), b.size(1))}
    c = torch.full(shapes[product], torch.nan, dtype=torch.float64)
    found = []
    for t in range(q):
        size = len(b) if product == "abt" else a.size(1)  # what the panels cut
        panel = slice(t * size // q, (t + 1) * size // q)
        if product == "ab":
            c = c.nan_to_num() + a[:, panel] @ b[panel]
        elif product == "abt":
            c[:, panel] = (a @ b[panel].T).double()
        else:
            c[panel] = (a[:, panel].T @ b).double()
        values = dict(zip("ABC", (_matrix(a), _matrix(b), _matrix(c))))
        where = dict(zip("ABC", names))
        left, top, centre = PLACES[product]
        words = WORDS[product].format(left=where[left], top=where[top])
        found.append(Step(t, f"step {t}: {words}", values[left], values[top], values[centre]))
    return found


def _matrix(x: Tensor) -> Matrix:
    return [[None if value != value else value for value in row] for row in x.tolist()]


@dataclass(repr=False)
class SummaFilm(Drawing):
    """A product's steps as one figure; see `summa`."""

    product: str
    q: int
    names: tuple[str, ...]
    frames: tuple[Step, ...]

    @property
    def title(self) -> str:
        a, b, c = self.names
        factors = {"ab": f"{a} · {b}", "abt": f"{a} · {b} transposed", "atb": f"{a} transposed · {b}"}
        return f"{c} = {factors[self.product]} on {self.q} × {self.q} ranks"

    @property
    def alt(self) -> str:
        *_, centre = self._names()
        lines = [f"{self.q} steps. {centre} stays where it is."]
        for frame in self.frames:
            t = frame.index
            lines.append(f"{frame.caption}, panel {t}. After it {self.names[2]} is {self._result(frame)}")
        return "\n".join(lines)

    @property
    def frame_size(self) -> tuple[float, float]:
        """Inches across and down of one frame."""
        first = self.frames[0]
        wide = (len(first.left[0]) + len(first.top[0])) * ENTRY + GAP
        high = (len(first.left) + len(first.top)) * ENTRY + GAP
        return max(wide, 0.083 * max(len(f.caption) for f in self.frames)) + 2 * SIDE, CAPTION + high + 0.2

    def figure(self) -> Figure:
        width, height = self.frame_size
        figure, axes = canvas(width * len(self.frames), HEAD + height)
        write(axes, SIDE, 0.25, self.title, size=11.5, weight="bold", ha="left")
        for index, frame in enumerate(self.frames):
            self._draw(axes, frame, index * width + SIDE, HEAD)
        return figure

    def reel(self) -> Picture:
        """All frames below each other, each `frame_size` tall: what the slider moves past a window."""
        width, height = self.frame_size
        figure, axes = canvas(width, height * len(self.frames))
        for index, frame in enumerate(self.frames):
            self._draw(axes, frame, SIDE, index * height)
        return Picture(self.title, self.alt, figure)

    def _names(self) -> list[str]:
        return [dict(zip("ABC", self.names))[place] for place in PLACES[self.product]]

    def _result(self, frame: Step) -> str:
        rows = getattr(frame, ("left", "top", "centre")[PLACES[self.product].index("C")])
        return "; ".join(" ".join("-" if v is None else f"{v:g}" for v in row) for row in rows)

    def _draw(self, axes: Axes, frame: Step, x: float, y: float) -> None:
        left, top, centre = self._names()
        write(axes, x, y + 0.17, frame.caption, weight="bold", ha="left")
        y += CAPTION
        middle = x + len(frame.left[0]) * ENTRY + GAP, y + len(frame.top) * ENTRY + GAP
        t = frame.index
        self._blocks(axes, frame.left, (x, middle[1]), lambda i, j: j == t)
        self._blocks(axes, frame.top, (middle[0], y), lambda i, j: i == t)
        self._blocks(axes, frame.centre, middle, lambda i, j: True)
        write(axes, x, middle[1] - 0.14, left, size=11, weight="bold", ha="left")
        write(axes, middle[0], y - 0.14, top, size=11, weight="bold", ha="left")
        write(axes, middle[0] - 0.21, middle[1] - 0.2, centre, size=11, weight="bold")
        self._arrows(axes, frame, middle)

    def _blocks(self, axes: Axes, values: Matrix, at: tuple[float, float], active) -> None:
        """A matrix in q x q blocks; those that are not `active` are pale."""
        rows, columns = len(values) // self.q, len(values[0]) // self.q
        for i in range(self.q):
            for j in range(self.q):
                corner = at[0] + j * columns * ENTRY, at[1] + i * rows * ENTRY
                size = columns * ENTRY, rows * ENTRY
                axes.add_artist(card(corner, *size, i * self.q + j))
                if not active(i, j):
                    axes.add_artist(Rectangle(corner, *size, facecolor=PAPER, edgecolor=PAPER, alpha=0.72))
                own = [row[j * columns:(j + 1) * columns] for row in values[i * rows:(i + 1) * rows]]
                _numbers(axes, own, corner, i * self.q + j, active(i, j))

    def _arrows(self, axes: Axes, frame: Step, middle: tuple[float, float]) -> None:
        """Into the grid where a panel is broadcast, out of it where a sum is collected."""
        high, wide = len(frame.left) * ENTRY / self.q, len(frame.top[0]) * ENTRY / self.q
        left, top, _ = PLACES[self.product]
        for k in range(self.q):
            across = middle[1] + (k + 0.5) * high
            down = middle[0] + (k + 0.5) * wide
            _arrow(axes, (middle[0] - GAP + 0.04, across), (middle[0] - 0.04, across), left == "C")
            _arrow(axes, (down, middle[1] - GAP + 0.04), (down, middle[1] - 0.04), top == "C")


def _numbers(axes: Axes, values: Matrix, corner: tuple[float, float], rank: int, active: bool) -> None:
    """The numbers of one block, legible on its rank's hatch too."""
    colour = rank_colour(rank)
    ink = ink_on(colour) if active else FAINT
    patch = dict(facecolor=colour, edgecolor="none", pad=0.6) if active and rank_hatch(rank) else None
    for r, row in enumerate(values):
        for c, value in enumerate(row):
            x, y = corner[0] + (c + 0.5) * ENTRY, corner[1] + (r + 0.5) * ENTRY
            if value is not None:
                write(axes, x, y, f"{value:g}".replace("-", "−"), size=8.5, color=ink, bbox=patch)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], back: bool) -> None:
    start, end = (end, start) if back else (start, end)
    axes.add_artist(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, linewidth=1.4, color=INK,
                                    shrinkA=0, shrinkB=0, zorder=4))
