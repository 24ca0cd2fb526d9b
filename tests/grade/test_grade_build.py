"""The exercises are what their sources give, and a source that is not right is refused."""

import json
import zipfile

import pytest
from conftest import ROOT
from grade_answers import cell_of, with_cell

from tpcourse.grade import build, release
from tpcourse.grade.grading import Submission
from tpcourse.grade.notebook import read, source
from tpcourse.grade.source import statements

SOURCES = sorted((ROOT / "solutions").rglob("*.ipynb"))


def test_exercises_are_up_to_date():
    """On failure: python -m tpcourse.grade.build."""
    made = {p.relative_to(ROOT / "exercises") for p in (ROOT / "exercises").rglob("*.ipynb")}
    assert made == {p.relative_to(ROOT / "solutions") for p in SOURCES}
    for path in SOURCES:
        target = ROOT / "exercises" / path.relative_to(ROOT / "solutions")
        assert target.read_text() == build.dump(build.exercise(read(path)))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_the_solution_passes_and_the_stub_fails(path):
    assert build.refusals(path, build.exercise(read(path))) == []


def test_refusals(tmp_path, sources):
    """A solution that is wrong, and a region that leaves the answer in the exercise, are both named."""
    notebook, _ = sources["ring_all_reduce"]
    path = tmp_path / "01.ipynb"
    path.write_text(
        json.dumps(with_cell(notebook, "ring_all_gather", "def ring_all_gather(x):\n    return x\n"))
    )
    refused = build.refusals(path, build.exercise(read(path)))
    assert any("the solution fails ring_all_gather" in r for r in refused)
    text = (
        cell_of(notebook, "ring_all_gather")
        .replace("    ### BEGIN SOLUTION\n", "")
        .replace("    ### END SOLUTION", "")
    )
    path.write_text(json.dumps(with_cell(notebook, "ring_all_gather", text)))
    assert build.refusals(path, build.exercise(read(path))) == [
        "the untouched exercise passes ring_all_gather"
    ]


def test_no_exercise_holds_an_answer():
    for path in (ROOT / "exercises").rglob("*.ipynb"):
        text = "".join(source(cell) for cell in read(path)["cells"])
        assert "SOLUTION" not in text and "HIDDEN" not in text and "ranks=[" not in text


def test_an_unclosed_region_is_an_error():
    cell = {"cell_type": "code", "metadata": {}, "source": "x = 1\n### BEGIN SOLUTION\ny = 2\n"}
    with pytest.raises(ValueError, match="without"):
        build.exercise({"cells": [cell]})


def test_release_withholds_solutions(tmp_path, monkeypatch):
    archive = tmp_path / "learners.zip"
    monkeypatch.chdir(ROOT)
    release.main(str(archive))
    with zipfile.ZipFile(archive) as opened:
        names = opened.namelist()
        texts = [
            opened.read(name)
            for name in names
            if name.endswith((".ipynb", ".py")) and "grade/build" not in name and "grade/notebook" not in name
        ]
    assert any(name.startswith("tpcourse/exercises/") for name in names)
    assert not any("solutions/" in name or "tests/grade" in name for name in names)
    assert not any(b"### BEGIN HIDDEN TESTS" in text or b"### BEGIN SOLUTION" in text for text in texts)


def test_only_definitions_of_a_cell_are_run(sources):
    """Experiments between the tasks (calls, loops, magics, calls into the package) do not disturb grading."""
    notebook, graded = sources["ring_all_gather"]
    extra = [
        "%load_ext tpcourse\n%%ranks tp=4",
        "%%ranks tp=4\nthis is not python",
        "!rm -rf x\nouts = tp.spawn(len, ranks=4)",
        "while True:\n    pass",
        "1 / 0",
        "plt = undefined_name",
        "from tpcourse import show",
        "def broken(:",
    ]
    cells = [{"cell_type": "code", "metadata": {}, "source": text} for text in extra]
    [result] = Submission({"cells": cells + notebook["cells"]}, [graded]).results()
    assert result.passed, result.lines


WHITE = """
if (
    1
    != 2
):
    big = (
        17
        % 10
    )
"""


@pytest.mark.parametrize(
    "before", [WHITE, "%%time\n", '%timeit 1\n!echo "it\'s"\ntorch.cat?\n', "import torch\nif 1:\n    !ls\n"]
)
def test_what_a_cell_may_hold_beside_the_answer(before: str):
    """Magics are passed over; what only looks like one, in the middle of an expression, is not."""
    names = {}
    for code, _ in statements(before + "def answer(x):\n    return x\n", "cell 1"):
        exec(code, names)
    assert "answer" in names and names.get("big", 7) == 7


def test_a_check_that_was_copied(sources):
    """The answer may stand below a first copy of its check."""
    notebook, graded = sources["ring_all_gather"]
    marks = [c["metadata"].get("nbgrader", {}).get("grade_id") for c in notebook["cells"]]
    copy = notebook["cells"][marks.index(graded.grade_id)]
    [result] = Submission({"cells": [copy, *notebook["cells"]]}, [graded]).results()
    assert result.passed, result.lines
