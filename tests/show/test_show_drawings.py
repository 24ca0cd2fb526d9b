"""What is drawn is what the data say; labels stay inside, files small, and nothing leaks into pyplot."""

import io
import subprocess
import sys
from collections import Counter

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from PIL import Image

from tpcourse import show
from tpcourse.measure import Row, Table
from tpcourse.show.collectives import COLLECTIVES

X = show.blocks(shape=(4, 6), mesh={"tp": 4}, title="X", rows="tokens n", columns="in_features k")
A = show.blocks(
    shape=(6, 8), mesh={"tp": 4}, split={1: "tp"}, title="A", rows="in_features k", columns="out_features m"
)
Y = show.blocks(
    shape=(4, 8), mesh={"tp": 4}, split={1: "tp"}, title="Y", rows="tokens n", columns="out_features m"
)
BOOK = Table(
    [
        Row("all_reduce", "tp", 4, 2, 3000, 4500, "forward"),
        Row("all_gather", "dp", 2, 1, 8192, 4096, "forward"),
        Row("all_reduce", "tp", 4, 2, 3000, 4500, "backward"),
        Row("all_reduce", "tp", 4, 1, 6e6, 9e6, "recomputation"),
    ]
)
DRAWINGS = {
    "equation": show.equation([X, "·", A, "=", Y]),
    "vector": show.blocks(
        shape=(8,), mesh={"tp": 4}, split={0: "tp"}, title="bias", columns="out_features m"
    ),
    "scalar": show.blocks(shape=(), mesh={"tp": 2}, title="the loss, a number on every rank"),
    "16 ranks": show.blocks(shape=(64, 64), mesh={"a": 4, "b": 4}, split={0: "a", 1: "b"}, title="W"),
    "piles": show.blocks(
        shape=(4096, 16384), mesh={"pp": 2, "dp": 2, "tp": 2}, split={0: "dp", 1: "tp"}, title="W"
    ),
    "many copies": show.blocks(shape=(4, 6), mesh={"dp": 32}, title="X"),
    "batch": show.blocks(
        shape=(4, 6, 8), mesh={"dp": 2, "tp": 2}, split={0: "dp", 2: "tp"}, title="X", rows="s"
    ),
    "empty rank": show.blocks(shape=(3, 5), mesh={"tp": 4}, split={0: "tp"}, title="W", columns="columns"),
    "ledger": show.ledger(BOOK, BOOK),
    "curves": show.curves({"dense": [3, 2, 1], "4 ranks": [3, 2, 1]}, "step", "loss (nats)", "Loss"),
    "time": show.time_against_bytes([(2**k, 1e-4 + 2**k * 1e-9) for k in range(8, 26, 2)], (1e-4, 1e-9)),
    **{f"{name} {ranks}": show.collective(name, ranks) for name in COLLECTIVES for ranks in (2, 4)},
    "summa": show.summa("atb", torch.ones(6, 3), torch.full((6, 6), -4.0), 3, ("X", "dY", "dA")),
    "growth": show.growth({"1D": {4: 100.0, 4096: 120.0}, "2D": {4: 2048.0, 4096: 6.0}}, {}, "Bytes over P"),
    "all_reduce 1": show.collective("all_reduce", 1),
    "reduce_scatter 5": show.collective("reduce_scatter", 5),
    "ends": show.collective("reduce_scatter", 4, between=False),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_no_text_is_cut_or_written_over(apart, name):
    figure = DRAWINGS[name].figure()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes = figure.axes[0]
    words = [*axes.texts]
    if axes.axison:
        low, high = sorted(axes.get_ylim())  # ticks outside have labels, but they are not drawn
        ticks = [tick.label1 for tick in axes.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
        words += [axes.xaxis.label, axes.yaxis.label, *ticks]
    apart(canvas.get_renderer(), figure, words)


@pytest.mark.parametrize(
    "name", ["equation", "16 ranks", "ledger", "curves", "time", "all_reduce 4", "broadcast 4"]
)
def test_output_is_small_and_speaks(name):
    drawing = DRAWINGS[name]
    data, metadata = drawing._repr_mimebundle_()
    assert data["text/plain"] == f"<figure: {drawing.title}>\n{drawing.alt}"
    assert metadata["image/png"]["alt"] == drawing.alt and len(drawing.alt) > 20
    image = Image.open(io.BytesIO(data["image/png"]))
    assert image.width // 2 == metadata["image/png"]["width"] <= 1000
    assert len(data["image/png"]) < 60_000


def test_png_is_reproducible_and_keeps_the_colours():
    png = DRAWINGS["16 ranks"].png()
    assert png == DRAWINGS["16 ranks"].png()
    pixels = Image.open(io.BytesIO(png)).convert("RGB").getcolors(2**24)
    assert {show.rank_colour(rank) for rank in range(8)} <= {"#%02X%02X%02X" % colour for _, colour in pixels}


def cards(figure):
    """How many rectangles there are in each colour of a rank."""
    patches = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle) and patch.get_fill()]
    return Counter(to_hex(patch.get_facecolor()).upper() for patch in patches)


