"""The film strip's frames one at a time, under a slider."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpcourse.show.figure import PIXELS_PER_INCH
from tpcourse.show.filmstrip import FilmStrip, collective

if TYPE_CHECKING:
    from ipywidgets import Widget


@dataclass(frozen=True, repr=False)
class FilmSlider:
    """A film strip and the widget that shows its frames; displays as the widget, or in words where there is none."""

    strip: FilmStrip
    widget: Widget

    def __repr__(self) -> str:
        return f"<slider: {self.strip.title}, {len(self.strip.frames)} frames>"

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {**self.widget._repr_mimebundle_(), "text/plain": repr(self)}


def collective_slider(name: str, ranks: int = 4) -> FilmSlider:
    """The frames of `show.collective(name, ranks)` one at a time.

    It moves only while a kernel runs, so a lesson shows the film strip beside it.
    """
    import ipywidgets

    strip = collective(name, ranks)
    stills = [strip.still(index).png() for index in range(len(strip.frames))]
    image = ipywidgets.Image(value=stills[0], format="png", width=round(PIXELS_PER_INCH * strip.frame_size[0]))
    slider = ipywidgets.IntSlider(0, 0, len(stills) - 1, description="step")
    slider.observe(lambda change: setattr(image, "value", stills[change["new"]]), "value")
    return FilmSlider(strip, ipywidgets.VBox([slider, image]))
