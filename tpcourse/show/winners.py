"""A map of who sends least over two sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.patches import Rectangle

from tpcourse.show.colours import INK
from tpcourse.show.figure import Picture, chart

SHADES = (("#F2F2F2", ""), ("#8C8C8C", "///"), ("#C9C9C9", "..."), ("#4D4D4D", "xx"))


def winners(cost: Callable[[int, int], Mapping[str, float]], across: tuple[str, Sequence[int]],
            up: tuple[str, Sequence[int]], title: str) -> Picture:
    """A field for each pair of sizes, in the shade of the name that costs least there.

    Args:
        cost: cost(x, y) says what each name costs; up to four names.
        across, up: what each axis is called, and its values.
        title: what stands above the figure.

    In each field stands how many times as much the next best costs.
    Raises ValueError for less than two names, or more than four.
    """
    (xlabel, xs), (ylabel, ys) = across, up
    names = list(cost(xs[0], ys[0]))
    if not 2 <= len(names) <= len(SHADES):
        raise ValueError(f"{len(names)} names, but this map tells 2 to {len(SHADES)} apart")
    figure, axes = chart(8.4, 1.6 + 0.36 * len(ys), title, xlabel, ylabel)
    words, seen = [], {}
    for row, y in enumerate(ys):
        won = []
        for column, x in enumerate(xs):
            costs = cost(x, y)
            best, second, *_ = sorted(names, key=costs.get)
            shade, hatch = SHADES[names.index(best)]
            seen[best] = Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=shade, edgecolor="#9A9A9A",
                                   hatch=hatch)
            axes.add_patch(seen[best])
            axes.text(column, row, f"{costs[second] / costs[best]:.3g}", ha="center", va="center", fontsize=9,
                      color=INK, bbox={"facecolor": "#FFFFFF", "edgecolor": "none", "pad": 1.2})
            won.append(f"{x:,}: {best}")
        words.append(f"{ylabel} {y:,}: " + ", ".join(won))
    axes.set(xlim=(-0.5, len(xs) - 0.5), ylim=(-0.5, len(ys) - 0.5))
    axes.set_xticks(range(len(xs)), [f"{x:,}" for x in xs])
    axes.set_yticks(range(len(ys)), [f"{y:,}" for y in ys])
    axes.grid(visible=False)
    handles = {name: seen[name] for name in names if name in seen}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, fontsize=9.5, frameon=False)
    return Picture(title, f"{xlabel}, and who costs least.\n" + "\n".join(reversed(words)), figure)
