"""The film strip's frames one at a time, under a slider."""

from __future__ import annotations

from typing import Protocol

from tpcourse.show.controls import Slider
from tpcourse.show.figure import PIXELS_PER_INCH, Picture
from tpcourse.show.filmstrip import collective


class Film(Protocol):
    """What the slider asks of a film: its title, its frames, their size in inches, and all of them in one
    picture, one below the other."""

    title: str
    frames: tuple
    frame_size: tuple[float, float]

    def reel(self) -> Picture:
        ...


def collective_slider(name: str, ranks: int = 4) -> Slider:
    """The frames of `show.collective(name, ranks)` one at a time.

    It moves only while a kernel runs, so a lesson shows the film strip beside it.
    """
    return slide(collective(name, ranks))


def slide(strip: Film) -> Slider:
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
    sentence = f"<slider: {strip.title}, {len(strip.frames)} frames; run the cell to move it>"
    return Slider(sentence, ipywidgets.VBox([slider, reel]))
