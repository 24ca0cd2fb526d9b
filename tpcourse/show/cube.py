"""The cuboid of a product's multiplications, cut over three mesh dimensions, and its faces X, A and Y."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import atan2, degrees, prod

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from tpcourse.show.blocks import ranks_text
from tpcourse.show.colours import FAINT, INK, PAPER, ink_on, rank_colour, rank_hatch
from tpcourse.show.controls import Slider
from tpcourse.show.figure import Drawing, canvas, write

Point = tuple[float, float]
SIDE, PAD, PALE = 1.9, 0.05, 0.2  # inches: a side, a gap; how strong the others' colours are
ACROSS, UP = 0.62, 0.42  # where a step into the depth goes
LEFT, TOP, ROOM = 0.75, 0.75, 0.75  # inches: before Y, above A, between the cuboid and its faces
SMALLEST = 0.15  # inches that a rank's number wants


def cube(mesh: dict[str, int], rank: int | None = None) -> Cube:
    """The n k m multiplications of Y = X A as a cuboid, each rank's part of it, and who stores X, A and Y.

    Args:
        mesh: three dimensions and their sizes, {"i": 2, "j": 2, "l": 2}: the first cuts tokens n, downwards,
            the second output features m, to the right, the third input features k, into the depth.
        rank: whose part is picked: its multiplications and, framed on each face, the block that they need. Of
            that block it stores one cell; the others along a mesh dimension store the rest. None: all alike.

    A cell of a face is in the colour of the one rank that stores it. Tokens of X are cut by the second
    dimension too, those of Y by the third, and A's output features by the first.

    Raises:
        ValueError: not three dimensions, or no such rank.
    """
    if len(mesh) != 3:
        raise ValueError(f"the mesh has {len(mesh)} dimensions, not three; give those of size 1 too")
    if rank is not None and not 0 <= rank < prod(mesh.values()):
        raise ValueError(f"rank {rank} is not one of the {prod(mesh.values())} ranks of mesh={mesh}")
    return Cube(dict(mesh), rank)


def cube_picker(mesh: dict[str, int]) -> Slider:
    """`cube` under a slider that picks the rank.

    It moves only while a kernel runs, so a lesson shows a still picture beside it.
    """
    import ipywidgets

    drawn = lru_cache(None)(lambda rank: cube(mesh, rank).quick_png())
    image = ipywidgets.Image(value=drawn(0), format="png", layout={"width": "860px", "max_width": "100%"})
    slider = ipywidgets.IntSlider(0, 0, prod(mesh.values()) - 1, description="rank")
    slider.observe(lambda change: setattr(image, "value", drawn(change["new"])), "value")
    return Slider(f"<slider: {cube(mesh).title}, a rank at a time; run the cell to move it>",
                  ipywidgets.VBox([slider, image]))


@dataclass(repr=False)
class Cube(Drawing):
    """The cuboid and its faces; see `cube`."""

    mesh: dict[str, int]
    rank: int | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        return tuple(self.mesh.values())

    @property
    def title(self) -> str:
        cut = " × ".join(map(str, self.sizes)) + " cuboids of multiplications"
        return cut if self.rank is None else f"{cut}: {ranks_text([self.rank])}"

    def place(self, rank: int) -> tuple[int, int, int]:
        """Where a rank is along the three dimensions."""
        _, across, deep = self.sizes
        return rank // (across * deep), rank // deep % across, rank % deep

    def cells(self, face: str) -> dict[int, tuple[tuple[float, float], tuple[float, float]]]:
        """For each rank the two ranges of its cell on face "X", "A" or "Y", in parts of the sides.

        X: tokens, in_features. A: in_features, out_features. Y: tokens, out_features.
        """
        i, j, l = self.sizes
        found = {}
        for rank in range(i * j * l):
            a, b, c = self.place(rank)
            found[rank] = {"X": (_range(a * j + b, i * j), _range(c, l)),
                           "A": (_range(c, l), _range(b * i + a, j * i)),
                           "Y": (_range(a * l + c, i * l), _range(b, j))}[face]
        return found

    def mates(self, face: str) -> list[int]:
        """The ranks whose cells of this face make the block that the picked rank works with."""
        along = "AXY".index(face)  # A is shared along the first dimension, X along the second, Y the third
        own = self.place(self.rank)
        return [rank for rank in range(prod(self.sizes))
                if all(mine == other or dim == along
                       for dim, (mine, other) in enumerate(zip(own, self.place(rank))))]

    @property
    def alt(self) -> str:
        names = list(self.mesh)
        lines = [f"mesh {', '.join(f'{name}={size}' for name, size in self.mesh.items())}: {names[0]} cuts "
                 f"tokens, {names[1]} output features, {names[2]} input features."]
        if self.rank is not None:
            lines += [self._block_text(face) for face in "XAY"]
        return "\n".join(lines)

    def _block_text(self, face: str) -> str:
        """Whom the picked rank shares its block of this face with."""
        others = [rank for rank in self.mates(face) if rank != self.rank]
        verb = "summed" if face == "Y" else "gathered"
        shared = f"{verb} with {ranks_text(others)}" if others else "its own, nothing is sent"
        return f"Block of {face}: {shared}"

    def figure(self) -> Figure:
        deep = SIDE * ACROSS
        front = (LEFT + SIDE + ROOM, TOP + 2 * SIDE * UP + 0.2)
        figure, axes = canvas(front[0] + SIDE + 2 * deep + 0.7, front[1] + SIDE + 0.75)
        write(axes, 0.2, 0.3, self.title, size=11.5, weight="bold", ha="left")
        for rank in sorted(range(prod(self.sizes)), key=self._nearness):
            self._cuboid(axes, front, rank)
        corners = {"Y": (LEFT, front[1]), "X": (front[0] + SIDE + deep + 0.3, front[1]),
                   "A": (front[0], TOP + SIDE * UP)}
        for face, corner in corners.items():
            self._face(axes, face, corner)
        self._words(axes, front, corners)
        return figure

    def _nearness(self, rank: int) -> tuple[int, ...]:
        """What is nearer is drawn later, the picked one last: the others are pale, and it lies open."""
        a, b, c = self.place(rank)
        return rank == self.rank, -c, -a, b

    def _cuboid(self, axes: Axes, front: Point, rank: int) -> None:
        """One rank's multiplications: the three sides of its cuboid that are seen."""
        n, m, k = ((low + PAD / 2, high - PAD / 2) for low, high in map(_range, self.place(rank), self.sizes))
        sides = ([(n[0], m[0], k[0]), (n[0], m[1], k[0]), (n[1], m[1], k[0]), (n[1], m[0], k[0])],
                 [(n[0], m[0], k[0]), (n[0], m[1], k[0]), (n[0], m[1], k[1]), (n[0], m[0], k[1])],
                 [(n[0], m[1], k[0]), (n[1], m[1], k[0]), (n[1], m[1], k[1]), (n[0], m[1], k[1])])
        for corners in sides:
            _patch(axes, [_project(front, *corner) for corner in corners], rank, self.rank in (None, rank))

    def _face(self, axes: Axes, face: str, corner: Point) -> None:
        """A matrix, each cell in the colour of the rank that stores it, the picked rank's block framed."""
        needed = self.mates(face) if self.rank is not None else []
        cells = self.cells(face)
        for rank, ranges in cells.items():
            corners = _corners(face, corner, ranges)
            strong = self.rank is None or rank in needed
            _patch(axes, corners, rank, strong)
            if _room(corners) > SMALLEST:
                own = rank == self.rank
                write(axes, *_middle(corners), str(rank), weight="bold" if own else "normal",
                      color=ink_on(rank_colour(rank)) if strong else FAINT)
        if needed:
            spans = [zip(*(cells[rank][dim] for rank in needed)) for dim in (0, 1)]
            block = [(min(starts), max(stops)) for starts, stops in spans]
            axes.add_artist(Polygon(_corners(face, corner, block), fill=False, edgecolor=INK, linewidth=2.4))

    def _words(self, axes: Axes, front: Point, corners: dict[str, Point]) -> None:
        i, j, l = self.mesh.items()
        foot, deep = front[1] + SIDE, (SIDE * ACROSS, SIDE * UP)
        (y_left, y_top), (x_left, x_top), (a_left, a_top) = (corners[face] for face in "YXA")
        write(axes, y_left, y_top - 0.18, "Y", size=11.5, weight="bold", ha="left")
        write(axes, x_left - 0.05, x_top - 0.18, "X", size=11.5, weight="bold")
        write(axes, a_left - 0.2, a_top, "A", size=11.5, weight="bold", ha="left")
        write(axes, y_left - 0.25, y_top + SIDE / 2, "tokens n", rotation=90)
        write(axes, y_left + SIDE / 2, foot + 0.22, "out_features m")
        write(axes, front[0] - 0.22, y_top + SIDE / 2, f"n over {i[0]} = {i[1]}", rotation=90)
        write(axes, front[0] + SIDE / 2, foot + 0.22, f"m over {j[0]} = {j[1]}")
        write(axes, front[0] + SIDE + deep[0] * 0.5, foot - deep[1] * 0.5 + 0.16, f"k over {l[0]} = {l[1]}",
              rotation=degrees(atan2(UP, ACROSS)), rotation_mode="anchor")
        write(axes, x_left + deep[0] * 0.5, foot + 0.22, "in_features k")
        if self.rank is not None:
            a, b, c = self.place(self.rank)
            said = (f"{ranks_text([self.rank])} is at {i[0]} = {a}, {j[0]} = {b}, {l[0]} = {c}. A cell's "
                    "number: who stores it. Framed: the block that this rank works with.")
            write(axes, 0.2, foot + 0.55, said, ha="left", color=FAINT)


