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
FAILURES = (CellExecutionError, CellTimeoutError, DeadKernelError)


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run a notebook's cells in order, in `folder`, outputs into the notebook; errors that a tag announces may come.

    Raises:
        CellExecutionError, CellTimeoutError, DeadKernelError: the first cell that fails unannounced.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    NotebookClient(notebook, timeout=CELL_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}},
                   record_timing=False, store_widget_state=False, coalesce_streams=True,
                   extra_arguments=["--log-level=ERROR"]).execute()


def run_all(root: Path) -> bool:
    """Run a copy of every lesson, print one row each as it ends and failures below; True when all of them passed."""
    print(f"{'lesson':<40} {'cells':>5} {'ranks':>5} {'seconds':>8}  ok", flush=True)
    failures = []
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(shutil.copytree(root / "notebooks", Path(scratch) / "notebooks"))
        for lesson in lessons(root):
            notebook, error, start = nbformat.read(lesson.path, 4), None, time.perf_counter()
            try:
                execute(notebook, copy)
            except FAILURES as problem:
                error = problem
                failures.append(f"{lesson.path.name}: {describe(notebook, error)}")
            cells = sum(cell.cell_type == "code" for cell in notebook.cells)
            print(f"{lesson.path.stem:<40} {cells:>5} {ranks_used(notebook):>5} {time.perf_counter() - start:>8.1f}  "
                  f"{'NO' if error else 'yes'}", flush=True)
    print("".join("\n" + failure for failure in failures), end="", flush=True)
    return not failures


def store(path: Path) -> None:
    """Run one notebook and write it back with its outputs, the same bytes whenever the outputs are the same.

    Raises:
        RuntimeError: a cell failed; the file is left as it was.
    """
    notebook = nbformat.read(path, 4)
    try:
        execute(notebook, path.parent)
    except FAILURES as problem:
        raise RuntimeError(f"{path.name}: {describe(notebook, problem)}") from None
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


def describe(notebook: nbformat.NotebookNode, error: Exception) -> str:
    """The failing cell, its source and its error, for a person."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    failed = next((cell for cell in code if any(output.output_type == "error" for output in cell.outputs)), None)
    if failed is None:  # a cell that ran too long or killed its kernel left no error: it is the last one that started
        failed = [cell for cell in code if cell.execution_count][-1:] or code[:1]
        failed = failed[0] if failed else None
    place = f"code cell {code.index(failed) + 1} failed\n{failed.source}\n" if failed else "failed\n"
    return place + re.sub(r"\x1b\[[0-9;]*m", "", str(error)) + "\n"
