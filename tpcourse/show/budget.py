"""Memory as bars: what one rank holds, stacked by kind, against the memory that there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from matplotlib.lines import Line2D

from tpcourse.show.bars import UNITS, _unit, bytes_text
from tpcourse.show.colours import INK
from tpcourse.show.controls import Control, Frame, Sliders, names, place, spread
from tpcourse.show.figure import Picture, dress
from tpcourse.show.stacks import SHADES, Stacks, keys, mark_key

Held = Mapping[str, Mapping[str, float]]


def budget(held: Held, there: float | None, title: str) -> Picture:
    """A bar for each name, its kinds one after the other, and a line at what is there.

    Args:
        held: for each name the bytes of up to eight kinds, the same for all.
        there: the bytes of a rank's memory, if they are to be drawn.
        title: what stands above the figure.

    Raises:
        ValueError: no bar, more than eight kinds, or bars of different kinds.
    """
    return budget_sliders(lambda: held, {}, {}, there, title).at()


def budget_sliders(held: Callable[..., Held], counted: Mapping[tuple, Mapping[str, float]],
                   sizes: Mapping[str, Sequence[int]], there: float | None, title: str) -> Budget:
    """`budget` under a slider for each size.

    Args:
        held: held(*sizes) says for each name the bytes of up to eight kinds; for a name that cannot be, nothing.
        counted: by the same sizes as a tuple, by name the bytes that were counted together: marks on the bars.
        sizes: what each slider is called, and its values.
        there, title: as for `budget`.

    Its last value in a cell shows the sliders; `.at(*sizes)` is a still picture. The axis grows in steps.
    Raises ValueError as `budget` does.
    """
    controls = tuple(Control(name, tuple(values)) for name, values in sizes.items())
    found = Budget(lru_cache(None)(held), dict(counted), controls, there, title)
    sets = {tuple(kinds) for bars in found.reach for kinds in bars.values()}
    if len(sets) != 1 or not 1 <= len(found.kinds) <= len(SHADES):
        raise ValueError(f"{len(found.names)} bars of {len(sets)} sets of kinds; give at least one bar, all of the "
                         f"same 1 to {len(SHADES)} kinds")
    return found


@dataclass(repr=False)
class Budget(Sliders):
    """See `budget_sliders`."""

    held: Callable[..., Held]
    counted: dict[tuple, Mapping[str, float]]
    controls: tuple[Control, ...]
    there: float | None
    title: str

    @cached_property
    def reach(self) -> list[Held]:
        """What is held at places enough to know the names."""
        return [self.held(*sizes) for sizes in spread([control.values for control in self.controls])]

    @property
    def names(self) -> list[str]:
        """The bars in order."""
        return names(self.reach)

    @property
    def kinds(self) -> list[str]:
        """The kinds in order."""
        return names(kinds for bars in self.reach for kinds in bars.values())

    @property
    def unit(self) -> int:
        """The power of 1024 that is the axis's unit."""
        largest = max(sum(kinds.values()) for bars in self.reach for kinds in bars.values())
        return _unit(largest if self.there is None else self.there)

    def fits(self, total: float) -> bool:
        """Whether so many bytes are there."""
        return self.there is not None and total <= self.there

    def frame(self) -> Frame:
        return _Frame(self)

    def words(self, *sizes) -> str:
        lines = [place(self.moved, sizes) + ":"] if sizes else []
        lines += [] if self.there is None else [f"{bytes_text(self.there)} are there."]
        counted = self.counted.get(sizes, {})
        for name, kinds in self.held(*sizes).items():
            total = sum(kinds.values())
            also = f", counted {bytes_text(counted[name])}" if name in counted else ""
            parts = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in kinds.items())
            fits = "" if self.there is None else ", fits" if self.fits(total) else ", does not fit"
            lines.append(f"{name}: {parts}; together {bytes_text(total)}{also}{fits}")
        return "\n".join(lines)


class _Frame(Frame):
    """Bars, the line of the budget, and beside each bar its total."""

    def __init__(self, of: Budget) -> None:
        super().__init__(8.8, 1.7 + 0.2 * bool(of.controls) + 0.42 * len(of.names))
        self.of, self.scale = of, 1024 ** of.unit
        self.axes = self.figure.add_subplot()
        dress(self.axes, "", f"bytes on one rank ({UNITS[of.unit]})", "", 10.5)
        self.head(self.axes, of)
        self.stacks = Stacks(self, self.axes, len(of.names), len(of.kinds))
        self.axes.set_yticks(range(len(of.names)), of.names)
        beside = {"transform": self.axes.get_yaxis_transform(), "va": "center", "fontsize": 10, "color": INK}
        self.totals = [self.add(self.axes.text(1.015, bar, "", **beside)) for bar in range(len(of.names))]
        handles = keys(of.kinds)
        if of.there is not None:
            line = {"color": INK, "linewidth": 2, "linestyle": "--"}
            self.add(self.axes.axvline(of.there / self.scale, zorder=3, **line))
            handles.append(Line2D([], [], label=f"there: {bytes_text(of.there)}", **line))
        handles += [mark_key("counted")] if of.counted else []
        self.figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=10, frameon=False,
                           columnspacing=1.3)
        self.axes.set_xlim(0, (of.there or 1) / self.scale)
        self.settle(0, 0.83)

    def move(self, *sizes) -> None:
        held, counted = self.of.held(*sizes), self.of.counted.get(sizes, {})
        totals = {name: sum(kinds.values()) for name, kinds in held.items()}
        for name, text in zip(self.of.names, self.totals):
            fits = ", fits" if name in totals and self.of.fits(totals[name]) else ""
            text.set_text(bytes_text(totals[name]) + fits if name in totals else "cannot be")
        bars = [held.get(name, {}).values() for name in self.of.names]
        self.stacks.set([{kind: size / self.scale for kind, size in enumerate(sizes)} for sizes in bars],
                        [counted[name] / self.scale if name in counted else None for name in self.of.names])
        self.axes.set_xlim(0, self._limit([*totals.values(), *counted.values()]))

    def _limit(self, totals: Sequence[float]) -> float:
        """The shortest axis with room for all, of those a quarter longer than the budget, times powers of √2."""
        limit, largest = 1.25 * (self.of.there or 1), max(totals, default=0)
        while limit < 1.03 * largest:
            limit *= 2 ** 0.5
        return limit / self.scale
