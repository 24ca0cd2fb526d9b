"""Memory as bars: what one rank holds, stacked by kind, against the memory that there is."""

from __future__ import annotations

from collections.abc import Mapping

from tpcourse.show.bars import UNITS, _unit, bytes_text
from tpcourse.show.colours import INK
from tpcourse.show.figure import Picture, chart

SHADES = (("#1A1A1A", ""), ("#6E6E6E", "///"), ("#ABABAB", ""), ("#E6E6E6", "..."))  # grey: colours mean ranks


def budget(held: Mapping[str, Mapping[str, float]], there: float | None, title: str) -> Picture:
    """A bar for each name, its kinds one after the other, and a line at what is there.

    Args:
        held: for each name the bytes of up to four kinds, the same kinds for all.
        there: the bytes of a rank's memory, if they are to be drawn.
        title: what stands above the figure.

    Raises:
        ValueError: no bar, more than four kinds, or bars of different kinds.
    """
    kinds = {tuple(sizes) for sizes in held.values()}
    if len(kinds) != 1 or not 1 <= len(next(iter(kinds))) <= len(SHADES):
        raise ValueError(f"{len(held)} bars of {len(kinds)} sets of kinds; give at least one bar, all of the same "
                         f"1 to {len(SHADES)} kinds")
    totals = {name: sum(sizes.values()) for name, sizes in held.items()}
    unit = _unit(max(*totals.values(), there or 0))
    figure, axes = chart(8.4, 1.5 + 0.42 * len(held), title, f"bytes on one rank ({UNITS[unit]})", "")
    starts = dict.fromkeys(held, 0.0)
    for kind, (shade, hatch) in zip(next(iter(kinds)), SHADES):
        sizes = {name: held[name][kind] / 1024 ** unit for name in held}
        axes.barh(list(held), list(sizes.values()), 0.62, list(starts.values()), facecolor=shade, hatch=hatch,
                  edgecolor=INK, linewidth=0.8, label=kind)
        starts = {name: starts[name] + sizes[name] for name in held}
    for name, end in starts.items():
        axes.annotate(bytes_text(totals[name]), (end, name), (5, 0), textcoords="offset points", va="center",
                      fontsize=9.5, color=INK)
    if there is not None:
        axes.axvline(there / 1024 ** unit, color=INK, linewidth=2, linestyle="--",
                     label=f"there: {bytes_text(there)}")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.14)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9.5,
                  frameon=False)
    return Picture(title, _words(held, totals, there), figure)


def _words(held: Mapping[str, Mapping[str, float]], totals: Mapping[str, float], there: float | None) -> str:
    lines = [] if there is None else [f"{bytes_text(there)} are there."]
    for name, sizes in held.items():
        parts = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in sizes.items())
        fits = "" if there is None else ", fits" if totals[name] <= there else ", does not fit"
        lines.append(f"{name}: {parts}; together {bytes_text(totals[name])}{fits}")
    return "\n".join(lines)
