"""What tests of drawings share."""

import itertools

import pytest


def _check(renderer, figure, texts):
    texts = [text for text in texts if text.get_text()]
    boxes = [text.get_window_extent(renderer) for text in texts]
    for text, box in zip(texts, boxes):
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height
        assert inside, f"{text.get_text()!r} is cut"
        assert text.get_fontsize() >= 8.5
    for (one, box), (other, second) in itertools.combinations(zip(texts, boxes), 2):
        assert not box.overlaps(second), f"{one.get_text()!r} lies over {other.get_text()!r}"


@pytest.fixture
def apart():
    """apart(renderer, figure, texts) fails where a text of the figure is cut, too small or written over another."""
    return _check
