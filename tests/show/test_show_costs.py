"""Explorer, budget and map: the numbers are those that they were given, and moving a slider draws them."""

import io
import time

import numpy as np
import pytest
from PIL import Image

from tpcourse import show

P = (4, 16, 64)


def cost(ranks, width):
    return {"1D": 1024.0 * width} | ({"2D": 4096.0 * width / ranks} if ranks > 4 else {})


@pytest.fixture
def explorer():
    counted = {(16, 2): {"2D": 512.0}}
    return show.explorer(cost, counted, ("ranks P", P), {"width h": (1, 2, 8)}, "What is sent")


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("L"))


def test_an_explorers_still_picture_says_the_numbers_of_its_place(explorer):
    assert explorer.at(16, 2).alt == "ranks P = 16, width h = 2:\n1D: 2 KiB\n2D: 512 B, counted 512 B"
    assert explorer.at(4, 8).alt == "ranks P = 4, width h = 8:\n1D: 8 KiB"


def test_lines_and_marks_lie_where_the_numbers_are(explorer):
    axes, = explorer.at(16, 2).figure().axes
    drawn = [line.get_xydata().tolist() for line in axes.lines]
    assert [[4, 2048], [16, 2048], [64, 2048]] in drawn  # 1D
    assert [[16, 512], [64, 128]] in drawn and [[16, 512]] in drawn  # 2D, and its mark
    low, high = axes.get_ylim()
    assert low < 64 and high > 8192  # the limits hold for all widths


def test_each_slider_moves_the_picture_and_back_again(explorer):
    *sliders, image = explorer.widget.children
    assert [slider.description for slider in sliders] == ["ranks P", "width h"]
    assert [slider.options for slider in sliders][0] == (("4", 4), ("16", 16), ("64", 64))
    for slider in sliders:
        before, value = image.value, slider.value
        slider.value = slider.options[0][1]
        assert (pixels(image.value) != pixels(before)).any()
        slider.value = value
        assert (pixels(image.value) == pixels(before)).all()


def test_the_widget_draws_what_the_still_picture_does(explorer):
    still = pixels(explorer.at(16, 2).png())
    moved = Image.open(io.BytesIO(explorer.widget.children[-1].value)).convert("L")
    same = np.asarray(moved.resize(still.shape[::-1]))
    assert np.mean(abs(same.astype(int) - still) > 64) < 0.01
    assert (pixels(explorer.at(64, 8).png()) != still).any()


def test_a_move_takes_less_than_100_ms_of_a_core(explorer):
    slider = explorer.widget.children[1]
    took = []
    for value in (1, 8, 2, 1, 8):
        start = time.process_time()
        slider.value = value
        took.append(time.process_time() - start)
    assert min(took) < 0.1, took


def test_where_there_are_no_widgets_an_explorer_is_a_sentence(explorer):
    assert repr(explorer) == "<sliders: What is sent; ranks P, width h; run the cell to move them>"
    assert explorer._repr_mimebundle_()["text/plain"] == repr(explorer)


def test_more_names_than_pens_are_refused():
    with pytest.raises(ValueError, match="5 names, but this plot tells 1 to 4 apart"):
        show.explorer(lambda x, y: dict.fromkeys("abcde", 1), {}, ("x", P), {"y": (1,)}, "title")


def test_a_budgets_bars_begin_where_the_kind_before_ends():
    held = {"a": {"weights": 1024, "activations": 2048}, "b": {"weights": 512, "activations": 512}}
    drawn = show.budget(held, 2048, "Memory")
    bars = [(bar.get_x(), bar.get_width()) for bar in drawn.figure().axes[0].patches]
    assert bars == [(0, 1), (0, 0.5), (1, 2), (0.5, 0.5)]  # KiB, kind by kind
    assert drawn.alt == ("2 KiB are there.\n"
                         "a: weights 1 KiB, activations 2 KiB; together 3 KiB, does not fit\n"
                         "b: weights 512 B, activations 512 B; together 1 KiB, fits")


@pytest.mark.parametrize("held", [
    {}, {"a": {}}, {"a": {"x": 1}, "b": {"y": 1}}, {"a": dict.fromkeys("vwxyz", 1)}])
def test_a_budget_of_other_bars_is_refused(held):
    with pytest.raises(ValueError, match="bars of . sets of kinds; give at least one bar"):
        show.budget(held, None, "Memory")


def test_a_map_says_who_costs_least_in_each_field():
    def costs(n, h):
        return {"flat": 8 * n, "rising": n + 3 * h}

    drawn = show.winners(costs, ("n", (1, 4)), ("h", (2, 16)), "Who")
    assert drawn.alt == "n, and who costs least.\nh 16: 1: flat, 4: flat\nh 2: 1: rising, 4: rising"
    axes, = drawn.figure().axes
    assert [text.get_text() for text in axes.texts] == ["1.14", "3.2", "6.12", "1.62"]
    shades = [field.get_facecolor() for field in axes.patches]
    assert shades[0] == shades[1] != shades[2] == shades[3]


def test_a_map_of_one_name_is_refused():
    with pytest.raises(ValueError, match="1 names, but this map tells 2 to 4 apart"):
        show.winners(lambda n, h: {"a": 1}, ("n", (1,)), ("h", (1,)), "Who")


def test_growth_over_another_size_says_which():
    assert "n = 4: 8 B" in show.growth({"a": {4: 8.0, 8: 8.0}}, {}, "Bytes", xlabel="tokens n").alt
