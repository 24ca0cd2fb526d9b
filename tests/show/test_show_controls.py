"""Every picture under controls: they move it and back, it is the still one, labels are inside, and little is drawn twice."""

import io
import itertools

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from tpcourse import show
from tpcourse.show.colours import luminance
from tpcourse.show.growth import PENS

RANKS = {"ranks P": (4, 16, 64, 256)}
KINDS = ("parameters", "gradients", "optimizer", "activations")
NAMES = ("1D", "1D+SP", "2D", "2.5D", "3D", "3D, all-reduce")


def cost(*sizes):
    ranks, rest = sizes[0], sizes[1:]
    return {name: 2.0**20 * np.prod(rest) * (1 + k) / ranks ** (k / 5)
            for k, name in enumerate(NAMES) if k or ranks < 256}


def held(ranks, batch):
    return {name: dict.fromkeys(KINDS, 2.0**30 * (k + batch) / ranks)
            for k, name in enumerate(NAMES) if k or ranks < 256}


def best(model, cluster, budget):
    if model > cluster * budget:
        raise ValueError(f"{model} bytes needed")
    kinds = ("layout changes", "products", "elementwise", "messages", "stages", "gradients", "optimizer", "bubble")
    return show.Answer({kind: model / budget * (k + 1) / 10 / cluster for k, kind in enumerate(kinds)},
                       dict.fromkeys(KINDS, budget / 5),
                       "4 replicas x 8 stages\n" * 10, measured=model / budget / 5, counted=budget * 0.9)


def ring(size, alpha, beta, ranks):
    return 2 * (ranks - 1) * (alpha + size / ranks * beta)


MAKE = {
    "explorer": lambda: show.explorer(
        cost, {(16, 8192, 64): cost(16, 8192, 64)}, ("ranks P", RANKS["ranks P"]),
        {"width h": (4096, 8192, 12_288), "batch b": (1, 64, 256)}, "One layer"),
    "memory": lambda: show.budget_sliders(
        held, {(16, 8): dict.fromkeys(NAMES, 2.0**34)}, RANKS | {"batch b": (1, 8, 64)}, 80 * 2.0**30, "Memory"),
    "map": lambda: show.winners_sliders(
        lambda n, h, ranks: dict(list(cost(ranks, n + 300 * h // ranks).items())[:4]),
        ("tokens n", (512, 1024, 2048)), ("width h", (1024, 4096)), RANKS, "Who sends least",
        {(512, 1024, 16): {"1D": 1.0, "1D+SP": 2.0}}),
    "bandwidth": lambda: show.bandwidth(
        ring, {ranks: [(2.0**k, ring(2.0**k, 2e-4, 2e-9, ranks)) for k in range(10, 26, 3)] for ranks in (2, 4, 8)},
        (1e-4, 1e-9), "All-reduce"),
    "planner": lambda: show.planner(
        best, {"7B": 7e9, "GPT-3, 175B": 175e9}, {"8 A100": 8, "1,024 A100": 1024}, (16e9, 40e9, 80e9)),
}


@pytest.fixture(params=MAKE)
def made(request):
    return MAKE[request.param]()


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("L"))


def others(control):
    """Its other values, one after the other, and at last its own again."""
    values = [value for _, value in control.options] if isinstance(control.options[0], tuple) else control.options
    return [*(value for value in values if value != control.value), control.value]


def test_each_control_moves_the_picture_and_back_again(made):
    *controls, image = made.widget.children
    assert [control.description for control in controls] == [control.name for control in made.controls]
    for control in controls:
        first, values = image.value, others(control)
        for value in values:
            before = image.value
            control.value = value
            assert image.value != before, f"{control.description} = {value}"
        assert image.value == first


def test_the_widget_draws_what_the_still_picture_does(made):
    *controls, image = made.widget.children
    for step in (0, -1):
        for control, part in zip(controls, made.controls):
            control.value = part.values[step]
        picture, raw = made.at(*(control.value for control in controls)), io.BytesIO()
        picture.figure().savefig(raw, dpi="figure")
        apart = abs(pixels(image.value).astype(int) - pixels(raw.getvalue()))
        assert np.mean(apart > 64) < 0.001


def test_a_move_draws_the_ground_again_only_where_an_axis_changed(made, monkeypatch):
    """That is what makes it quick: tests/browser keeps the milliseconds."""
    frame, drawn = made.frame(), []
    monkeypatch.setattr(frame.canvas, "draw", lambda draw=frame.canvas.draw: (drawn.append(1), draw()))
    axes, values = [], [control.start for control in made.controls]
    for control in range(len(values)):
        for value in (made.controls[control].values[0], made.controls[control].values[-1]):
            values[control] = value
            made.move(frame, values)
            frame.pixels()
            axes.append(str([(part.get_xlim(), part.get_ylim(), part.get_xlabel()) for part in frame.figure.axes]))
    changes = sum(one != other for one, other in itertools.pairwise(axes))
    assert len(drawn) == 1 + changes and len(drawn) < len(axes)


def test_where_there_are_no_widgets_it_is_a_sentence(made):
    words = repr(made)
    assert words.startswith(f"<sliders: {made.title}; ") and words.endswith("; run the cell to move them>")
    data = made._repr_mimebundle_()
    assert data["text/plain"] == words and "application/vnd.jupyter.widget-view+json" in data


def test_an_explorers_sentence_names_its_sizes():
    assert repr(MAKE["explorer"]()) == "<sliders: One layer; ranks P, width h, batch b; run the cell to move them>"


def test_what_is_left_out_is_where_the_controls_begin(made):
    assert made.at().png() == made.at(*(control.start for control in made.controls)).png()


def test_values_that_no_control_has_are_refused(made):
    many = len(made.controls) + 1
    with pytest.raises(ValueError, match=f"{many} values for {many - 1} controls"):
        made.at(*[1] * many)
    with pytest.raises(ValueError, match=f"{made.controls[0].name} = -1 is not on its control; take one of"):
        made.at(-1)


def test_the_picture_says_where_its_controls_are():
    texts = [text.get_text() for text in MAKE["explorer"]().at(16, 4096, 64, "width h").figure().axes[0].texts]
    assert "ranks P = 16, width h = 4,096, batch b = 64" in texts
    texts = [text.get_text() for text in MAKE["planner"]().at("7B", "8 A100", 16e9).figure().axes[0].texts]
    assert "model = 7B, cluster = 8 A100, budget = 16 GB" in texts


@pytest.mark.parametrize("end", [0, -1])
def test_no_text_is_cut_or_written_over(apart, made, end):
    figure = made.at(*(control.values[end] for control in made.controls)).figure()
    canvas = FigureCanvasAgg(figure)
    figure.savefig(io.BytesIO(), dpi="figure")  # with what moves
    texts = [text for axes in figure.axes
             for text in (*axes.texts, axes.xaxis.label, axes.yaxis.label, axes._left_title)]
    for axis in itertools.chain.from_iterable((axes.xaxis, axes.yaxis) for axes in figure.axes):
        low, high = sorted(axis.get_view_interval())
        texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    texts += [text for legend in figure.legends for text in legend.get_texts()]
    apart(canvas.get_renderer(), figure, texts)


@pytest.mark.parametrize("colour", sorted({colour for colour, _, _ in PENS}))
def test_pens_are_seen_on_a_projector(colour):
    assert 1.05 / (luminance(colour) + 0.05) >= 3  # WCAG 2.2, 1.4.11


def test_pens_differ_in_more_than_grey():
    assert len({(dash, mark) for _, dash, mark in PENS}) == len(PENS) == 6
    assert len({mark for _, _, mark in PENS}) == 6
