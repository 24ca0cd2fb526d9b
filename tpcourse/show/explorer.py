"""Bytes over any one size, with a slider for each of the others: formulas as lines, what was counted as marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from matplotlib.ticker import FixedLocator

from tpcourse.show.bars import bytes_text
from tpcourse.show.colours import INK
from tpcourse.show.controls import TEXT, Control, Frame, Sliders, names, place, spread
from tpcourse.show.figure import dress
from tpcourse.show.growth import PENS, scale

Costs = Mapping[str, float]


def explorer(cost: Callable[..., Costs], counted: Mapping[tuple, Costs], along: tuple[str, Sequence[int]],
             others: Mapping[str, Sequence[int]], title: str) -> Explorer:
    """Bytes by name over one size, both axes logarithmic; the scale of bytes stays while sliders move.

    Args:
        cost: cost(x, *others) says the bytes of up to six names; for a name that cannot be, none.
        counted: by the same arguments as a tuple, bytes that were counted: marks upon the lines.
        along: what the size is called that the axis shows at first, and its values.
        others: what each other size is called, and its values. The buttons "against" put any of them on the axis.
        title: what stands above the figure.

    Its last value in a cell shows sliders and buttons; `explorer(...).at(x, *others)` is a still picture, and
    `.at(x, *others, name)` one against the size of that name.
    Raises ValueError for more names than pens.
    """
    sizes = {along[0]: tuple(along[1])} | {name: tuple(values) for name, values in others.items()}
    found = Explorer(lru_cache(None)(cost), dict(counted), sizes, title)
    if not 1 <= len(found.names) <= len(PENS):
        raise ValueError(f"{len(found.names)} names, but this plot tells 1 to {len(PENS)} apart")
    return found


@dataclass(repr=False)
class Explorer(Sliders):
    """See `explorer`."""

    cost: Callable[..., Costs]
    counted: dict[tuple, Costs]
    sizes: dict[str, tuple[int, ...]]
    title: str

    @cached_property
    def controls(self) -> tuple[Control, ...]:
        against = Control("against", tuple(self.sizes), str, listed=True)
        return (*(Control(*size) for size in self.sizes.items()), against)

    @property
    def moved(self) -> list[str]:
        return list(self.sizes)

    @cached_property
    def reach(self) -> list[Costs]:
        """Costs at places enough to know the names and the limits."""
        return [self.cost(*sizes) for sizes in spread(list(self.sizes.values()))]

    @cached_property
    def names(self) -> list[str]:
        """The names in order."""
        return names(self.reach)

    def frame(self) -> Frame:
        return _Frame(self)

    def words(self, *values) -> str:
        """The numbers of one place, and those that were counted there."""
        *sizes, against = values
        counted = self.counted.get(tuple(sizes), {})
        also = "" if against == self.moved[0] else f", against {against}"
        lines = [place(self.moved, sizes) + also + ":"]
        for name, size in self.cost(*sizes).items():
            also = f", counted {bytes_text(counted[name])}" if name in counted else ""
            lines.append(f"{name}: {bytes_text(size)}{also}")
        return "\n".join(lines)


class _Frame(Frame):
    """Axes, and upon them a line and marks for each name, and a rule where the sliders are."""

    def __init__(self, of: Explorer) -> None:
        super().__init__(8.8, 4.6)
        self.of = of
        self.axes = self.figure.add_axes((0.13, 0.135, 0.54, 0.72))
        self._dress()
        self.rule = self.add(self.axes.axvline(1, color="#B0B0B0", linewidth=1))
        self.head = self.text(self.axes, 1.05, 0.95, fontweight="bold")
        self.curves, self.texts = [], []
        for row, (name, pen) in enumerate(zip(of.names, PENS)):
            y = 0.84 - 0.15 * row
            line, marks = self.curve(self.axes, *pen)
            line.set_zorder(2.5 - 0.1 * row)  # seen through the gaps of those before
            self.curves.append((line, marks))
            self._key(name, y, *pen)
            self.texts.append(self.text(self.axes, 1.17, y - 0.06))

    def _key(self, name: str, y: float, colour: str, dash: str, mark: str) -> None:
        where = {"transform": self.axes.transAxes}
        self.axes.plot([1.05, 1.14], [y, y], dash, marker=mark, markersize=7, linewidth=2.4, color=colour,
                       clip_on=False, **where)
        self.axes.text(1.17, y, name, fontsize=TEXT, color=INK, va="center", **where)

    def _dress(self) -> None:
        """Limits of the bytes that hold whatever the sliders say."""
        dress(self.axes, "", "", "bytes that one rank sends", 11)
        self.head(self.axes, self.of)
        sizes = [size for costs in self.of.reach for size in costs.values() if size]
        scale(self.axes, [])
        self.axes.set_ylim(min(sizes) / 1.6, max(sizes) * 1.6)

    def move(self, *values) -> None:
        *sizes, against = values
        axis = self.of.moved.index(against)
        x, xs = sizes[axis], self.of.sizes[against]
        self.axes.set(xlim=(xs[0] / 1.3, xs[-1] * 1.3), xlabel=against)
        self.axes.xaxis.set_major_locator(FixedLocator(xs))
        along = {value: (*sizes[:axis], value, *sizes[axis + 1:]) for value in xs}
        costs = {value: self.of.cost(*sizes) for value, sizes in along.items()}
        counted = {value: self.of.counted.get(sizes, {}) for value, sizes in along.items()}
        self.rule.set_xdata([x, x])
        self.head.set_text(f"at {against} = {x:,}")
        for name, (line, marks), text in zip(self.of.names, self.curves, self.texts):
            line.set_data(*_points(costs, name))
            marks.set_data(*_points(counted, name))
            text.set_text(bytes_text(costs[x][name]) if name in costs[x] else "not with these sizes")


def _points(costs: Mapping[int, Costs], name: str) -> tuple[list[int], list[float]]:
    found = [(x, sizes[name]) for x, sizes in costs.items() if name in sizes]
    return [x for x, _ in found], [size for _, size in found]
