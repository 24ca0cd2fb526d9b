"""A picture under controls: only what moves is drawn again; where there is no kernel, a still picture and words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tpcourse.show.colours import INK, PAPER
from tpcourse.show.figure import PIXELS_PER_INCH, SHARPNESS, Picture, quick_png

if TYPE_CHECKING:
    from ipywidgets import Widget

TEXT = 10.5  # points


class Live:
    """What shows its `widget` in a notebook, and its repr where there is no kernel."""

    widget: Widget

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {**self.widget._repr_mimebundle_(), "text/plain": repr(self)}


@dataclass(frozen=True, repr=False)
class Slider(Live):
    """A widget and the sentence that stands for it."""

    sentence: str
    widget: Widget

    def __repr__(self) -> str:
        return self.sentence


@dataclass(frozen=True)
class Control:
    """What a person sets: a name and its values, on a slider; or, if they are `listed`, a button each."""

    name: str
    values: tuple
    text: Callable[[Any], str] = "{:,}".format
    listed: bool = False

    @property
    def start(self) -> Any:
        """Where it begins: buttons with their first value, a slider in the middle."""
        return self.values[0 if self.listed else (len(self.values) - 1) // 2]

    def widget(self, wide: int) -> Widget:
        """The control, its name `wide` pixels wide: left and right move a slider, Tab and Space press a button.

        In JupyterLab a Dropdown has no keys, for up and down go to another cell; RadioButtons have none at all.
        """
        import ipywidgets

        given = {"options": [(self.text(value), value) for value in self.values], "value": self.start,
                 "description": self.name}
        style = {"description_width": f"{wide}px"}
        if self.listed:
            layout = {"width": "auto", "display": "flex", "flex_flow": "row", "align_items": "center"}
            return ipywidgets.ToggleButtons(style=style | {"button_width": "auto"}, layout=layout, **given)
        return ipywidgets.SelectionSlider(style=style, layout={"width": "560px"}, **given)

    def check(self, value: Any) -> None:
        """Raises ValueError for a value that it does not have."""
        if value not in self.values:
            known = ", ".join(map(self.text, self.values))
            raise ValueError(f"{self.name} = {value!r} is not on its control; take one of {known}")


class Frame:
    """A figure whose ground is drawn once, and the artists that move upon it; all grey, for colours mean ranks."""

    def __init__(self, width: float, height: float) -> None:
        self.figure = Figure(figsize=(width, height), dpi=SHARPNESS * PIXELS_PER_INCH, facecolor=PAPER)
        self.canvas = FigureCanvasAgg(self.figure)
        self.moving: list[Artist] = []
        self.ground, self.drawn_for = None, None
        self.place: Artist

    def add(self, artist: Artist) -> Artist:
        """This artist moves."""
        artist.set(animated=True, in_layout=False)
        self.moving.append(artist)
        return artist

    def curve(self, axes: Axes, colour: str, dash: str, mark: str) -> tuple[Line2D, Line2D]:
        """A line for what is predicted, and marks for what was counted or measured."""
        line, = axes.plot([], [], dash, color=colour, linewidth=2.4)
        marks, = axes.plot([], [], mark, color=colour, markersize=7)
        return self.add(line), self.add(marks)

    def text(self, axes: Axes, x: float, y: float, **style) -> Artist:
        """A text that moves, at a place in parts of the axes."""
        style = {"fontsize": TEXT, "color": INK, "va": "center", **style}
        return self.add(axes.text(x, y, "", transform=axes.transAxes, **style))

    def head(self, axes: Axes, of: Sliders) -> None:
        """The title above these axes, and a line under it for where the controls are."""
        axes.set_title(of.title, fontsize=TEXT + 1.5, fontweight="bold", color=INK, loc="left",
                       pad=10 + 15 * bool(of.controls))
        self.place = self.add(axes.annotate("", (0, 1), (0, 9), "axes fraction", "offset points", color=INK,
                                            fontsize=TEXT - 0.5))

    def settle(self, left: float, right: float) -> None:
        """Axes and legends find their places, for good, between these parts of the width."""
        self.figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12, rect=(left, 0, right - left, 1))
        self.figure.draw_without_rendering()
        self.figure.set_layout_engine("none")

    def move(self, *values: Any) -> None:
        """Everything as it is at these values of the controls."""
        raise NotImplementedError

    def pixels(self) -> np.ndarray:
        """The picture, a byte of grey for each; its ground is drawn again only if an axis changed."""
        axis = [(*axes.get_xlim(), *axes.get_ylim(), axes.get_xlabel()) for axes in self.figure.axes]
        if axis != self.drawn_for:
            self.canvas.draw()
            self.ground, self.drawn_for = self.canvas.copy_from_bbox(self.figure.bbox), axis
        self.canvas.restore_region(self.ground)
        for artist in sorted(self.moving, key=lambda artist: artist.zorder):
            artist.draw(self.canvas.get_renderer())
        return self.drawn()

    def drawn(self) -> np.ndarray:
        """The picture as it was last drawn."""
        return np.asarray(self.canvas.buffer_rgba())[..., 0]


class Sliders(Live):
    """A `title`, `controls`, the frame that they move, and the words that say what it shows."""

    title: str
    controls: tuple[Control, ...]

    def frame(self) -> Frame:
        """The picture, not yet at any values."""
        raise NotImplementedError

    def words(self, *values: Any) -> str:
        """The numbers of the picture at these values."""
        raise NotImplementedError

    def slow(self, *values: Any) -> bool:
        """Whether a person will wait for the picture at these values."""
        return False

    def move(self, frame: Frame, values: Sequence) -> None:
        """The frame as it is at these values, which are written in it too."""
        frame.move(*values)
        frame.place.set_text(", ".join(f"{control.name} = {control.text(value)}" for control, value in zip(
            self.controls, values) if control.name in self.moved))

    @property
    def moved(self) -> list[str]:
        """The names that stand for it where there is no kernel."""
        return [control.name for control in self.controls]

    def at(self, *values: Any) -> Picture:
        """The still picture at these values, in the controls' order; those left out are where they begin."""
        if len(values) > len(self.controls):
            raise ValueError(f"{len(values)} values for {len(self.controls)} controls; give at most one for each")
        values += tuple(control.start for control in self.controls[len(values):])
        for control, value in zip(self.controls, values):
            control.check(value)
        frame = self.frame()
        self.move(frame, values)
        return Picture(self.title, self.words(*values), frame.figure)

    @cached_property
    def widget(self) -> Widget:
        """The picture under its controls. While a slow one is made, the one before is pale."""
        import ipywidgets

        frame, wide = self.frame(), 8 * max((len(control.name) for control in self.controls), default=0) + 16
        chosen = [control.widget(wide) for control in self.controls]
        width = f"{frame.figure.get_figwidth() * PIXELS_PER_INCH:.0f}px"
        image = ipywidgets.Image(format="png", layout={"width": width, "max_width": "100%"})

        def draw(change=None):
            values = [control.value for control in chosen]
            if change and self.slow(*values):
                image.value = quick_png(255 - (255 - frame.drawn()) // 3)
            self.move(frame, values)
            image.value = quick_png(frame.pixels())

        for control in chosen:
            control.observe(draw, "value")
        draw()
        return ipywidgets.VBox([*chosen, image])

    def __repr__(self) -> str:
        return f"<sliders: {self.title}; {', '.join(self.moved)}; run the cell to move them>"


def spread(sizes: Sequence[Sequence]) -> Iterator[tuple]:
    """Places enough to see how far a function goes: each size at all its values, the others at their ends."""
    for axis, values in enumerate(sizes):
        ends = [dict.fromkeys((other[0], other[-1])) for other in sizes]
        yield from product(*ends[:axis], values, *ends[axis + 1:])
    if not sizes:
        yield ()


def names(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """All names in these, in the order of the fullest."""
    return list(dict.fromkeys(name for some in sorted(found, key=len, reverse=True) for name in some))


def place(sizes: Sequence[str], values: Sequence[float]) -> str:
    """Sizes as a sentence has them: ranks P = 64, width h = 8,192."""
    return ", ".join(f"{size} = {value:,}" for size, value in zip(sizes, values))
