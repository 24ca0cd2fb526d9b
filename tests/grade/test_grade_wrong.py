"""Every known-wrong solution fails, and for the reason that it is wrong."""

from collections import Counter
from dataclasses import replace

import grade_answers
import grade_answers_attention
import grade_answers_costs
import grade_answers_cube
import grade_answers_mlp
import grade_answers_planner
import grade_answers_row
import grade_answers_sequence
import grade_answers_summa
import grade_answers_vocabulary
import pytest
from grade_answers import Wrong, cell_of, with_cell

from tpcourse.grade.grading import Submission
from tpcourse.grade.tasks import TASKS

LATER = (
    grade_answers_row,
    grade_answers_mlp,
    grade_answers_vocabulary,
    grade_answers_attention,
    grade_answers_sequence,
    grade_answers_costs,
    grade_answers_summa,
    grade_answers_cube,
    grade_answers_planner,
)
MODULES = grade_answers, *LATER
WRONG = [wrong for module in MODULES for wrong in module.WRONG]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: f"{w.task}: {w.mistake}")
def test_fails_for_the_right_reason(wrong: Wrong, sources):
    notebook, graded = sources[wrong.task]
    text = cell_of(notebook, wrong.task)
    for old, new in wrong.changes:
        assert old == "*" or old in text
        text = new if old == "*" else text.replace(old, new)
    submission = Submission(
        with_cell(notebook, wrong.task, text), [replace(graded, ranks=(wrong.ranks,))], seed=1,
        seconds=wrong.seconds,
    )
    [result] = submission.results()
    assert not result.passed and result.points == 0
    assert wrong.says in "\n".join(result.lines)


def test_each_task_has_five():
    assert min(Counter(wrong.task for wrong in WRONG).values()) >= 5
    assert {wrong.task for wrong in WRONG} == set(TASKS)
