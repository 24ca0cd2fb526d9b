"""A map of who sends least over two sizes, with sliders for others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from tpcourse.show.colours import INK
from tpcourse.show.controls import Control, Frame, Sliders, names, place, spread
from tpcourse.show.figure import Picture, dress

SHADES = (("#F2F2F2", ""), ("#8C8C8C", "///"), ("#C9C9C9", "..."), ("#4D4D4D", "xx"), ("#FFFFFF", "\\\\"),
          ("#ABABAB", "++"))
EDGE = "#9A9A9A"
SAME, OTHER = {"marker": "D", "markersize": 6, "color": INK}, {"marker": "X", "markersize": 8, "color": INK}
NOWHERE = Path([(0, 0)])
Costs = Mapping[str, float]
Axis = tuple[str, Sequence[int]]  # what it is called, and its values


def winners(cost: Callable[[int, int], Costs], across: Axis, up: Axis, title: str,
            counted: Mapping[tuple, Costs] = {}) -> Picture:
    """A field for each pair of sizes, in the shade of the name that costs least there.

    Args:
        cost: cost(x, y) says what each name costs; up to six names.
        across, up: what each axis is called, and its values.
        title: what stands above the figure.
        counted: by (x, y) what was counted: a mark says whether the same name costs least.

    In each field stands how many times as much the next best costs; a thick line is where the winner changes.
    Raises ValueError for less than two names, or more than six.
    """
    return winners_sliders(cost, across, up, {}, title, counted).at()


def winners_sliders(cost: Callable[..., Costs], across: Axis, up: Axis, others: Mapping[str, Sequence[int]],
                    title: str, counted: Mapping[tuple, Costs] = {}) -> Winners:
    """`winners` under a slider for each other size: cost(x, y, *others), and `counted` by the same.

    For a name that cannot be, cost says nothing. Its last value in a cell shows the sliders; `.at(*others)` is
    a still picture. Raises ValueError as `winners` does.
    """
    controls = tuple(Control(name, tuple(values)) for name, values in others.items())
    found = Winners(lru_cache(None)(cost), across, up, controls, title, dict(counted))
    if not 2 <= len(found.names) <= len(SHADES):
        raise ValueError(f"{len(found.names)} names, but this map tells 2 to {len(SHADES)} apart")
    return found


@dataclass(repr=False)
class Winners(Sliders):
    """See `winners_sliders`."""

    cost: Callable[..., Costs]
    across: Axis
    up: Axis
    controls: tuple[Control, ...]
    title: str
    counted: dict[tuple, Costs]

    @cached_property
    def names(self) -> list[str]:
        """The names in order."""
        sizes = [self.across[1], self.up[1], *(control.values for control in self.controls)]
        return names(self.cost(*at) for at in spread(sizes))

    @property
    def fields(self) -> Iterator[tuple[int, int]]:
        """The sizes of each field, row by row."""
        return ((x, y) for y, x in product(self.up[1], self.across[1]))

    def best(self, costs: Costs) -> str | None:
        """Who costs least; the first of equals, nobody of none."""
        return min((name for name in self.names if name in costs), key=costs.get, default=None)

    def frame(self) -> Frame:
        return _Frame(self)

    def words(self, *others) -> str:
        rows = {y: [] for y in self.up[1]}
        for x, y in self.fields:
            best, counted = self.best(self.cost(x, y, *others)), self.counted.get((x, y, *others))
            rows[y].append(f"{x:,}: {best or 'nobody'}" + (f" (counted: {self.best(counted)})" if counted else ""))
        where = place(self.moved, others) + ". " if others else ""
        lines = [f"{self.up[0]} {y:,}: " + ", ".join(won) for y, won in rows.items()]
        return f"{where}{self.across[0]}, and who costs least.\n" + "\n".join(reversed(lines))


class _Frame(Frame):
    """Fields with their numbers, the line between winners, and the marks.

    Hatching takes long, so all fields of a winner are one area.
    """

    def __init__(self, of: Winners) -> None:
        (xlabel, xs), (ylabel, ys) = of.across, of.up
        super().__init__(8.8, 1.7 + 0.2 * bool(of.controls) + 0.37 * len(ys))
        self.of, self.axes = of, self.figure.add_subplot()
        dress(self.axes, "", xlabel, ylabel, 10.5)
        self.head(self.axes, of)
        self.axes.set(xlim=(-0.5, len(xs) - 0.5), ylim=(-0.5, len(ys) - 0.5))
        self.axes.set_xticks(range(len(xs)), [f"{x:,}" for x in xs])
        self.axes.set_yticks(range(len(ys)), [f"{y:,}" for y in ys])
        self.axes.grid(visible=False)
        self.axes.spines[:].set_visible(False)
        places = [(column, row) for row in range(len(ys)) for column in range(len(xs))]
        areas = [PathPatch(NOWHERE, facecolor=shade, hatch=hatch, edgecolor=EDGE) for shade, hatch in SHADES]
        self.areas = [self.add(self.axes.add_patch(area)) for area in areas[:len(of.names)]]
        style = {"ha": "center", "va": "center", "fontsize": 9.5, "color": INK,
                 "bbox": {"facecolor": "#FFFFFF", "edgecolor": "none", "pad": 1.2}}
        self.ratios = [self.add(self.axes.text(*at, "", **style)) for at in places]
        self.line = self.add(self.axes.add_collection(LineCollection([], colors=INK, linewidths=3, zorder=2.6)))
        self.marks = [self.add(self.axes.plot([], [], linestyle="", **style)[0]) for style in (SAME, OTHER)]
        self.figure.legend(handles=self._handles(), loc="outside lower center", ncols=6, fontsize=10, frameon=False)
        self.settle(0, 1)

    def _handles(self) -> list:
        handles = [Patch(facecolor=shade, hatch=hatch, edgecolor=EDGE, label=name)
                   for name, (shade, hatch) in zip(self.of.names, SHADES)]
        if self.of.counted:
            handles += [Line2D([], [], linestyle="", label=label, **style)
                        for label, style in (("counted: the same", SAME), ("counted: another", OTHER))]
        return handles

    def move(self, *others) -> None:
        won, marks = [], ([], [])
        for text, (x, y) in zip(self.ratios, self.of.fields):
            costs, counted = self.of.cost(x, y, *others), self.of.counted.get((x, y, *others))
            won.append(self.of.best(costs))
            text.set_text(_ratio(costs))
            if counted:
                column, row = text.get_position()
                marks[self.of.best(counted) != won[-1]].append((column - 0.36, row))
        for name, area in zip(self.of.names, self.areas):
            fields = [_field(*text.get_position()) for text, best in zip(self.ratios, won) if best == name]
            area.set_path(Path.make_compound_path(*fields) if fields else NOWHERE)
        for artist, places in zip(self.marks, marks):
            artist.set_data([x for x, _ in places], [y for _, y in places])
        self.line.set_segments(_borders(won, len(self.of.across[1])))


def _field(column: float, row: float) -> Path:
    left, right, low, high = column - 0.5, column + 0.5, row - 0.5, row + 0.5
    return Path([(left, low), (right, low), (right, high), (left, high), (left, low)], closed=True)


def _ratio(costs: Costs) -> str:
    """How many times as much the second costs; if there is none, whether there is a first."""
    best, *others = sorted(costs.values()) or [None]
    return f"{others[0] / best:.3g}" if others and best else "none" if best is None else "only"


def _borders(won: Sequence[str | None], columns: int) -> list[list[tuple[float, float]]]:
    """The edges between fields, given row by row, that different names won."""
    edges = []
    for index, name in enumerate(won):
        row, column = divmod(index, columns)
        if column + 1 < columns and won[index + 1] != name:
            edges.append([(column + 0.5, row - 0.5), (column + 0.5, row + 0.5)])
        if index + columns < len(won) and won[index + columns] != name:
            edges.append([(column - 0.5, row + 0.5), (column + 0.5, row + 0.5)])
    return edges
