"""Make the exercises from their sources: `python -m tpcourse.grade.build [--check]`.

A source notebook is refused when its own solution fails a check, or when the untouched exercise passes one.
The result is what nbgrader's ``generate_assignment`` makes, less its checksums.
"""

import argparse
import json
import sys
from pathlib import Path

from tpcourse.grade.grading import Submission
from tpcourse.grade.notebook import HIDDEN, SOLUTION, graded_tasks, read, source

STUB = ["# Your code here", "..."]


def main() -> int:
    """Build every exercise, or with --check compare; the exit status is 1 when one is refused or out of date."""
    parser = argparse.ArgumentParser(
        prog="python -m tpcourse.grade.build", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if an exercise is not up to date"
    )
    parser.add_argument("--sources", type=Path, default=Path("solutions"))
    parser.add_argument("--exercises", type=Path, default=Path("exercises"))
    options = parser.parse_args()
    wrong = 0
    for path in sorted(options.sources.rglob("*.ipynb")):
        target = options.exercises / path.relative_to(options.sources)
        text = dump(exercise(read(path)))
        complaints = _stale(target, text) if options.check else refusals(path, json.loads(text))
        if not complaints and not options.check:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        print(f"{target}: {'; '.join(complaints) or 'up to date'}")
        wrong += bool(complaints)
    return 1 if wrong else 0


def _stale(target: Path, text: str) -> list[str]:
    current = target.exists() and target.read_text() == text
    return [] if current else ["not what its source gives; run python -m tpcourse.grade.build"]


def exercise(notebook: dict) -> dict:
    """The learner's notebook: solutions replaced by a stub, hidden tests gone, outputs gone, checks
    locked.
    """
    cells = [_released(cell) for cell in notebook["cells"]]
    return {**notebook, "cells": cells}


def _released(cell: dict) -> dict:
    cell = json.loads(json.dumps(cell))
    if cell["cell_type"] != "code":
        return cell
    lines = _without(_without(source(cell).split("\n"), SOLUTION, STUB), HIDDEN, [])
    while lines and not lines[-1].strip():
        lines.pop()
    cell["source"] = "\n".join(lines).splitlines(keepends=True)
    cell["outputs"], cell["execution_count"] = [], None
    marks = cell["metadata"].get("nbgrader")
    if marks:
        cell["metadata"] |= {"deletable": False} | ({"editable": False} if marks["locked"] else {})
    return cell


def _without(lines: list[str], marks: tuple[str, str], stub: list[str]) -> list[str]:
    """``lines`` with every region between ``marks`` replaced by ``stub``, at the region's own indentation."""
    kept, inside = [], False
    for line in lines:
        if line.strip() == marks[0]:
            if inside:
                raise ValueError(f"{marks[0]} inside another one")
            inside = True
            kept += [line[: len(line) - len(line.lstrip())] + text for text in stub]
        elif line.strip() == marks[1]:
            inside = False
        elif not inside:
            kept.append(line)
    if inside:
        raise ValueError(f"{marks[0]} without {marks[1]}")
    return kept


def dump(notebook: dict) -> str:
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def refusals(path: Path, learners: dict) -> list[str]:
    """Why the exercise must not be handed out; empty when the solution passes every check and the stub
    passes none.
    """
    tasks = graded_tasks(read(path))
    solved = Submission(read(path), tasks).results()
    untouched = Submission(learners, tasks).results()
    return [f"the solution fails {r.task}: {' '.join(r.lines)}" for r in solved if not r.passed] + [
        f"the untouched exercise passes {r.task}" for r in untouched if r.passed
    ]


if __name__ == "__main__":
    sys.exit(main())
