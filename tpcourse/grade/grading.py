"""One submitted notebook: run its cells in ranks, hold each task to its cases, give points."""

import linecache
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tpcourse.grade.checking import SECONDS, generator, printed_lines
from tpcourse.grade.code import Code
from tpcourse.grade.judge import Verdict
from tpcourse.grade.notebook import Graded, code_cells, graded_tasks, read
from tpcourse.grade.tasks import task


@dataclass
class Result:
    """What one task came to: points of maximum, and the sentences that say why."""

    task: str
    points: float
    maximum: float
    passed: bool
    lines: list[str]
    seed: int


class Submission:
    """A learner's notebook against the ``tasks`` of its source. Nothing of it runs in this process."""

    def __init__(
        self, notebook: dict, tasks: list[Graded], seed: int | None = None, seconds: float = SECONDS
    ) -> None:
        self.tasks, self.seed, self.seconds = tasks, seed, seconds
        self.cells = code_cells(notebook)
        for label in [name for name in linecache.cache if name.startswith("cell ")]:
            del linecache.cache[label]  # another learner's
        for cell in self.cells:  # so that feedback can show the line that failed
            linecache.cache[cell.label] = (
                len(cell.text),
                None,
                cell.text.splitlines(keepends=True),
                cell.label,
            )

    def results(self) -> list[Result]:
        return list(self.graded())

    def graded(self) -> Iterator[Result]:
        """The results, one after the other as they are known."""
        code = Code(self._load, self.seconds)
        try:
            for graded in self.tasks:
                yield self._grade(code, graded)
        finally:
            code.close()

    def _load(self, start: int, stop: int) -> tuple[dict, list]:
        return {"do": "cells", "cells": [[cell.label, cell.text] for cell in self.cells[start:stop]]}, []

    def _grade(self, code: Code, graded: Graded) -> Result:
        seed = secrets.randbelow(1 << 31) if self.seed is None else self.seed
        last: Verdict | None = None
        for count in graded.ranks or task(graded.task).ranks:
            cases = task(graded.task).cases(count, generator(seed, count))
            last = code.verdicts(cases, graded.answer, self._cells_before(graded))[-1]
            if not last.passed:
                lines = [last.case + ":", *last.lines, *printed_lines(last.printed)]
                return Result(graded.task, 0, graded.points, False, [plain(line) for line in lines], seed)
        return Result(
            graded.task, graded.points, graded.points, True, [f"{last.case}: {last.lines[0]}"], seed
        )

    def _cells_before(self, graded: Graded) -> int:
        """How many code cells stand before the task's check, the last one if it was copied; all of them
        when the check is not there any more.
        """
        found = [i for i, cell in enumerate(self.cells) if cell.grade_id == graded.grade_id]
        return found[-1] if found else len(self.cells)


def plain(text: str) -> str:
    """``text`` without control characters: what a learner wrote must not steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


class Sources:
    """The instructor's notebooks, which know the tasks, their hidden tests and their points."""

    def __init__(self, folder: Path) -> None:
        self.notebooks = {path.stem: graded_tasks(read(path)) for path in sorted(folder.rglob("*.ipynb"))}
        if not self.notebooks:
            raise ValueError(f"{folder} holds no source notebook; name the folder with --solutions")

    def tasks_of(self, notebook: dict, path: Path) -> list[Graded]:
        """The tasks that a submission is graded on: of the source with most checks in common, else of one
        whose task it has.

        Raises ValueError when neither tells.
        """
        ids = {cell.grade_id for cell in code_cells(notebook)}
        common = {name: sum(g.grade_id in ids for g in tasks) for name, tasks in self.notebooks.items()}
        best = max(common, key=common.get)
        if common[best]:
            return self.notebooks[best]
        for name, tasks in self.notebooks.items():
            if any(g.answer in cell.text for cell in code_cells(notebook) for g in tasks):
                return tasks
        raise ValueError(
            f"{path.name} belongs to no exercise: it has none of the checks of {', '.join(self.notebooks)}"
        )
