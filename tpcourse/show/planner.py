"""The planner under controls: the best plan for a model on a cluster within a budget, as bars and words."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from tpcourse.show.colours import INK
from tpcourse.show.controls import TEXT, Control, Frame, Sliders
from tpcourse.show.curves import time_text
from tpcourse.show.figure import dress
from tpcourse.show.stacks import SHADES, Stacks, style

GB = 1e9
LINE, LINES = 96, 10  # characters of a line of words, and how many lines there is room for


@dataclass(frozen=True)
class Answer:
    """What the best plan costs: seconds of a step and bytes on a rank, each by up to eight kinds, and its words.

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
            is asked once for each triple; while it takes its time, the picture before it is pale. Kinds of 0 are
            not drawn.
        models, clusters: by name what `best` is given.
        budgets: bytes of a rank's memory.
        title: what stands above the figure.

    Its last value in a cell shows the controls; `.at(model's name, cluster's name, budget)` is a still picture.
    Bytes are in GB of a billion, as data sheets have them. Raises ValueError for answers of more than eight kinds.
    """
    controls = (Control("model", tuple(models), str, listed=True),
                Control("cluster", tuple(clusters), str, listed=True),
                Control("budget", tuple(budgets), gigabytes))
    return Planner(best, models, clusters, controls, title)


def gigabytes(nbytes: float) -> str:
    """Bytes in GB: 0.52 GB, 37.3 GB, 1,400 GB."""
    return f"{nbytes / 1e9:.3g} GB" if nbytes < 999.5e9 else f"{nbytes / 1e9:,.0f} GB"


@dataclass(repr=False)
class Planner(Sliders):
    """See `planner`; `known` has what was answered, or why there is no answer, `kinds` the kinds in order."""

    best: Callable[[Any, Any, float], Answer]
    models: Mapping[str, Any]
    clusters: Mapping[str, Any]
    controls: tuple[Control, ...]
    title: str
    known: dict[tuple[str, str, float], Answer | str] = field(default_factory=dict)
    kinds: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))

    def answer(self, model: str, cluster: str, budget: float) -> Answer | str:
        """The plan, or why there is none."""
        asked = model, cluster, budget
        if asked not in self.known:
            try:
                answer = self.best(self.models[model], self.clusters[cluster], budget)
            except ValueError as why:
                answer = str(why)
            else:
                self._learn(answer)
            self.known[asked] = answer
        return self.known[asked]

    def _learn(self, answer: Answer) -> None:
        """Each kind keeps its shade."""
        for kinds, parts in zip(self.kinds, (answer.seconds, answer.memory)):
            kinds += [kind for kind, size in parts.items() if size and kind not in kinds]
            if len(kinds) > len(SHADES):
                raise ValueError(f"{len(kinds)} kinds ({', '.join(kinds)}), but bars tell 1 to {len(SHADES)} apart;"
                                 " add some of them up")

    def slow(self, *asked) -> bool:
        return asked not in self.known

    def frame(self) -> Frame:
        return _Frame(self)

    def words(self, model: str, cluster: str, budget: float) -> str:
        answer = self.answer(model, cluster, budget)
        lines = [f"{model} on {cluster}, {gigabytes(budget)} a rank:"]
        if isinstance(answer, str):
            return "\n".join([*lines, f"nothing fits: {answer}"])
        lines += [_sum("a step", answer.seconds, time_text, "measured", answer.measured),
                  _sum("memory", answer.memory, gigabytes, "counted", answer.counted)]
        return "\n".join([*lines, answer.words])


class _Frame(Frame):
    """A bar of seconds, a bar of bytes with the budget's line, and the plan in words."""

    def __init__(self, of: Planner) -> None:
        super().__init__(8.8, 6.2)
        self.of, budgets = of, of.controls[2].values
        top, below = (self.figure.add_axes((0.04, bottom, 0.62, 0.12)) for bottom in (0.79, 0.46))
        dress(top, "", "seconds of a step", "", 11)
        self.head(top, of)
        dress(below, "", "bytes on the fullest rank (GB)", "", 11)
        below.set_xlim(0, 1.1 * max(budgets) / GB)
        self.seconds = _Bar(self, top, of.kinds[0], time_text, "measured")
        self.memory = _Bar(self, below, of.kinds[1], gigabytes, "counted")
        self.line = self.add(below.axvline(1, color=INK, linewidth=2.4, linestyle="--", zorder=3))
        self.there = self.add(below.text(1, 1.08, "", transform=below.get_xaxis_transform(), ha="center", color=INK,
                                         fontsize=TEXT))
        self.words = self.text(below, 0, -0.85, va="top", family="monospace", fontsize=9.5, linespacing=1.35)

    def move(self, model: str, cluster: str, budget: float) -> None:
        answer = self.of.answer(model, cluster, budget)
        reason = answer if isinstance(answer, str) else ""
        found = Answer({}, {}, f"Nothing fits: {reason}") if reason else answer
        self.seconds.set(found.seconds, 1, found.measured)
        self.memory.set(found.memory, GB, found.counted)
        self.seconds.axes.set_xlim(0, _round(max(sum(found.seconds.values()), found.measured or 0)))
        self.line.set_xdata([budget / GB, budget / GB])
        self.there.set(x=budget / GB, text=f"budget {gigabytes(budget)}")
        lines = [part for line in found.words.splitlines() for part in textwrap.wrap(line, LINE) or [""]]
        self.words.set_text("\n".join(lines[:LINES - 1] + ["..."] if len(lines) > LINES else lines))


class _Bar:
    """One stacked bar, its total and its kinds written beside it."""

    def __init__(self, frame: Frame, axes: Axes, kinds: list[str], text: Callable[[float], str], by: str) -> None:
        self.axes, self.kinds, self.write, self.by = axes, kinds, text, by
        axes.set_yticks([])
        self.stack = Stacks(frame, axes, 1, len(SHADES))
        self.total = frame.text(axes, 1.05, 1.12, fontweight="bold")
        self.texts = [frame.text(axes, 1.12, 0.87 - 0.26 * row) for row in range(len(SHADES) + 1)]
        self.keys = []
        for shade in SHADES:
            box = Rectangle((1.05, 0), 0.05, 0.2, transform=axes.transAxes, clip_on=False, **style(shade))
            self.keys.append(frame.add(axes.add_artist(box)))

    def set(self, parts: Mapping[str, float], scale: float, mark: float | None) -> None:
        """The bar's kinds, drawn in parts of `scale`."""
        sizes = {number: parts[kind] for number, kind in enumerate(self.kinds) if parts.get(kind)}
        self.stack.set([{number: size / scale for number, size in sizes.items()}],
                       [None if mark is None else mark / scale])
        self.total.set_text(self.write(sum(parts.values())) if parts else "")
        lines = [f"{self.kinds[number]} {self.write(size)}" for number, size in sizes.items()]
        lines += [] if mark is None else [f"◇ {self.by} {self.write(mark)}"]
        for row, text in enumerate(self.texts):
            text.set_text(lines[row] if row < len(lines) else "")
        for number, key in enumerate(self.keys):
            key.set(visible=number in sizes, y=0.77 - 0.26 * list(sizes).index(number) if number in sizes else 0)


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
