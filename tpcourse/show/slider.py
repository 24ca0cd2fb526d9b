"""The film strip's frames one at a time, under a slider."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tpcourse.show.figure import PIXELS_PER_INCH, Picture
from tpcourse.show.filmstrip import collective

if TYPE_CHECKING:
    from ipywidgets import Widget


class Film(Protocol):
    """What the slider asks of a film: its title, its frames, their size in inches, and all of them in one
    picture, one below the other."""

    title: str
    frames: tuple
    frame_size: tuple[float, float]

    def reel(self) -> Picture:
        ...


@dataclass(frozen=True, repr=False)
class FilmSlider:
    """A film strip and the widget that shows its frames; where there are no widgets, one sentence."""

    strip: Film
    widget: Widget

    def __repr__(self) -> str:
        return f"<slider: {self.strip.title}, {len(self.strip.frames)} frames; run the cell to move it>"

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {**self.widget._repr_mimebundle_(), "text/plain": repr(self)}


def collective_slider(name: str, ranks: int = 4) -> FilmSlider:
    """The frames of `show.collective(name, ranks)` one at a time.

    It moves only while a kernel runs, so a lesson shows the film strip beside it.
    """
    return slide(collective(name, ranks))


def slide(strip: Film) -> FilmSlider:
    """The frames of a film one at a time."""
    import ipywidgets

    width, height = (round(PIXELS_PER_INCH * inches) for inches in strip.frame_size)
    window = dict(width=f"{width}px", height=f"{height}px", max_width="none", overflow="hidden",
                  object_fit="cover", object_position="0 0px")  # the image is sent once and then only moved
    reel = ipywidgets.Image(value=strip.reel().png(), format="png", layout=window)
    slider = ipywidgets.IntSlider(0, 0, len(strip.frames) - 1, description="step")

    def wind(change):
        reel.layout.object_position = f"0 {-change['new'] * height}px"

    slider.observe(wind, "value")
    return FilmSlider(strip, ipywidgets.VBox([slider, reel]))
