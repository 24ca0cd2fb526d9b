"""The planner under controls: the best plan for a model on a cluster within a budget, as bars and words."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from tpcourse.show.bars import UNITS, _unit, bytes_text
from tpcourse.show.colours import INK
from tpcourse.show.controls import TEXT, Control, Frame, Sliders
from tpcourse.show.curves import time_text
from tpcourse.show.figure import dress
from tpcourse.show.stacks import SHADES, Stacks, style

LINE, LINES = 96, 10  # characters of a line of words, and how many lines there is room for


@dataclass(frozen=True)
class Answer:
    """What the best plan costs: seconds of a step and bytes on a rank, each by up to six kinds, and its words.

    `measured` seconds and `counted` bytes, of a real step or a dry run, are marks on the bars.
    """

    seconds: Mapping[str, float]
    memory: Mapping[str, float]
    words: str
    measured: float | None = None
    counted: float | None = None


def planner(best: Callable[[Any, Any, float], Answer], models: Mapping[str, Any], clusters: Mapping[str, Any],
            budgets: Sequence[float], title: str = "The fastest plan within the budget") -> Planner:
    """The best plan's seconds and bytes as bars, and the plan itself, under buttons for models and clusters and a
    slider of budgets in bytes.

    Args:
        best: best(model, cluster, budget) finds the answer, or raises ValueError that says why nothing fits. It
            is asked once for each triple; while it takes its time, the picture before it is pale.
        models, clusters: by name what `best` is given.
        budgets: bytes of a rank's memory.
        title: what stands above the figure.

    Its last value in a cell shows the controls; `.at(model's name, cluster's name, budget)` is a still picture.
    """
    controls = (Control("model", tuple(models), str, listed=True),
                Control("cluster", tuple(clusters), str, listed=True),
                Control("budget", tuple(budgets), bytes_text))
    return Planner(best, models, clusters, controls, title, {})


@dataclass(repr=False)
class Planner(Sliders):
    """See `planner`; `known` has what was answered, or why there is no answer."""

    best: Callable[[Any, Any, float], Answer]
    models: Mapping[str, Any]
    clusters: Mapping[str, Any]
    controls: tuple[Control, ...]
    title: str
    known: dict[tuple[str, str, float], Answer | str]

    def answer(self, model: str, cluster: str, budget: float) -> Answer | str:
        """The plan, or why there is none."""
        asked = model, cluster, budget
        if asked not in self.known:
            try:
                self.known[asked] = self.best(self.models[model], self.clusters[cluster], budget)
            except ValueError as why:
                self.known[asked] = str(why)
        return self.known[asked]

    def slow(self, *asked) -> bool:
        return asked not in self.known

    def frame(self) -> Frame:
        return _Frame(self)

    def words(self, model: str, cluster: str, budget: float) -> str:
        answer = self.answer(model, cluster, budget)
        lines = [f"{model} on {cluster}, {bytes_text(budget)} a rank:"]
        if isinstance(answer, str):
            return "\n".join([*lines, f"nothing fits: {answer}"])
        lines += [_sum("a step", answer.seconds, time_text, "measured", answer.measured),
                  _sum("memory", answer.memory, bytes_text, "counted", answer.counted)]
        return "\n".join([*lines, answer.words])


class _Frame(Frame):
    """A bar of seconds, a bar of bytes with the budget's line, and the plan in words."""

    def __init__(self, of: Planner) -> None:
        super().__init__(8.8, 5.9)
        budgets = of.controls[2].values
        self.of, self.unit = of, _unit(max(budgets))
        top, below = (self.figure.add_axes((0.04, bottom, 0.62, 0.12)) for bottom in (0.78, 0.51))
        dress(top, "", "seconds of a step", "", 11)
        self.head(top, of)
        dress(below, "", f"bytes on the fullest rank ({UNITS[self.unit]})", "", 11)
        below.set_xlim(0, 1.1 * max(budgets) / 1024 ** self.unit)
        self.seconds, self.memory = _Bar(self, top, time_text, "measured"), _Bar(self, below, bytes_text, "counted")
        self.line = self.add(below.axvline(1, color=INK, linewidth=2.4, linestyle="--", zorder=3))
        self.there = self.add(below.text(1, 1.08, "", transform=below.get_xaxis_transform(), ha="center", color=INK,
                                         fontsize=TEXT))
        self.words = self.text(top, 0, -3.35, va="top", family="monospace", fontsize=9.5, linespacing=1.35)

    def move(self, model: str, cluster: str, budget: float) -> None:
        answer, scale = self.of.answer(model, cluster, budget), 1024 ** self.unit
        reason = answer if isinstance(answer, str) else ""
        found = Answer({}, {}, f"Nothing fits: {reason}") if reason else answer
        self.seconds.set(found.seconds, 1, found.measured)
        self.memory.set(found.memory, scale, found.counted)
        self.seconds.axes.set_xlim(0, _round(max(sum(found.seconds.values()), found.measured or 0)))
        self.line.set_xdata([budget / scale, budget / scale])
        self.there.set(x=budget / scale, text=f"budget {bytes_text(budget)}")
        lines = [part for line in found.words.splitlines() for part in textwrap.wrap(line, LINE) or [""]]
        self.words.set_text("\n".join(lines[:LINES - 1] + ["..."] if len(lines) > LINES else lines))


class _Bar:
    """One stacked bar, its total and its kinds written beside it."""

    def __init__(self, frame: Frame, axes: Axes, text: Callable[[float], str], by: str) -> None:
        self.axes, self.write, self.by = axes, text, by
        axes.set_yticks([])
        self.stack = Stacks(frame, axes, 1, len(SHADES))
        self.total = frame.text(axes, 1.05, 1.12, fontweight="bold")
        self.texts = [frame.text(axes, 1.12, 0.87 - 0.27 * row) for row in range(len(SHADES) + 1)]
        self.keys = []
        for row, shade in enumerate(SHADES):
            where = {"transform": axes.transAxes, "clip_on": False}
            box = Rectangle((1.05, 0.77 - 0.27 * row), 0.05, 0.2, **where, **style(shade))
            self.keys.append(frame.add(axes.add_artist(box)))

    def set(self, parts: Mapping[str, float], scale: float, mark: float | None) -> None:
        """The bar's kinds, drawn in parts of `scale`."""
        self.stack.set([[size / scale for size in parts.values()]], [None if mark is None else mark / scale])
        self.total.set_text(self.write(sum(parts.values())) if parts else "")
        lines = [f"{kind} {self.write(size)}" for kind, size in parts.items()]
        lines += [] if mark is None else [f"◇ {self.by} {self.write(mark)}"]
        for row, text in enumerate(self.texts):
            text.set_text(lines[row] if row < len(lines) else "")
        for row, key in enumerate(self.keys):
            key.set_visible(row < len(parts))


def _sum(name: str, parts: Mapping[str, float], text: Callable[[float], str], by: str, mark: float | None) -> str:
    said = ", ".join(f"{kind} {text(size)}" for kind, size in parts.items())
    also = "" if mark is None else f", {by} {text(mark)}"
    return f"{name}: {said}; together {text(sum(parts.values()))}{also}"


def _round(seconds: float) -> float:
    """The next of 1, 2, 5, 10, ... above; 1 for nothing."""
    limit, steps = 1e-6, (2, 2.5, 2)
    while limit < 1.02 * seconds:
        limit, steps = limit * steps[0], (*steps[1:], steps[0])
    return limit if seconds else 1
