"""Curves laid over each other, and time against bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from tpcourse.show.bars import bytes_text
from tpcourse.show.colours import INK
from tpcourse.show.figure import Picture, chart

# Each curve is thinner and darker than the one under it, so that curves which coincide are all seen.
PENS = (
    dict(color="#C4C4C4", linewidth=7, solid_capstyle="round"),
    dict(color=INK, linewidth=1.6),
    dict(color="#8C8C8C", linewidth=1.6, linestyle="--"),
    dict(color=INK, linewidth=1.6, linestyle=":"),
)


def curves(values: Mapping[str, Sequence[float]], xlabel: str, ylabel: str, title: str) -> Picture:
    """Up to four curves over 0, 1, 2, ..., the first thick and pale, the later ones thin upon it.

    Args:
        values: a name and the values of each curve.
        xlabel, ylabel: what the axes count, with the unit.
        title: what stands above the figure.

    Raises:
        ValueError: no curve, an empty one, or more than four.
    """
    if not 1 <= len(values) <= len(PENS):
        raise ValueError(f"{len(values)} curves, but this plot tells 1 to {len(PENS)} apart")
    figure, axes = chart(7, 3.8, title, xlabel, ylabel)
    words = [f"{ylabel} against {xlabel}."]
    for (name, curve), pen in zip(values.items(), PENS):
        curve = [float(value) for value in curve]
        if not curve:
            raise ValueError(f"curve {name!r} has no values")
        axes.plot(curve, label=name, **pen)
        words.append(f"{name}: {len(curve)} points, first {curve[0]:.3g}, last {curve[-1]:.3g}")
    axes.legend(fontsize=9.5, frameon=False)
    return Picture(title, "\n".join(words), figure)


def time_against_bytes(points: Iterable[tuple[float, float]], fit: tuple[float, float] | None = None,
                       title: str = "Time against message size") -> Picture:
    """Measured times over message sizes on logarithmic axes, with the fitted line alpha + beta * bytes.

    Args:
        points: (bytes, seconds) of each measurement.
        fit: alpha in seconds and beta in seconds per byte, as `tpcourse.measure.fit_alpha_beta` returns them.
        title: what stands above the figure.
    """
    sizes, seconds = np.array(sorted(points), dtype=float).T
    figure, axes = chart(7, 4, title, "message size (1 KiB = 1024 bytes)", "time (µs, ms, s)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.plot(sizes, seconds, "o", color=INK, markersize=5.5, label="measured", zorder=3)
    words = [f"{len(sizes)} messages of {bytes_text(sizes[0])} to {bytes_text(sizes[-1])}: "
             f"{time_text(seconds[0])} to {time_text(seconds[-1])}."]
    if fit is not None:
        alpha, beta = fit
        line = np.geomspace(sizes[0], sizes[-1], 200)
        words.append(f"fit: α = {time_text(alpha)}, β = {beta * 1e9:.3g} ns/byte")
        axes.plot(line, alpha + beta * line, color="#8C8C8C", linewidth=4, label=words[-1])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(value)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: time_text(value)))
    axes.legend(fontsize=9.5, frameon=False)
    return Picture(title, "\n".join(words), figure)


def time_text(seconds: float) -> str:
    """Seconds as a person reads them: 2 s, 15 ms, 250 µs."""
    scale, unit = next(((s, u) for s, u in ((1, "s"), (1e-3, "ms")) if abs(seconds) >= s), (1e-6, "µs"))
    return f"{seconds / scale:.3g} {unit}"
