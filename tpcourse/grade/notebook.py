"""Notebooks as data: the tasks of a source notebook, the code cells of a submission."""

import ast
import json
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 20 << 20
HIDDEN = ("### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS")
SOLUTION = ("### BEGIN SOLUTION", "### END SOLUTION")


@dataclass(frozen=True)
class Cell:
    """One code cell: ``label`` as feedback names it, its text, and nbgrader's id for it, if it has one."""

    label: str
    text: str
    grade_id: str | None


@dataclass(frozen=True)
class Graded:
    """One graded task of a source notebook: which check, on which object, with which numbers of ranks, for
    what points.
    """

    task: str
    answer: str
    ranks: tuple[int, ...]
    points: float
    grade_id: str


def read(path: Path) -> dict:
    """The notebook at ``path``. Raises ValueError when it is not one."""
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path.name} is a link or another special file; only a plain file is read")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(
            f"{path.name} has {path.stat().st_size >> 20} MiB; at most {MAX_BYTES >> 20} are read"
        )
    try:
        notebook = json.loads(path.read_bytes())
        cells = [(cell["cell_type"], source(cell)) for cell in notebook["cells"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path.name} is not a notebook that can be read ({type(error).__name__})") from None
    if not cells:
        raise ValueError(f"{path.name} has no cells")
    return notebook


def source(cell: dict) -> str:
    """A cell's text, which notebooks keep as one string or as a list of lines."""
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def code_cells(notebook: dict) -> list[Cell]:
    """The code cells in order, numbered from 1 as a person counts them."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [Cell(f"cell {i + 1}", source(cell), _grade_id(cell)) for i, cell in enumerate(cells)]


def graded_tasks(notebook: dict) -> list[Graded]:
    """The tasks of a source notebook: the ``check(...)`` calls of its graded cells, those between hidden
    marks too.

    The numbers of ranks of several checks in one cell are joined. Raises ValueError for a graded cell
    without a check.
    """
    found = []
    for cell in notebook["cells"]:
        if _metadata(cell).get("grade"):
            calls = [
                node
                for node in ast.walk(ast.parse(source(cell)))
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check"
            ]
            if not calls:
                raise ValueError(f"graded cell {_metadata(cell)['grade_id']} holds no check(...)")
            ranks = dict.fromkeys(n for call in calls for n in _ranks(call))
            task, answer = calls[0].args[0].value, calls[0].args[1].id
            found.append(
                Graded(task, answer, tuple(ranks), _metadata(cell)["points"], _metadata(cell)["grade_id"])
            )
    return found


def _ranks(call: ast.Call) -> list[int]:
    return next((ast.literal_eval(word.value) for word in call.keywords if word.arg == "ranks"), [])


def _grade_id(cell: dict) -> str | None:
    found = _metadata(cell).get("grade_id")
    return found if isinstance(found, str) else None


def _metadata(cell: dict) -> dict:
    metadata = cell.get("metadata")
    found = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    return found if isinstance(found, dict) else {}
