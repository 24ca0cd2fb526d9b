"""The planner's picture has the answer's numbers and words, or says why there is none; a question is asked once."""

import pytest

from tpcourse import show

GB = 10**9


@pytest.fixture
def asked():
    return []


@pytest.fixture
def planner(asked):
    def best(model, cluster, budget):
        asked.append((model, cluster, budget))
        if model > cluster * budget:
            raise ValueError(f"{model} bytes needed, {cluster * budget} there; take more GPUs")
        return show.Answer({"products": 3.0, "messages": 1.5}, {"weights": budget / 2, "activations": budget / 4},
                           "2 replicas\nembedding 1D 4", measured=4.0, counted=0.5 * budget)

    return show.planner(best, {"small": 10, "huge": 1000 * GB}, {"8 GPUs": 8, "1,024 GPUs": 1024},
                        [GB, 2 * GB, 4 * GB])


def test_bars_marks_line_and_words_are_the_answers(planner):
    seconds, memory = planner.at("small", "8 GPUs", 2 * GB).figure().axes
    bars = [[(bar.get_x(), bar.get_width()) for bar in axes.patches if bar.get_height() == 0.62][:3]
            for axes in (seconds, memory)]
    assert bars == [[(0, 3), (3, 1.5), (4.5, 0)], [(0, 1), (1, 0.5), (1.5, 0)]]  # s, GB
    assert seconds.lines[0].get_xdata() == [4] and memory.lines[0].get_xdata() == [1]
    assert memory.lines[1].get_xdata() == [2, 2]
    texts = [text.get_text() for axes in (seconds, memory) for text in axes.texts if text.get_text()]
    assert texts == ["model = small, cluster = 8 GPUs, budget = 2 GB", "4.5 s", "products 3 s",
                     "messages 1.5 s", "◇ measured 4 s", "1.5 GB",
                     "weights 1 GB", "activations 0.5 GB", "◇ counted 1 GB", "budget 2 GB",
                     "2 replicas\nembedding 1D 4"]
    assert planner.at("small", "8 GPUs", 2 * GB).alt == (
        "small on 8 GPUs, 2 GB a rank:\n"
        "a step: products 3 s, messages 1.5 s; together 4.5 s, measured 4 s\n"
        "memory: weights 1 GB, activations 0.5 GB; together 1.5 GB, counted 1 GB\n"
        "2 replicas\nembedding 1D 4")


def test_where_nothing_fits_it_says_why(planner):
    picture = planner.at("huge", "8 GPUs", GB)
    why = f"{1000 * GB} bytes needed, {8 * GB} there; take more GPUs"
    assert picture.alt.splitlines()[1] == f"nothing fits: {why}"
    seconds, memory = picture.figure().axes
    bars = [bar for axes in (seconds, memory) for bar in axes.patches if bar.get_height() == 0.62]
    assert len(bars) == 16 and all(bar.get_width() == 0 for bar in bars)
    assert f"Nothing fits: {1000 * GB} bytes needed" in memory.texts[-1].get_text()
    assert "together" in planner.at("huge", "1,024 GPUs", 2 * GB).alt


def test_a_question_is_asked_once(planner, asked):
    *controls, budget, _ = planner.widget.children
    assert asked == [(10, 8, 2 * GB)]
    budget.value, budget.value, budget.value = 4 * GB, 2 * GB, 4 * GB
    assert asked == [(10, 8, 2 * GB), (10, 8, 4 * GB)]
    assert [control.description for control in (*controls, budget)] == ["model", "cluster", "budget"]


def test_while_a_plan_is_sought_the_picture_before_is_pale(planner):
    *_, budget, image = planner.widget.children
    first, shown = image.value, []
    image.observe(lambda change: shown.append(change["new"]), "value")
    budget.value = 4 * GB
    pale, new = shown
    assert len({first, pale, new}) == 3 and image.value == new
    budget.value = 2 * GB
    assert shown[2:] == [first]  # known already


def test_long_words_are_wrapped_and_end(planner):
    planner.known["small", "8 GPUs", GB] = show.Answer({"products": 1.0}, {"weights": 1.0}, "word " * 500)
    lines = planner.at("small", "8 GPUs", GB).figure().axes[1].texts[-1].get_text().splitlines()
    assert len(lines) == 10 and max(map(len, lines)) <= 96 and lines[-1] == "..."


def test_a_kind_keeps_its_shade_and_nothing_of_it_is_not_drawn():
    def best(model, cluster, budget):
        seconds = {"bubble": 1.0, "products": 2.0} if model else {"moves": 0.0, "products": 4.0}
        return show.Answer(seconds, {"all": 1e9}, "")

    found = show.planner(best, {"one": 1, "other": 0}, {"8 GPUs": 8}, [2e9])
    bars = [[bar.get_width() for bar in found.at(name).figure().axes[0].patches if bar.get_height() == 0.62]
            for name in ("one", "other")]
    assert bars == [[1, 2, 0, 0, 0, 0, 0, 0], [0, 4, 0, 0, 0, 0, 0, 0]]
    axes = found.at("other").figure().axes[0]
    assert [key.get_visible() for key in axes.patches if key.get_height() == 0.2] == [False, True] + 6 * [False]
    assert "moves" not in "".join(text.get_text() for text in axes.texts)


def test_more_kinds_than_shades_are_refused():
    def best(model, cluster, budget):
        return show.Answer(dict.fromkeys("abcdefghi", 1.0), {"all": 1e9}, "")

    with pytest.raises(ValueError, match=r"9 kinds \(a, b, .*\), but bars tell 1 to 8 apart; add some of them up"):
        show.planner(best, {"one": 1}, {"8 GPUs": 8}, [2e9]).at()
