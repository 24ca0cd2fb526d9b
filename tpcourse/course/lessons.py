"""Which lessons there are, as their notebooks say themselves, and the table of them on the start page."""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

import nbformat

START = "00_start.ipynb"
TABLE_CELL = "lessons"  # id of the start page's one generated cell


@dataclass(frozen=True)
class Lesson:
    """A lesson notebook and what its metadata (`metadata.tpcourse`) says of it; `minutes` is a learner's time."""

    path: Path
    title: str
    teaches: str
    minutes: int

    @property
    def number(self) -> str:
        """The two digits that the file's name begins with."""
        return self.path.name[:2]


def lessons(root: Path) -> list[Lesson]:
    """The lessons under `root`/notebooks that exist, in order.

    Raises:
        ValueError: a lesson whose metadata lacks title, teaches or minutes.
    """
    found = []
    for path in sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        if path.name != START:
            about = nbformat.read(path, 4).metadata.get("tpcourse", {})
            try:
                found.append(Lesson(path, about["title"], about["teaches"], about["minutes"]))
            except KeyError as missing:
                raise ValueError(f"{path.name}: metadata.tpcourse needs title, teaches, minutes; no {missing}") from None
    return found


def ranks_used(notebook: nbformat.NotebookNode) -> int:
    """The largest number of ranks that a cell asks for: `%%ranks dp=2 tp=2`, `mesh={"tp": 4}` or `ranks=4`."""
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    options = re.compile(r"\b(timeout|record|backend|out)=\S+")
    meshes = [options.sub("", line) for line in re.findall(r"^%%ranks(.*)$", source, re.M)]
    meshes += re.findall(r"mesh\s*=\s*(\{[^}]*\})", source) + re.findall(r"\branks\s*=\s*(\d+)", source)
    return max((prod(map(int, re.findall(r"\d+", re.sub(r"[^\W\d]\w*", "", mesh)))) for mesh in meshes), default=1)


def table(root: Path) -> str:
    """The start page's table of the lessons that exist, with links to lesson and exercises, as Markdown."""
    rows = ["| | lesson | you will be able to | minutes | exercises |", "|:--|:--|:--|--:|:--|"]
    for lesson in lessons(root):
        exercises = sorted((root / "exercises").glob(f"{lesson.number}_*/*.ipynb"))
        links = ", ".join(f"[open](../{path.relative_to(root).as_posix()})" for path in exercises)
        rows.append(f"| {lesson.number} | [{lesson.title}]({lesson.path.name}) | {lesson.teaches} | {lesson.minutes} | {links} |")
    return "\n".join(rows)


def write_table(root: Path) -> None:
    """Put the table into the start page's cell for it."""
    path = root / "notebooks" / START
    page = nbformat.read(path, 4)
    next(cell for cell in page.cells if cell.id == TABLE_CELL).source = table(root)
    nbformat.write(page, path)
