"""SUMMA's film: its numbers are those of the product, its words those of the numbers; and bytes over ranks."""

import pytest
import torch

from tpcourse import show
from tpcourse.show.summa import PLACES

X, A, DY = (torch.arange(18.0).reshape(6, 3) % 5, torch.arange(18.0).reshape(3, 6) % 7,
            torch.arange(36.0).reshape(6, 6) % 4)
PRODUCTS = {"ab": (X, A, X @ A), "abt": (DY, A, DY @ A.T), "atb": (X, DY, X.T @ DY)}


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_last_step_has_the_product(product):
    a, b, c = PRODUCTS[product]
    last = show.summa(product, a, b, 3).frames[-1]
    shown = dict(zip(PLACES[product], (last.left, last.top, last.centre)))
    assert [shown["A"], shown["B"], shown["C"]] == [a.tolist(), b.tolist(), c.tolist()]


def test_a_step_adds_one_panel_and_fills_one_panel():
    frames = show.summa("ab", X, A, 3).frames
    for t, frame in enumerate(frames):
        assert frame.centre == (X[:, :t + 1] @ A[:t + 1]).tolist()
    first = show.summa("atb", X, DY, 3).frames[0]
    assert first.top[0] == (X.T @ DY)[0].tolist() and first.top[1] == [None] * 6


def test_the_words_say_who_moves_and_what_there_is():
    words = show.summa("abt", DY, A, 3, ("dY", "A", "dX")).alt
    assert "dY stays where it is" in words
    assert "step 2: A along columns, dX summed along rows, panel 2" in words
    assert show.summa("ab", torch.ones(2, 2), torch.ones(2, 2), 2).alt.endswith("After it C is 2 2; 2 2")


def test_the_slider_has_the_frames_of_the_film():
    slider = show.summa_slider("ab", X, A, 3, ("X", "A", "Y"))
    assert repr(slider) == "<slider: Y = X · A on 3 × 3 ranks, 3 frames; run the cell to move it>"
    assert slider.widget.children[0].max == 2


def test_what_is_no_product_or_does_not_divide():
    with pytest.raises(ValueError, match="no product 'ba'; there are ab, abt, atb"):
        show.summa("ba", X, A, 3)
    with pytest.raises(ValueError, match="a size of 3 is not divisible by the q=2 rows"):
        show.summa("ab", X, A, 2)


def test_bytes_over_ranks():
    lines = {"1D": {4: 100.0, 16: 120.0}, "2D": {4: 2048.0, 16: 60.0}}
    picture = show.growth(lines, {"2D": {16: 60.0}}, "Bytes")
    assert "2D: P = 4: 2 KiB, P = 16: 60 B (counted 60 B)" in picture.alt
    with pytest.raises(ValueError, match="points 3D have no line; there are 1D, 2D"):
        show.growth(lines, {"3D": {4: 1.0}}, "Bytes")
    with pytest.raises(ValueError, match="0 lines"):
        show.growth({}, {}, "Bytes")
