"""Message size against time and bandwidth: the line of alpha and beta under sliders, measured points upon it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from tpcourse.show.bars import bytes_text
from tpcourse.show.colours import INK
from tpcourse.show.controls import Control, Frame, Sliders, place, spread
from tpcourse.show.curves import time_text
from tpcourse.show.figure import dress

STEPS = [2 ** (k / 2) for k in range(-6, 7)]  # of the sliders, around the fit
Points = tuple[tuple[float, float], ...]


def bandwidth(seconds: Callable[[float, float, float, int], float],
              measured: Mapping[int, Iterable[tuple[float, float]]], fit: tuple[float, float],
              title: str) -> Bandwidth:
    """Message size against time, and against the bytes a second that you get; all axes logarithmic.

    Args:
        seconds: seconds(size, alpha, beta, ranks), affine in the size in bytes: the lines.
        measured: for each number of ranks (bytes, seconds) of its messages: the marks. A number without
            messages has lines only.
        fit: alpha in seconds and beta in seconds per byte, where the sliders begin; they reach 8 times as far.
        title: what stands above the figure.

    The rule is where half of the bandwidth is reached. Its last value in a cell shows the sliders;
    `.at(alpha, beta, ranks)` is a still picture, `.at()` the one at the fit.
    Raises ValueError if nothing was measured, or for a fit that is not positive.
    """
    points = {ranks: tuple(sorted(found)) for ranks, found in measured.items()}
    if not any(points.values()) or min(fit) <= 0:
        raise ValueError(f"{sum(map(len, points.values()))} points and a fit of {fit}; measure some messages, and "
                         "give alpha and beta above 0")
    return Bandwidth(seconds, points, fit, title)


@dataclass(repr=False)
class Bandwidth(Sliders):
    """See `bandwidth`."""

    seconds: Callable[[float, float, float, int], float]
    measured: dict[int, Points]
    fit: tuple[float, float]
    title: str

    @cached_property
    def controls(self) -> tuple[Control, ...]:
        alphas, betas = (tuple(value * step for step in STEPS) for value in self.fit)
        return (Control("α", alphas, time_text), Control("1/β", betas, lambda beta: _speed_text(1 / beta)),
                Control("ranks P", tuple(self.measured)))

    @cached_property
    def sizes(self) -> np.ndarray:
        """Bytes of the lines' points, a little further than was measured."""
        sizes = [size for points in self.measured.values() for size, _ in points]
        return np.geomspace(min(sizes) / 4, max(sizes) * 16, 60)

    def half(self, *values) -> float:
        """The bytes at which half of the bandwidth is reached."""
        start = self.seconds(0, *values)
        return start / (self.seconds(1, *values) - start)

    def frame(self) -> Frame:
        return _Frame(self)

    def words(self, alpha: float, beta: float, ranks: int) -> str:
        half, points = self.half(alpha, beta, ranks), self.measured[ranks]
        lines = [place([self.moved[2]], [ranks]) + f", α = {time_text(alpha)}, 1/β = {_speed_text(1 / beta)}: "
                 f"half of the bandwidth from {bytes_text(half)} on"]
        for size, took in points:
            said = self.seconds(size, alpha, beta, ranks)
            lines.append(f"{bytes_text(size)}: {time_text(said)}, measured {time_text(took)}")
        return "\n".join(lines)


class _Frame(Frame):
    """Time on the left, bandwidth on the right; a line, marks and a rule on each."""

    def __init__(self, of: Bandwidth) -> None:
        super().__init__(8.8, 4.8)
        self.of, self.halves = of, self.figure.subplots(1, 2)
        time, speed = self.halves
        dress(time, "", "message size", "time", 10.5)
        self.head(time, of)
        dress(speed, "", "message size", "message bytes a second", 10.5)
        times, speeds = self._limits()
        _scale(time, 10, time_text, of.sizes, times)
        _scale(speed, 2, _speed_text, of.sizes, speeds)
        self.curves = [self.curve(axes, "#6E6E6E", "-", "o") for axes in self.halves]
        for _, marks in self.curves:
            marks.set(color=INK, zorder=3)
        rule = {"color": "#8F8F8F", "linewidth": 1.2, "linestyle": "--"}
        self.rules = [self.add(axes.axvline(1, **rule)) for axes in self.halves]
        self.words = self.text(speed, 0, 1.04, va="bottom", fontsize=10)
        self.figure.legend([*self.curves[0], self.rules[0]], ["by α and β", "measured", "half of the bandwidth"],
                           loc="outside lower center", ncols=3, fontsize=10, frameon=False)
        self.settle(0, 1)

    def _limits(self) -> list[tuple[float, float]]:
        """Of times and of bandwidths, whatever the sliders say."""
        ends = [(self.of.sizes[0], self.of.sizes[-1]), *(control.values for control in self.of.controls)]
        found = [(size, self.of.seconds(size, *rest)) for size, *rest in spread(ends)]
        found += [point for points in self.of.measured.values() for point in points]
        times, speeds = [took for _, took in found], [size / took for size, took in found]
        return [(min(values) / 1.5, max(values) * 1.5) for values in (times, speeds)]

    def move(self, alpha: float, beta: float, ranks: int) -> None:
        sizes, points = self.of.sizes, np.array(self.of.measured[ranks]).reshape(-1, 2)
        times = np.array([self.of.seconds(size, alpha, beta, ranks) for size in sizes])
        (time, timed), (speed, speeds) = self.curves
        time.set_data(sizes, times)
        speed.set_data(sizes, sizes / times)
        timed.set_data(points[:, 0], points[:, 1])
        speeds.set_data(points[:, 0], points[:, 0] / points[:, 1])
        half = self.of.half(alpha, beta, ranks)
        for rule in self.rules:
            rule.set_xdata([half, half])
        self.words.set_text(f"half of the bandwidth from {bytes_text(half)} on")


def _scale(axes: Axes, base: int, text: Callable[[float], str], sizes: np.ndarray,
           limits: tuple[float, float]) -> None:
    """Both axes logarithmic: sizes in bytes across, and upwards what `text` writes, to this base."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=base)
    axes.set(xlim=(sizes[0], sizes[-1]), ylim=limits)
    for axis, root, ticks, write in ((axes.xaxis, 2, 5, bytes_text), (axes.yaxis, base, 9, text)):
        axis.set_major_locator(LogLocator(base=root, numticks=ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _, write=write: write(value)))


def _speed_text(speed: float) -> str:
    return f"{bytes_text(speed)}/s"