def _range(index: int, parts: int) -> tuple[float, float]:
    return index / parts, (index + 1) / parts


def _project(corner: Point, n: float, m: float, k: float) -> Point:
    """Inches of a point of the cuboid whose front upper left is `corner`; n, m, k in parts of a side."""
    return corner[0] + SIDE * (m + ACROSS * k), corner[1] + SIDE * (n - UP * k)


def _corners(face: str, corner: Point, ranges: Sequence[tuple[float, float]]) -> list[Point]:
    (a, b), (c, d) = ranges
    turn = [(a, c), (a, d), (b, d), (b, c)]
    where = {"X": lambda n, k: (n, 0, k), "A": lambda k, m: (0, m, k), "Y": lambda n, m: (n, m, 0)}[face]
    return [_project(corner, *where(*point)) for point in turn]


def _patch(axes: Axes, corners: list[Point], rank: int, strong: bool) -> None:
    colour = rank_colour(rank)
    axes.add_artist(Polygon(corners, facecolor=to_rgba(colour, 1 if strong else PALE), linewidth=0.9,
                            edgecolor=PAPER if strong else "#C4C4C4", hatch=rank_hatch(rank),
                            hatchcolor=ink_on(colour)))


def _middle(corners: list[Point]) -> Point:
    return sum(x for x, _ in corners) / 4, sum(y for _, y in corners) / 4


def _room(corners: list[Point]) -> float:
    """Inches that are free around the middle of a parallelogram, across and down."""
    (x0, y0), (x1, y1), _, (x3, y3) = corners
    area = abs((x1 - x0) * (y3 - y0) - (x3 - x0) * (y1 - y0))
    return min(area / max(abs(y1 - y0), abs(y3 - y0), 1e-9), area / max(abs(x1 - x0), abs(x3 - x0), 1e-9))