def test_one_card_for_each_rank_and_block():
    assert cards(show.equation([X, A]).figure()) == {show.rank_colour(rank): 2 for rank in range(4)}
    assert sum(cards(DRAWINGS["many copies"].figure()).values()) == 32
    assert sum(cards(DRAWINGS["empty rank"].figure()).values()) == 3


def test_cards_lie_where_the_elements_are():
    patches = [p for p in A.figure().axes[0].patches if p.get_fill()]
    left, width = patches[0].get_x(), patches[0].get_width()
    assert [p.get_x() for p in patches] == pytest.approx([left + width * rank for rank in range(4)])
    uneven = show.blocks(shape=(5, 10), mesh={"tp": 4}, split={1: "tp"}).figure().axes[0].patches
    assert [p.get_width() / uneven[-1].get_width() for p in uneven] == pytest.approx([1.5, 1.5, 1, 1])


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_cell_has_a_stripe_for_each_term(name):
    strip = show.collective(name, 3)
    terms = Counter(
        rank for frame in strip.frames for slots in frame.holds for cell in slots for _, rank in cell
    )
    headers = len(strip.frames)  # a bar of its colour above each rank in each frame
    assert cards(strip.figure()) == {show.rank_colour(rank): terms[rank] + headers for rank in range(3)}


def test_words_name_every_block_and_state():
    assert "ranks 0–3: [0:4, 0:6]" in X.alt and "rank 3: [0:6, 6:8]" in A.alt
    assert "rank 3: nothing" in DRAWINGS["empty rank"].alt
    assert "after step 1, the last: a0+a1 - | - b0+b1" in show.collective("reduce_scatter", 2).alt
    assert show.collective("all_reduce", 4).summary.startswith(
        "6 steps. Sent by each rank: 3/2 of a message."
    )
    assert "ranks 0–2: one message, by rank 3: nothing" in show.collective("broadcast", 4).summary


def test_bars_are_the_wire_bytes():
    axes = show.ledger(BOOK, Table(BOOK.calls[:1])).figure().axes[0]
    widths = [bar.get_width() * 1024**2 for bar in axes.patches]
    assert widths == pytest.approx([4500, 4500, 4500, 0, 9e6, 0, 4096, 0])  # measured, predicted; in MiB
    assert len({bar.get_hatch() for bar in axes.patches[::2]}) == 3  # three phases
    assert "bytes sent (MiB)" == axes.get_xlabel()
    assert (
        "all_reduce over tp (4 ranks), backward: 4.39 KiB, predicted 0 B"
        in show.ledger(BOOK, Table(BOOK.calls[:1])).alt
    )


def test_an_empty_ledger_is_an_error():
    with pytest.raises(ValueError, match="no rows"):
        show.ledger(Table())


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"),
        (512, "512 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (24 * 2**20, "24 MiB"),
        (3 * 2**50, "3,072 TiB"),
    ],
)
def test_bytes_text(count, text):
    assert show.bytes_text(count) == text


def test_curves_refuses_what_it_cannot_tell_apart():
    with pytest.raises(ValueError, match="5 curves"):
        show.curves({str(i): [1.0] for i in range(5)}, "x", "y", "t")
    with pytest.raises(ValueError, match="'dense' has no values"):
        show.curves({"dense": []}, "x", "y", "t")


def test_the_slider_moves_one_reel_past_its_window():
    shown = show.collective_slider("all_reduce", 3)
    slider, reel = shown.widget.children
    height = int(reel.layout.height.removesuffix("px"))
    assert (slider.min, slider.max) == (0, 4)
    assert Image.open(io.BytesIO(reel.value)).height == pytest.approx(2 * 5 * height, abs=1)
    slider.value = 3
    assert reel.layout.object_position == f"0 {-3 * height}px"
    data = shown._repr_mimebundle_()
    assert data["text/plain"] == "<slider: all_reduce on 3 ranks, 5 frames; run the cell to move it>"
    assert "application/vnd.jupyter.widget-view+json" in data


def test_show_leaves_pyplot_and_widgets_alone():
    code = (
        "import sys; from tpcourse import show; show.collective('all_gather', 2).png(); "
        "print([name for name in ('matplotlib.pyplot', 'ipywidgets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
