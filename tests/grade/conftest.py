"""The source notebooks as the graders' tests use them."""

from pathlib import Path

import pytest

from tpcourse.grade.notebook import Graded, graded_tasks, read

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def sources() -> dict[str, tuple[dict, Graded]]:
    """By task: its source notebook and how it is graded."""
    found = {}
    for path in sorted((ROOT / "solutions").rglob("*.ipynb")):
        notebook = read(path)
        found |= {graded.task: (notebook, graded) for graded in graded_tasks(notebook)}
    return found
