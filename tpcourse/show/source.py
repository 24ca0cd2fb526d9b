"""The live source of an object, highlighted: lessons show the package's code as it is, never a copy."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Source:
    """Source text and where it stands, which a notebook shows as a highlighted block of code with a caption.

    The block is Markdown, so JupyterLab and nbconvert each colour it in their own theme, light or dark.
    """

    text: str
    caption: str

    def __repr__(self) -> str:
        return f"# {self.caption}\n{self.text}"

    def _repr_markdown_(self) -> str:
        fence = "`" * 3
        while fence in self.text:
            fence += "`"
        return f"{fence}python\n{self.text}\n{fence}\n*{self.caption}*"


def source(thing: Any, docstring: bool = True) -> Source:
    """The source of a function, class, method or module as it is on disk now.

    Args:
        thing: the object; a decorated function shows the function itself.
        docstring: False leaves the docstrings out, where a lesson has said the same in prose.

    Raises:
        TypeError: an object without Python source, such as a built-in function.
    """
    thing = inspect.unwrap(thing) if callable(thing) else thing
    text = textwrap.dedent(inspect.getsource(thing)).rstrip()
    text = text if docstring else _without_docstrings(text)
    return Source(text, _caption(thing))


def _caption(thing: Any) -> str:
    """The file, relative to the folder that holds its top package; cells have no such file."""
    module = thing if inspect.ismodule(thing) else sys.modules.get(getattr(thing, "__module__", ""), None)
    path = getattr(module, "__file__", None)
    if path is None:
        return "defined in this notebook"
    depth = module.__name__.count(".") + (Path(path).name == "__init__.py")
    return "/".join(Path(path).parts[-depth - 1:])


def _without_docstrings(text: str) -> str:
    lines: list[str | None] = list(text.splitlines())
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            continue
        if ast.get_docstring(node) is not None and len(node.body) > 1:
            first = node.body[0]
            stop = first.end_lineno + (not lines[first.end_lineno])  # with the empty line that follows it
            lines[first.lineno - 1:stop] = [None] * (stop - first.lineno + 1)
    return "\n".join(line for line in lines if line is not None).strip("\n")
