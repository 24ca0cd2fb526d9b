"""The planner's picture has the answer's numbers and words, or says why there is none; a question is asked once."""

import pytest

from tpcourse import show

GIB = 2**30


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

    return show.planner(best, {"small": 10, "huge": 1000 * GIB}, {"8 GPUs": 8, "1,024 GPUs": 1024},
                        [GIB, 2 * GIB, 4 * GIB])


def test_bars_marks_line_and_words_are_the_answers(planner):
    seconds, memory = planner.at("small", "8 GPUs", 2 * GIB).figure().axes
    bars = [[(bar.get_x(), bar.get_width()) for bar in axes.patches if bar.get_height() == 0.62][:3]
            for axes in (seconds, memory)]
    assert bars == [[(0, 3), (3, 1.5), (4.5, 0)], [(0, 1), (1, 0.5), (1.5, 0)]]  # s, GiB
    assert seconds.lines[0].get_xdata() == [4] and memory.lines[0].get_xdata() == [1]
    assert memory.lines[1].get_xdata() == [2, 2]
    texts = [text.get_text() for axes in (seconds, memory) for text in axes.texts if text.get_text()]
    assert texts == ["model = small, cluster = 8 GPUs, budget = 2 GiB", "4.5 s", "products 3 s",
                     "messages 1.5 s", "◇ measured 4 s", "2 replicas\nembedding 1D 4", "1.5 GiB",
                     "weights 1 GiB", "activations 512 MiB", "◇ counted 1 GiB", "budget 2 GiB"]
    assert planner.at("small", "8 GPUs", 2 * GIB).alt == (
        "small on 8 GPUs, 2 GiB a rank:\n"
        "a step: products 3 s, messages 1.5 s; together 4.5 s, measured 4 s\n"
        "memory: weights 1 GiB, activations 512 MiB; together 1.5 GiB, counted 1 GiB\n"
        "2 replicas\nembedding 1D 4")


def test_where_nothing_fits_it_says_why(planner):
    picture = planner.at("huge", "8 GPUs", GIB)
    why = f"{1000 * GIB} bytes needed, {8 * GIB} there; take more GPUs"
    assert picture.alt.splitlines()[1] == f"nothing fits: {why}"
    seconds, memory = picture.figure().axes
    bars = [bar for axes in (seconds, memory) for bar in axes.patches if bar.get_height() == 0.62]
    assert len(bars) == 12 and all(bar.get_width() == 0 for bar in bars)
    assert f"Nothing fits: {1000 * GIB} bytes needed" in seconds.texts[-1].get_text()
    assert "together" in planner.at("huge", "1,024 GPUs", 2 * GIB).alt


def test_a_question_is_asked_once(planner, asked):
    *controls, budget, _ = planner.widget.children
    assert asked == [(10, 8, 2 * GIB)]
    budget.value, budget.value, budget.value = 4 * GIB, 2 * GIB, 4 * GIB
    assert asked == [(10, 8, 2 * GIB), (10, 8, 4 * GIB)]
    assert [control.description for control in (*controls, budget)] == ["model", "cluster", "budget"]


def test_while_a_plan_is_sought_the_picture_before_is_pale(planner):
    *_, budget, image = planner.widget.children
    first, shown = image.value, []
    image.observe(lambda change: shown.append(change["new"]), "value")
    budget.value = 4 * GIB
    pale, new = shown
    assert len({first, pale, new}) == 3 and image.value == new
    budget.value = 2 * GIB
    assert shown[2:] == [first]  # known already


def test_long_words_are_wrapped_and_end(planner):
    planner.known["small", "8 GPUs", GIB] = show.Answer({"products": 1.0}, {"weights": 1.0}, "word " * 500)
    lines = planner.at("small", "8 GPUs", GIB).figure().axes[0].texts[-1].get_text().splitlines()
    assert len(lines) == 10 and max(map(len, lines)) <= 96 and lines[-1] == "..."
