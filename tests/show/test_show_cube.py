"""The cube draws who stores and who needs which block, as the layer has it; meshes draw the costs."""

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from tpcourse import show
from tpcourse.grade.cube import _Mesh as Ranks

CUBE = {"i": 2, "j": 2, "l": 2}
MESHES = [dict(zip("ijl", sizes)) for sizes in ((2, 2, 2), (1, 4, 1), (4, 1, 1), (1, 2, 3), (3, 2, 1))]
COSTS = {(1, 4, 1): (3000, 2000.0), (2, 2, 1): (2**20, 1500), (4, 1, 1): (4096, 1024)}
WHOLE = {"X": ("ij", "l"), "A": ("l", "ji"), "Y": ("il", "j")}  # the lesson's table


def cut(size, rows, columns, mesh):
    """The cells of a matrix of numbers 0, 1, ..., as `CubeLinear` is given them."""
    ranks = Ranks(tuple(mesh.values()))
    whole = torch.arange(size * size).view(size, size)
    return whole, ranks.cut(whole, rows, columns)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh.values())))
@pytest.mark.parametrize("face", WHOLE)
def test_a_cell_is_what_a_rank_stores_and_the_mates_cells_make_its_block(mesh, face):
    whole, cells = cut(24, *WHOLE[face], mesh)
    ranks, axis = Ranks(tuple(mesh.values())), {"X": "j", "A": "i", "Y": "l"}[face]
    drawn = show.cube(mesh).cells(face)
    for rank, ((top, bottom), (left, right)) in drawn.items():
        part = whole[round(24 * top):round(24 * bottom), round(24 * left):round(24 * right)]
        assert torch.equal(part, cells[rank])
        assert show.cube(mesh, rank).mates(face) == ranks.mates(rank, axis)


def test_words_say_who_shares():
    assert show.cube(CUBE, 5).alt.splitlines()[1:] == [
        "Block of X: gathered with rank 7", "Block of A: gathered with rank 1",
        "Block of Y: summed with rank 4"]
    assert show.cube({"i": 1, "j": 3, "l": 1}, 2).alt.splitlines()[1:] == [
        "Block of X: gathered with ranks 0, 1", "Block of A: its own, nothing is sent",
        "Block of Y: its own, nothing is sent"]
    assert show.cube(CUBE, 5).title.endswith(": rank 5")


PICTURES = {
    "cube": show.cube(CUBE), "picked": show.cube(CUBE, 5), "row": show.cube({"i": 1, "j": 1, "l": 8}, 7),
    "column": show.cube({"i": 1, "j": 8, "l": 1}, 0), "sharded": show.cube({"i": 8, "j": 1, "l": 1}),
    "64 ranks": show.cube({"i": 4, "j": 4, "l": 4}, 63), "meshes": show.meshes(COSTS, "One block, 4 ranks"),
    "one marked": show.meshes(COSTS, "One block, 4 ranks", (2, 2, 1)),
}


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_is_cut_or_written_over(apart, name):
    figure = PICTURES[name].figure()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    words = [] if figure._suptitle is None else [figure._suptitle]
    for axes in figure.axes:
        words += axes.texts
        if axes.axison:
            words += [axes.xaxis.label, axes.yaxis.label]
    words += [tick.label1 for tick in figure.axes[0].yaxis.get_major_ticks() if figure.axes[0].axison]
    apart(canvas.get_renderer(), figure, words)
    assert len(PICTURES[name].png()) < 130_000


def test_bars_are_the_costs():
    sent, kept = show.meshes(COSTS, "t").figure().axes
    assert [bar.get_width() * 2**20 for bar in sent.patches] == [3000, 2**20, 4096]
    assert [bar.get_width() for bar in kept.patches] == pytest.approx([2000 / 1024, 1500 / 1024, 1])
    assert "2 × 2 × 1: sent 1 MiB, kept 1.46 KiB" in show.meshes(COSTS, "t").alt


def test_sliders_pick_ranks_and_meshes():
    picker = show.cube_picker(CUBE)
    slider, image = picker.widget.children
    first = image.value
    slider.value = 5
    assert image.value != first and image.value == show.cube(CUBE, 5).quick_png() and slider.max == 7
    assert repr(picker).startswith("<slider: 2 × 2 × 2")
    shown = show.mesh_slider(COSTS, "One block")
    slider, drawn, bars = shown.widget.children
    slider.value = (4, 1, 1)
    assert drawn.value == show.cube({"i": 4, "j": 1, "l": 1}).quick_png()
    assert bars.value == show.meshes(COSTS, "One block", (4, 1, 1)).quick_png()
    data = shown._repr_mimebundle_()
    assert data["text/plain"] == "<slider: One block, 3 meshes; run the cell to move it>"
    assert "application/vnd.jupyter.widget-view+json" in data


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="2 dimensions, not three"):
        show.cube({"i": 2, "j": 2})
    with pytest.raises(ValueError, match="rank 8 is not one of the 8 ranks"):
        show.cube(CUBE, 8)
    with pytest.raises(ValueError, match="no mesh"):
        show.meshes({}, "t")
