"""Lessons run headless: into a table that says whether they work, or with their outputs stored in place."""

import re
import shutil
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from tpcourse.course.lessons import lessons, ranks_used

WIDGET = "application/vnd.jupyter.widget-view+json"
CELL_SECONDS = 120


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run a notebook's cells in order, in `folder`, outputs into the notebook; errors that a tag announces may come.

    Raises:
        RuntimeError: the first cell that failed unannounced, ran too long or killed its kernel, with its source and error.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    begun = []
    client = NotebookClient(
        notebook, timeout=CELL_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}},
        record_timing=False, store_widget_state=False, coalesce_streams=True, extra_arguments=["--log-level=ERROR"],
        on_cell_start=lambda cell, cell_index: begun.append(cell))
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        number = sum(cell.cell_type == "code" for cell in begun)
        words = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
        raise RuntimeError(f"code cell {number} failed\n{begun[-1].source}\n{words}\n") from None


def run_all(root: Path) -> bool:
    """Run a copy of every lesson, print one row each as it ends and failures below; True when all of them passed."""
    print(f"{'lesson':<40} {'cells':>5} {'ranks':>5} {'seconds':>8}  ok", flush=True)
    failures = []
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(shutil.copytree(root / "notebooks", Path(scratch) / "notebooks"))
        for lesson in lessons(root):
            notebook, ok, start = nbformat.read(lesson.path, 4), "yes", time.perf_counter()
            try:
                execute(notebook, copy)
            except RuntimeError as failure:
                ok = "NO"
                failures.append(f"\n{lesson.path.name}: {failure}")
            cells = sum(cell.cell_type == "code" for cell in notebook.cells)
            seconds = time.perf_counter() - start
            print(f"{lesson.path.stem:<40} {cells:>5} {ranks_used(notebook):>5} {seconds:>8.1f}  {ok}", flush=True)
    print("".join(failures), end="", flush=True)
    return not failures


def store(path: Path) -> None:
    """Run one notebook and write it back with its outputs, the same bytes whenever the outputs are the same.

    Raises:
        RuntimeError: a cell failed; the file is left as it was.
    """
    notebook = nbformat.read(path, 4)
    execute(notebook, path.parent)
    tidy(notebook)
    nbformat.write(notebook, path)


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Keep what a reader needs: no kernel details, no clock times, and of a widget, dead without a kernel, only its text."""
    about = notebook.metadata.get("tpcourse")
    notebook.metadata = nbformat.from_dict({
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"}} | ({"tpcourse": about} if about else {}))
    notebook.nbformat_minor = 5
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            for output in cell.outputs:
                output.get("data", {}).pop(WIDGET, None)
