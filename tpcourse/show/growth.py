"""How bytes grow or fall with the number of ranks: formulas as lines, what was counted as points on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from tpcourse.show.bars import bytes_text
from tpcourse.show.colours import INK
from tpcourse.show.figure import Picture, chart

# Greys, for colours mean ranks: grey, dash and mark tell them apart. The palest has a contrast of 3 with the paper.
PENS = (("#8F8F8F", "-", "o"), (INK, "-", "s"), ("#6E6E6E", "--", "^"), (INK, ":", "D"), ("#8F8F8F", "-.", "v"),
        (INK, "--", "P"))


def growth(lines: Mapping[str, Mapping[int, float]], points: Mapping[str, Mapping[int, float]], title: str,
           ylabel: str = "bytes that one rank sends", xlabel: str = "ranks P") -> Picture:
    """Bytes against the number of ranks P, or another size, both axes logarithmic.

    Args:
        lines: by name the predicted bytes for each P, drawn as a line.
        points: by the same names bytes that were counted for some P, drawn upon it as marks.
        title: what stands above the figure.
        ylabel: whose bytes they are.
        xlabel: what the size is; its last word is the symbol.

    Raises:
        ValueError: no line, more than six, or points without a line of that name.
    """
    if not 1 <= len(lines) <= len(PENS):
        raise ValueError(f"{len(lines)} lines, but this plot tells 1 to {len(PENS)} apart")
    if set(points) - set(lines):
        without = ", ".join(sorted(set(points) - set(lines)))
        raise ValueError(f"points {without} have no line; there are {', '.join(lines)}")
    figure, axes = chart(7, 4, title, xlabel, ylabel)
    scale(axes, sorted({p for line in lines.values() for p in line}))
    words, symbol = [f"{ylabel} against {xlabel}; predicted, and counted."], xlabel.split()[-1]
    for (name, line), (colour, dash, mark) in zip(lines.items(), PENS):
        axes.plot(*zip(*sorted(line.items())), color=colour, linestyle=dash, linewidth=2, label=name)
        found = points.get(name, {})
        if found:
            axes.plot(*zip(*sorted(found.items())), mark, color=colour, markersize=6)
        words.append(f"{name}: " + ", ".join(f"{symbol} = {p}: {bytes_text(line[p])}" + (
            f" (counted {bytes_text(found[p])})" if p in found else "") for p in sorted(line)))
    axes.legend(fontsize=9.5, frameon=False)
    return Picture(title, "\n".join(words), figure)


def scale(axes: Axes, sizes: Sequence[float]) -> None:
    """Sizes across, with a tick for each, and bytes upwards, both logarithmic."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(value)))
