"""What a rank sends and keeps on every mesh of so many ranks, and a slider from one mesh to the next."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from matplotlib.figure import Figure

from tpcourse.show.bars import UNITS, _unit, bytes_text
from tpcourse.show.colours import FAINT, INK, PAPER
from tpcourse.show.controls import Slider
from tpcourse.show.cube import cube
from tpcourse.show.figure import Picture

Costs = Mapping[tuple[int, int, int], tuple[float, float]]
PANELS = (("sent by one rank", "#4D4D4D"), ("kept for backward on one rank", "#A6A6A6"))


def meshes(costs: Costs, title: str, picked: tuple[int, int, int] | None = None) -> Picture:
    """Bars of the bytes that one rank sends, and beside them of those it keeps, a line for each mesh.

    Args:
        costs: for each mesh (i, j, l) the bytes sent and the bytes kept.
        title: what stands above the figure.
        picked: a mesh to mark.

    Raises:
        ValueError: no mesh.
    """
    if not costs:
        raise ValueError("there is no mesh to draw; give costs for one at least")
    names = [" × ".join(map(str, mesh)) for mesh in costs]
    figure = Figure(figsize=(8.6, 1.2 + 0.3 * len(costs)), facecolor=PAPER, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    figure.suptitle(title, fontsize=11.5, fontweight="bold", color=INK, x=0.02, ha="left")
    for panel, (axes, (label, shade)) in enumerate(zip(figure.subplots(1, 2, sharey=True), PANELS)):
        counts = [pair[panel] for pair in costs.values()]
        unit = _unit(max(counts))
        edges = [2.2 if mesh == picked else 0.8 for mesh in costs]
        axes.barh(names, [count / 1024 ** unit for count in counts], 0.66, color=shade, edgecolor=INK,
                  linewidth=edges)
        for line, count in enumerate(counts):
            axes.annotate(bytes_text(count), (count / 1024 ** unit, line), (4, 0), textcoords="offset points",
                          va="center", fontsize=9, color=INK)
        axes.set_xlabel(f"{label} ({UNITS[unit]})", fontsize=10)
        axes.set_ylabel("mesh i × j × l" if panel == 0 else "", fontsize=10, labelpad=10)
        axes.tick_params(labelsize=9.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.28, y=0.02)
    for label, mesh in zip(figure.axes[0].get_yticklabels(), costs):
        label.set(fontweight="bold" if mesh == picked else "normal",
                  color=INK if picked in (None, mesh) else FAINT)
    figure.axes[0].invert_yaxis()
    words = [f"{name}: sent {bytes_text(sent)}, kept {bytes_text(kept)}"
             for name, (sent, kept) in zip(names, costs.values())]
    return Picture(title, "\n".join(words), figure)


def mesh_slider(costs: Costs, title: str) -> Slider:
    """`meshes` with one mesh marked, and its `cube`, under a slider that goes from mesh to mesh.

    It moves only while a kernel runs, so a lesson shows a still picture beside it.
    """
    import ipywidgets

    @lru_cache(None)
    def drawn(mesh):
        return cube(dict(zip("ijl", mesh))).quick_png(), meshes(costs, title, mesh).quick_png()

    first = next(iter(costs))
    images = [ipywidgets.Image(value=png, format="png", layout={"width": "860px", "max_width": "100%"})
              for png in drawn(first)]
    options = [(" × ".join(map(str, mesh)), mesh) for mesh in costs]
    slider = ipywidgets.SelectionSlider(options=options, description="mesh")

    def move(change):
        for image, png in zip(images, drawn(change["new"])):
            image.value = png

    slider.observe(move, "value")
    return Slider(f"<slider: {title}, {len(costs)} meshes; run the cell to move it>",
                  ipywidgets.VBox([slider, *images]))
