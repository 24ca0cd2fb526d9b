"""Bytes over one size, with a slider for each of the others: formulas as lines, what was counted as marks."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image

from tpcourse.show.bars import bytes_text
from tpcourse.show.colours import INK, PAPER
from tpcourse.show.figure import PIXELS_PER_INCH, Picture
from tpcourse.show.growth import PENS

if TYPE_CHECKING:
    from ipywidgets import Widget

Costs = Mapping[str, float]
WIDTH, HEIGHT, SHARPNESS = 8.8, 4.3, 1.5  # inches; pixels of the picture for each on screen


def explorer(cost: Callable[..., Costs], counted: Mapping[tuple, Costs], along: tuple[str, Sequence[int]],
             others: Mapping[str, Sequence[int]], title: str) -> Explorer:
    """Bytes by name over one size, both axes logarithmic; the axes stay as they are while sliders move.

    Args:
        cost: cost(x, *others) says the bytes of up to four names; for a name that cannot be, none.
        counted: by the same arguments as a tuple, bytes that were counted: marks upon the lines.
        along: what the axis is called, and its values.
        others: what each slider is called, and its values.
        title: what stands above the figure.

    Its last value in a cell shows the sliders; `explorer(...).at(x, *others)` is a still picture.
    Raises ValueError for more names than pens.
    """
    found = Explorer(cost, dict(counted), along[0], tuple(along[1]),
                     {name: tuple(values) for name, values in others.items()}, title)
    if len(found.names) > len(PENS):
        raise ValueError(f"{len(found.names)} names, but this plot tells 1 to {len(PENS)} apart")
    return found


@dataclass(repr=False)
class Explorer:
    """See `explorer`."""

    cost: Callable[..., Costs]
    counted: dict[tuple, Costs]
    axis: str
    values: tuple[int, ...]
    others: dict[str, tuple[int, ...]]
    title: str

    @cached_property
    def names(self) -> list[str]:
        """The names in order."""
        first = [values[0] for values in self.others.values()]
        return list(dict.fromkeys(name for x in self.values for name in self.cost(x, *first)))

    def at(self, x: int, *others: int) -> Picture:
        """The picture with the sliders at these values."""
        frame = _Frame(self)
        frame.move(x, others)
        return Picture(self.title, self.words(x, *others), frame.figure)

    def words(self, x: int, *others: int) -> str:
        """The numbers of one place, and those that were counted there."""
        counted = self.counted.get((x, *others), {})
        places = zip((self.axis, *self.others), (x, *others))
        lines = [", ".join(f"{name} = {value:,}" for name, value in places) + ":"]
        for name, size in self.cost(x, *others).items():
            also = f", counted {bytes_text(counted[name])}" if name in counted else ""
            lines.append(f"{name}: {bytes_text(size)}{also}")
        return "\n".join(lines)

    @cached_property
    def widget(self) -> Widget:
        """The picture under its sliders; arrow keys move them."""
        import ipywidgets

        frame = _Frame(self)
        style, layout = {"description_width": "110px"}, {"width": "520px"}
        names, all_values = (self.axis, *self.others), (self.values, *self.others.values())
        sliders = [ipywidgets.SelectionSlider(
            options=[(f"{value:,}", value) for value in values], value=values[(len(values) - 1) // 2],
            description=name, style=style, layout=layout) for name, values in zip(names, all_values)]
        wide = {"width": f"{WIDTH * PIXELS_PER_INCH:.0f}px", "max_width": "100%"}
        image = ipywidgets.Image(format="png", layout=wide)

        def draw(_=None):
            x, *others = (slider.value for slider in sliders)
            frame.move(x, others)
            image.value = frame.png()

        for slider in sliders:
            slider.observe(draw, "value")
        draw()
        return ipywidgets.VBox([*sliders, image])

    def __repr__(self) -> str:
        return f"<sliders: {self.title}; {', '.join((self.axis, *self.others))}; run the cell to move them>"

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {**self.widget._repr_mimebundle_(), "text/plain": repr(self)}


class _Frame:
    """Axes that are drawn once, and what moves upon them."""

    def __init__(self, of: Explorer) -> None:
        self.of = of
        self.figure = Figure(figsize=(WIDTH, HEIGHT), dpi=SHARPNESS * PIXELS_PER_INCH, facecolor=PAPER)
        self.axes = self.figure.add_axes((0.12, 0.135, 0.55, 0.755))
        _dress(self.axes, of)
        self.at = self.axes.axvline(of.values[0], color="#B0B0B0", linewidth=1, animated=True)
        self.lines, self.marks, self.texts = [], [], []
        for row, (name, (colour, dash, mark)) in enumerate(zip(of.names, PENS)):
            pen, y = {"color": colour, "animated": True}, 0.8 - 0.14 * row
            self.lines += self.axes.plot([], [], dash, linewidth=2, **pen)
            self.marks += self.axes.plot([], [], mark, markersize=6, **pen)
            self.axes.plot([1.05, 1.13], [y, y], dash, marker=mark, markersize=6, linewidth=2, color=colour,
                           transform=self.axes.transAxes, clip_on=False)
            self.axes.text(1.16, y, name, transform=self.axes.transAxes, fontsize=9.5, color=INK, va="center")
            self.texts.append(self.axes.text(1.16, y - 0.055, "", transform=self.axes.transAxes, fontsize=9.5,
                                             color=INK, va="center", animated=True))
        self.head = self.axes.text(1.05, 0.94, "", transform=self.axes.transAxes, fontsize=9.5, color=INK,
                                   va="center", fontweight="bold", animated=True)
        self.canvas = FigureCanvasAgg(self.figure)
        self.ground = None

    def move(self, x: int, others: Sequence[int]) -> None:
        costs = {value: self.of.cost(value, *others) for value in self.of.values}
        counted = {value: self.of.counted.get((value, *others), {}) for value in self.of.values}
        self.at.set_xdata([x, x])
        self.head.set_text(f"at {self.of.axis} = {x:,}")
        for name, line, marks, text in zip(self.of.names, self.lines, self.marks, self.texts):
            line.set_data(*_points(costs, name))
            marks.set_data(*_points(counted, name))
            text.set_text(bytes_text(costs[x][name]) if name in costs[x] else "not on these ranks")

    def png(self) -> bytes:
        """The picture, of which only what moves is drawn again."""
        if self.ground is None:
            self.canvas.draw()
            self.ground = self.canvas.copy_from_bbox(self.figure.bbox)
        self.canvas.restore_region(self.ground)
        for artist in (self.at, *self.lines, *self.marks, *self.texts, self.head):
            self.axes.draw_artist(artist)
        raw = io.BytesIO()
        Image.fromarray(np.asarray(self.canvas.buffer_rgba())[..., :3]).save(raw, "png", compress_level=1)
        return raw.getvalue()


def _points(costs: Mapping[int, Costs], name: str) -> tuple[list[int], list[float]]:
    found = [(x, sizes[name]) for x, sizes in costs.items() if name in sizes]
    return [x for x, _ in found], [size for _, size in found]


def _dress(axes: Axes, of: Explorer) -> None:
    """Title, labels, ticks, and limits that hold whatever the sliders say."""
    ends = [(values[0], values[-1]) for values in of.others.values()]
    corners = np.array(np.meshgrid(*ends)).reshape(len(ends), -1).T.tolist()
    sizes = [size for x in of.values for corner in corners for size in of.cost(x, *corner).values() if size]
    axes.set(xscale="log", yscale="log", xlim=(of.values[0] / 1.3, of.values[-1] * 1.3),
             ylim=(min(sizes) / 1.6, max(sizes) * 1.6))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_title(of.title, fontsize=11.5, fontweight="bold", color=INK, loc="left", pad=10)
    axes.set_xlabel(of.axis, fontsize=10)
    axes.set_ylabel("bytes that one rank sends", fontsize=10)
    axes.xaxis.set_major_locator(FixedLocator(of.values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(value)))
    axes.tick_params(labelsize=9.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
