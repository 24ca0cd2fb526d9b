"""What costs are drawn with: lines, bars, fields and marks lie where the numbers are that they were given."""

import pytest

from tpcourse import show

P = (4, 16, 64)


def cost(ranks, width):
    return {"1D": 1024.0 * width} | ({"2D": 4096.0 * width / ranks} if ranks > 4 else {})


@pytest.fixture
def explorer():
    counted = {(16, 2): {"2D": 512.0}}
    return show.explorer(cost, counted, ("ranks P", P), {"width h": (1, 2, 8)}, "What is sent")


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


def test_any_size_can_be_on_the_axis(explorer):
    axes, = explorer.at(16, 2, "width h").figure().axes
    drawn = [line.get_xydata().tolist() for line in axes.lines]
    assert [[1, 1024], [2, 2048], [8, 8192]] in drawn and [[1, 256], [2, 512], [8, 2048]] in drawn
    assert [[2, 512]] in drawn  # counted
    assert axes.get_xlabel() == "width h" and axes.get_ylim() == explorer.at(16, 2).figure().axes[0].get_ylim()
    assert explorer.at(16, 2, "width h").alt.startswith("ranks P = 16, width h = 2, against width h:\n1D: 2 KiB")


def test_names_that_only_some_sizes_have_are_drawn_too_in_the_order_of_the_fullest():
    found = show.explorer(lambda x, y: {"a": 1.0} | ({"b": 2.0} if y > 1 else {}) | {"c": 4.0}, {}, ("x", (1, 2)),
                          {"y": (1, 2, 3)}, "t")
    assert found.names == ["a", "b", "c"]
    assert written(found.at(1, 1).figure().axes[0])[-5::2] == ["1 B", "not with these sizes", "4 B"]


@pytest.mark.parametrize("count", [0, 7])
def test_more_names_than_pens_are_refused(count):
    with pytest.raises(ValueError, match=f"{count} names, but this plot tells 1 to 6 apart"):
        show.explorer(lambda x, y: dict.fromkeys("abcdefg"[:count], 1), {}, ("x", P), {"y": (1,)}, "title")


def test_a_budgets_bars_begin_where_the_kind_before_ends():
    held = {"a": {"weights": 1024, "activations": 2048}, "b": {"weights": 512, "activations": 512}}
    drawn = show.budget(held, 2048, "Memory")
    bars = [(bar.get_x(), bar.get_width()) for bar in drawn.figure().axes[0].patches]
    assert bars == [(0, 1), (0, 0.5), (1, 2), (0.5, 0.5)]  # KiB, kind by kind
    assert drawn.alt == ("2 KiB are there.\n"
                         "a: weights 1 KiB, activations 2 KiB; together 3 KiB, does not fit\n"
                         "b: weights 512 B, activations 512 B; together 1 KiB, fits")


@pytest.mark.parametrize("held", [
    {}, {"a": {}}, {"a": {"x": 1}, "b": {"y": 1}}, {"a": dict.fromkeys("rstuvwxyz", 1)}])
def test_a_budget_of_other_bars_is_refused(held):
    with pytest.raises(ValueError, match="bars of . sets of kinds; give at least one bar"):
        show.budget(held, None, "Memory")


