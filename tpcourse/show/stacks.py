"""Stacked bars that move: kinds one after the other, and a mark where the whole was counted or measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from tpcourse.show.colours import INK, PAPER
from tpcourse.show.controls import Frame

# Greys, for colours mean ranks; neighbours differ in grey and in hatch.
SHADES = (("#1A1A1A", ""), ("#6E6E6E", "///"), ("#ABABAB", ""), ("#E6E6E6", "..."), ("#8F8F8F", "\\\\\\"),
          ("#FFFFFF", "xxx"), ("#C9C9C9", "+++"), ("#FFFFFF", "---"))
MARK = {"marker": "D", "markersize": 8, "markerfacecolor": PAPER, "markeredgecolor": INK, "markeredgewidth": 1.8}


class Stacks:
    """`bars` bars of up to `kinds` kinds, one below the other at 0, 1, ...; their lengths come later."""

    def __init__(self, frame: Frame, axes: Axes, bars: int, kinds: int) -> None:
        self.cells = [[frame.add(axes.add_patch(Rectangle((0, bar - 0.31), 0, 0.62, **style(shade))))
                       for bar in range(bars)] for shade in SHADES[:kinds]]
        self.marks = frame.add(axes.plot([], [], linestyle="", clip_on=False, **MARK)[0])
        axes.set_ylim(bars - 0.45, -0.55)
        axes.grid(axis="y", visible=False)

    def set(self, lengths: Sequence[Mapping[int, float]], counted: Sequence[float | None]) -> None:
        """For each bar the lengths of its kinds by their numbers, and where its mark is, if it has one."""
        for bar, parts in enumerate(lengths):
            end = 0.0
            for kind, cells in enumerate(self.cells):
                length = parts.get(kind, 0.0)
                cells[bar].set(x=end, width=length, visible=length > 0)
                end += length
        marked = [(where, bar) for bar, where in enumerate(counted) if where is not None]
        self.marks.set_data([where for where, _ in marked], [bar for _, bar in marked])


def keys(kinds: Sequence[str]) -> list[Patch]:
    """A legend's entries for kinds."""
    return [Patch(label=kind, **style(shade)) for kind, shade in zip(kinds, SHADES)]


def mark_key(label: str) -> Line2D:
    """A legend's entry for the marks."""
    return Line2D([], [], linestyle="", label=label, **MARK)


def style(shade: tuple[str, str]) -> dict:
    """Of a patch in one of the shades."""
    return {"facecolor": shade[0], "hatch": shade[1], "edgecolor": INK, "linewidth": 0.8}
