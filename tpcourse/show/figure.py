"""A figure that shows itself as a cell's last value: a small PNG, and words where there are no images."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from tpcourse.show.colours import INK, PAPER

PIXELS_PER_INCH = 100  # on screen; the PNG holds twice as many, for screens that show them
SHARPNESS = 1.5  # pixels of a widget's picture for each on screen


class Drawing:
    """What every drawing of the course can do: become a PNG, and display itself in a notebook.

    A subclass has a `title`, an `alt` text that says in words what the drawing shows, and a method
    `figure()`. The cell's stored output holds the PNG (with the alt text in its metadata, where nbconvert
    looks for it) and, as plain text, title and alt text: what nbval compares, and what a reader without
    images gets.
    """

    title: str
    alt: str

    def figure(self) -> Figure:
        raise TypeError(f"{type(self).__name__} does not say how it is drawn")

    def png(self) -> bytes:
        """The figure as PNG bytes, in 128 colours, which keeps notebooks small."""
        raw = io.BytesIO()
        self.figure().savefig(raw, format="png", dpi=2 * PIXELS_PER_INCH)
        small = io.BytesIO()
        Image.open(raw).convert("RGB").quantize(128).save(small, format="png", optimize=True)
        return small.getvalue()

    def quick_png(self) -> bytes:
        """The figure as PNG bytes for a widget, larger and made in a fraction of the time."""
        figure = self.figure()
        figure.set_dpi(SHARPNESS * PIXELS_PER_INCH)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return quick_png(np.asarray(canvas.buffer_rgba())[..., :3])

    def __repr__(self) -> str:
        return f"<figure: {self.title}>\n{self.alt}"

    def _repr_mimebundle_(self, include=None, exclude=None):
        png = self.png()
        width = Image.open(io.BytesIO(png)).width // 2
        return {"image/png": png, "text/plain": repr(self)}, {"image/png": {"width": width, "alt": self.alt}}


@dataclass(repr=False)
class Picture(Drawing):
    """A drawing that is already made: a title, an alt text and a matplotlib figure."""

    title: str
    alt: str
    made: Figure

    def figure(self) -> Figure:
        return self.made


def quick_png(pixels: np.ndarray) -> bytes:
    """Pixels as PNG bytes; a byte for each grey one, or three for each of a colour."""
    raw = io.BytesIO()
    Image.fromarray(pixels).save(raw, "png", compress_level=1)
    return raw.getvalue()


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure of `width` x `height` inches and one axes over all of it, in inches, y downwards."""
    figure = Figure(figsize=(width, height), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def write(axes: Axes, x: float, y: float, text: str, size: float = 9.5, **style) -> None:
    """Text centred on a point, unless `style` says otherwise."""
    axes.text(x, y, text, **{"size": size, "color": INK, "ha": "center", "va": "center", **style})


def chart(width: float, height: float, title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """A figure of `width` x `height` inches with one pair of labelled axes and a quiet grid."""
    figure = Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    axes = figure.add_subplot()
    dress(axes, title, xlabel, ylabel)
    return figure, axes


def dress(axes: Axes, title: str, xlabel: str, ylabel: str, size: float = 10) -> None:
    """Title, labels of `size` points, and a quiet grid."""
    axes.set_title(title, fontsize=size + 1.5, fontweight="bold", color=INK, loc="left", pad=10)
    axes.set_xlabel(xlabel, fontsize=size)
    axes.set_ylabel(ylabel, fontsize=size)
    axes.tick_params(labelsize=size - 0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
