"""What plans are drawn with: degrees, fronts, and seconds against a budget."""

import pytest

from tpcourse import show


def texts(picture):
    return [text.get_text() for text in picture.figure().axes[0].texts]


def test_gpus_are_numbered_over_ranks_then_replicas_then_stages():
    drawn = show.degrees(2, 2, 2, 32)
    assert drawn.alt.splitlines()[2] == "GPU 2: replica 1, stage 0, 1/2 of layers 0-15"
    assert drawn.alt.splitlines()[4] == "GPU 4: replica 0, stage 1, 1/2 of layers 16-31"
    assert texts(drawn).count("1/2 of layers 0-15") == 4 and len(drawn.figure().axes[0].patches) == 8
    assert "all of layers 0-3" in texts(show.degrees(1, 1, 1, 4))


def test_a_front_and_the_ways_above_it_lie_where_their_numbers_are():
    drawn = show.fronts({"a": [(2e-3, 1e6), (1e-3, 3e6)], "b": [(3e-3, 2e6)]}, [(2e-3, 1e6), (1e-3, 3e6)], "t")
    lines = [line.get_xydata().tolist() for line in drawn.figure().axes[0].lines]
    assert lines[0] == [[1, 2], [3, 1]] and lines[1] == [[2, 3]]
    assert drawn.figure().axes[0].lines[2].get_xydata().tolist() == [[1, 2], [3, 1], [3, 1]]
    assert drawn.alt == "3 ways, of which no other beats:\n2 ms, 1.0 MB\n1 ms, 3.0 MB"


def test_where_nothing_fits_there_is_no_mark():
    drawn = show.seconds_against_budget({"plan": {1e9: None, 2e9: 3.0, 4e9: 2.0}}, "t")
    assert drawn.figure().axes[0].lines[0].get_xydata().tolist() == [[2, 3], [4, 2]]
    assert drawn.alt == "plan: 1 GB nothing fits, 2 GB 3 s, 4 GB 2 s"


@pytest.mark.parametrize("call, says", [
    (lambda: show.degrees(1, 3, 1, 32), "32 layers on 1 x 3 x 1 GPUs"),
    (lambda: show.degrees(8, 8, 1, 32), "room for 32 GPUs"),
    (lambda: show.fronts({}, [], "t"), "0 ways on the front"),
    (lambda: show.seconds_against_budget({}, "t"), "0 lines, but this plot tells 1 to 6 apart")])
def test_what_cannot_be_drawn_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()