def written(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def won(axes, columns, rows):
    """Which of a map's areas has each field."""
    paths = [area.get_path() for area in axes.patches]
    return [[next((i for i, path in enumerate(paths) if path.contains_point((x, y))), None) for x in range(columns)]
            for y in range(rows)]


def test_a_map_says_who_costs_least_in_each_field():
    def costs(n, h):
        return {"flat": 8 * n, "rising": n + 3 * h}

    drawn = show.winners(costs, ("n", (1, 4)), ("h", (2, 16)), "Who")
    assert drawn.alt == "n, and who costs least.\nh 16: 1: flat, 4: flat\nh 2: 1: rising, 4: rising"
    axes, = drawn.figure().axes
    assert written(axes) == ["1.14", "3.2", "6.12", "1.62"]
    assert won(axes, 2, 2) == [[1, 1], [0, 0]]  # "rising" below, "flat" above


def test_a_map_of_one_name_is_refused():
    with pytest.raises(ValueError, match="1 names, but this map tells 2 to 6 apart"):
        show.winners(lambda n, h: {"a": 1}, ("n", (1,)), ("h", (1,)), "Who")


def at_most(n, h, ranks):
    return {"flat": 8.0 * n, "rising": n + 3.0 * h * ranks} | ({"square": 1.0} if ranks == 4 else {})


def test_a_maps_slider_moves_the_line_between_winners_and_its_marks():
    counted = {(4, 2, 1): {"flat": 5.0, "rising": 6.0}, (1, 2, 1): {"flat": 1.0, "rising": 2.0}}
    found = show.winners_sliders(at_most, ("n", (1, 4)), ("h", (2, 16)), {"ranks": (1, 2, 4)}, "Who", counted)
    axes, = found.at(1).figure().axes
    assert won(axes, 2, 2) == [[1, 1], [0, 0]]
    assert [edge.tolist() for edge in axes.collections[0].get_segments()] == [
        [[-0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [1.5, 0.5]]]
    same, other = axes.lines
    assert len(same.get_xdata()) == 0 and other.get_ydata() == [0, 0]  # both were counted the other way round
    assert "ranks = 1. n, and who costs least." in found.at(1).alt
    assert "h 2: 1: rising (counted: flat), 4: rising (counted: flat)" in found.at(1).alt
    axes, = found.at(4).figure().axes
    assert won(axes, 2, 2) == [[2, 2], [2, 2]] and axes.collections[0].get_segments() == []
    assert [len(line.get_xdata()) for line in axes.lines] == [0, 0]


def test_a_map_says_where_one_or_nobody_can_be():
    drawn = show.winners(lambda n, h: {"a": 1, "b": 2} if n * h == 4 else {"a": 1} if h == 2 else {},
                         ("n", (1, 2)), ("h", (2, 4)), "Who")
    axes, = drawn.figure().axes
    assert written(axes) == ["only", "2", "2", "none"]
    assert won(axes, 2, 2) == [[0, 0], [0, None]] and "h 4: 1: a, 2: nobody" in drawn.alt


def held(ranks, batch):
    weights, kept = 2.0**31 / ranks, 2.0**30 * batch
    return {"1D": {"weights": weights, "activations": kept}} | (
        {"2D": {"weights": weights, "activations": kept / ranks}} if ranks > 2 else {})


@pytest.fixture
def memory():
    counted = {(4, 2): {"1D": 2.5 * 2**30, "2D": 2.0**30}}
    return show.budget_sliders(held, counted, {"ranks P": (1, 2, 4), "batch b": (1, 2, 64)}, 2.0**31, "Memory")


def test_a_budgets_sliders_move_bars_and_marks(memory):
    axes, = memory.at(4, 2).figure().axes
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert bars == [(0, 0.5), (0, 0.5), (0.5, 2), (0.5, 0.5)]  # GiB
    marks, line = axes.lines
    assert marks.get_xydata().tolist() == [[2.5, 0], [1, 1]] and line.get_xdata() == [2, 2]
    assert written(axes) == ["ranks P = 4, batch b = 2", "2.5 GiB", "1 GiB, fits"]
    assert memory.at(4, 2).alt == (
        "ranks P = 4, batch b = 2:\n2 GiB are there.\n"
        "1D: weights 512 MiB, activations 2 GiB; together 2.5 GiB, counted 2.5 GiB, does not fit\n"
        "2D: weights 512 MiB, activations 512 MiB; together 1 GiB, counted 1 GiB, fits")


def test_a_bar_that_cannot_be_is_empty_and_the_axis_grows_as_bars_do(memory):
    axes, = memory.at(1, 1).figure().axes
    assert [bar.get_width() for bar in axes.patches] == [2, 0, 1, 0] and len(axes.lines[0].get_xdata()) == 0
    assert written(axes)[2] == "cannot be" and axes.get_xlim()[1] == pytest.approx(2.5 * 2**0.5)
    assert memory.at(1, 64).figure().axes[0].get_xlim()[1] >= 66
    assert memory.at(4, 1).figure().axes[0].get_xlim() == (0, 2.5)


def ring(size, alpha, beta, ranks):
    return 2 * (ranks - 1) * (alpha + size / ranks * beta)


POINTS = [(2.0**k, 2 * ring(2.0**k, 1e-4, 2e-9, 4)) for k in (10, 16, 22)]


@pytest.fixture
def bandwidth():
    return show.bandwidth(ring, {2: POINTS[:1], 4: reversed(POINTS), 64: []}, (1e-4, 2e-9), "All-reduce")


def test_bandwidth_draws_the_function_and_the_points(bandwidth):
    for alpha, beta, ranks in [(1e-4, 2e-9, 4), (8e-4, 2e-9 / 8, 64)]:
        time, speed = bandwidth.at(alpha, beta, ranks).figure().axes
        (line, timed, rule), (curve, sped, _) = time.lines, speed.lines
        sizes, seconds = line.get_data()
        assert seconds == pytest.approx([ring(size, alpha, beta, ranks) for size in sizes], rel=1e-12)
        assert curve.get_ydata() == pytest.approx(sizes / seconds, rel=1e-12)
        points = POINTS if ranks == 4 else []
        assert timed.get_xydata().tolist() == [list(point) for point in points]
        assert sped.get_xydata().tolist() == [[size, size / took] for size, took in points]
        assert rule.get_xdata()[0] == pytest.approx(alpha / beta * ranks)
        low, high = speed.get_ylim()
        assert low < min(curve.get_ydata()) and max(curve.get_ydata()) < high


def test_bandwidth_begins_at_the_fit(bandwidth):
    assert bandwidth.at().alt == (
        "ranks P = 4, α = 100 µs, 1/β = 476.84 MiB/s: half of the bandwidth from 195.31 KiB on\n"
        "1 KiB: 603 µs, measured 1.21 ms\n64 KiB: 797 µs, measured 1.59 ms\n4 MiB: 13.2 ms, measured 26.4 ms")
    assert [control.start for control in bandwidth.controls] == [1e-4, 2e-9, 4]


@pytest.mark.parametrize("measured, fit", [
    ({4: []}, (1, 1)), ({4: POINTS}, (0.0, 1e-9)), ({4: POINTS}, (1e-3, -1e-9))])
def test_bandwidth_of_nothing_or_of_no_line_is_refused(measured, fit):
    with pytest.raises(ValueError, match="points and a fit of .*; measure some messages"):
        show.bandwidth(ring, measured, fit, "All-reduce")


def test_growth_over_another_size_says_which():
    assert "n = 4: 8 B" in show.growth({"a": {4: 8.0, 8: 8.0}}, {}, "Bytes", xlabel="tokens n").alt
