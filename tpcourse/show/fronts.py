"""Seconds against bytes: ways to do something, and the front of those that no other beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpcourse.show.colours import INK
from tpcourse.show.curves import time_text
from tpcourse.show.figure import Picture, chart
from tpcourse.show.growth import PENS
from tpcourse.show.planner import gigabytes

MB = 1e6


def fronts(ways: Mapping[str, Sequence[tuple[float, float]]], front: Sequence[tuple[float, float]],
           title: str) -> Picture:
    """Ways as marks, a kind of mark for each name, and the front as a line of steps.

    ways: by name (seconds, bytes) of each way. front: the same of those that are left, the emptiest first.
    Raises ValueError for no front, and for more names than marks.
    """
    if not front or len(ways) > len(PENS):
        raise ValueError(f"{len(front)} ways on the front and {len(ways)} names; there must be a front, and this "
                         f"plot tells 1 to {len(PENS)} names apart")
    figure, axes = chart(7.6, 3.6, title, "bytes held by a rank (MB)", "time (ms)")
    for (name, points), (colour, _, mark) in zip(ways.items(), PENS):
        seconds, nbytes = zip(*points)
        axes.plot([n / MB for n in nbytes], [1e3 * s for s in seconds], mark, color=colour, fillstyle="none",
                  label=name)
    most = max(nbytes for points in ways.values() for _, nbytes in points)
    seconds, nbytes = zip(*front)
    axes.step([n / MB for n in (*nbytes, most)], [1e3 * s for s in (*seconds, seconds[-1])], where="post", color=INK,
              linewidth=1.8, zorder=1)
    axes.plot([n / MB for n in nbytes], [1e3 * s for s in seconds], "D", color=INK, markersize=4.5, label="front")
    axes.legend(fontsize=9, frameon=False)
    words = [f"{sum(map(len, ways.values()))} ways, of which no other beats:"]
    words += [f"{time_text(s)}, {n / MB:,.1f} MB" for s, n in front]
    return Picture(title, "\n".join(words), figure)


def seconds_against_budget(lines: Mapping[str, Mapping[float, float | None]], title: str) -> Picture:
    """What a step takes with so much memory on a rank: by name seconds for each budget, None where nothing fits.

    Raises ValueError for no line or more lines than pens.
    """
    if not 1 <= len(lines) <= len(PENS):
        raise ValueError(f"{len(lines)} lines, but this plot tells 1 to {len(PENS)} apart")
    figure, axes = chart(7.6, 3.6, title, "memory of a rank (GB)", "time of a step (s)")
    words = []
    for (name, points), (colour, dash, mark) in zip(lines.items(), PENS):
        fits = {budget / 1e9: seconds for budget, seconds in points.items() if seconds is not None}
        axes.step(*zip(*fits.items()) if fits else ([], []), dash, where="post", marker=mark, color=colour, label=name)
        said = (f"{gigabytes(budget)} {'nothing fits' if s is None else time_text(s)}" for budget, s in points.items())
        words.append(f"{name}: {', '.join(said)}")
    axes.legend(fontsize=9, frameon=False)
    return Picture(title, "\n".join(words), figure)
