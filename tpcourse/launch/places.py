"""Lines of code as a person knows them: "cell In[3], line 2" instead of a temporary file's name."""

import functools
import linecache
import os
import site
import sys
import sysconfig

import torch

_CELL = "<ranks cell "


def remember_cell(source: str) -> str:
    """Register the running cell's text under a file name of its own, so that its lines can be shown; returns the name."""
    name = f"{_CELL}{_running_cell()}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    return name


def _running_cell() -> str:
    """The name of the cell that is running now; empty outside of a notebook."""
    frame, name = sys._getframe(), ""
    while frame is not None and not name:
        name, frame = _cell_name(frame.f_code.co_filename), frame.f_back
    return name


def name_line(filename: str, line: int) -> str:
    """Where a line is: this cell (whose number would change with every run), another, or a file as seen from here."""
    cell = filename[len(_CELL):-1] if filename.startswith(_CELL) else _cell_name(filename)
    if cell:
        return f"{'this cell' if cell == _running_cell() else cell}, line {line}"
    relative = os.path.relpath(filename) if os.path.isabs(filename) else filename
    return f"{filename if relative.startswith('..') else relative}, line {line}"


def _cell_name(filename: str) -> str:
    """The name of the cell that IPython compiled under this file name, such as "cell In[3]"; empty for a real file."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    found = shell.compile.format_code_name(filename) if shell is not None else None
    return f"{found[0].lower()} {found[1]}" if found else ""


def quote_line(filename: str, line: int, known: str = "") -> str:
    """The text of a line, as the parent or (``known``) the rank has it."""
    return linecache.getline(filename, line).strip() or known


def split_place(where: str) -> tuple[str, int]:
    """Take "file:line" apart; of a place too long for the record, only the file is known, and line 0."""
    filename, _, line = where.rpartition(":")
    return (filename, int(line)) if line.isdigit() else (where, 0)


def describe(where: str) -> str:
    """A "file:line" as its name and text."""
    filename, line = split_place(where)
    text = quote_line(filename, line)
    return name_line(filename, line) + (f": {text}" if text else "")


def is_own(filename: str) -> bool:
    """Whether a frame's file is the person's own: not torch, not the standard library, not this package."""
    return not filename.startswith(_not_own())


@functools.cache
def _not_own() -> tuple[str, ...]:
    import tpcourse

    libraries = (os.path.dirname(os.path.dirname(torch.__file__)), sysconfig.get_path("purelib"), site.getusersitepackages())
    folders = (*libraries, os.path.dirname(tpcourse.__file__), os.path.dirname(os.__file__))
    return (*(folder + os.sep for folder in folders), "<frozen", "<string", "<__array_function__")
