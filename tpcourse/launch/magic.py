"""The cell magic %%ranks: the cell's body on every rank of a world that lasts from cell to cell."""

import ast
import difflib
import re
import shlex
import sys
import types

from tpcourse.launch import devices
from tpcourse.launch.failures import RankRaised, show_without_frames
from tpcourse.launch.places import name_line, remember_cell
from tpcourse.launch.processes import helper
from tpcourse.launch.world import World

_worlds: dict[tuple, World] = {}
_cells = types.ModuleType("__main__")  # in a rank: what cells have defined there, as a module so that it pickles
_OPTIONS = {"timeout": r"\d+(\.\d+)?", "record": "on|off", "backend": "gloo|nccl", "out": r"[^\W\d]\w*"}
_USAGE = "as in: %%ranks tp=4, or %%ranks dp=2 tp=2 timeout=10 record=off out=losses"


def load_ipython_extension(shell) -> None:
    """Register %%ranks; starts the helper at once, so that the first cell does not wait for it."""
    helper()

    def ranks(line: str, cell: str) -> None:
        """Run the cell on every rank of a world that lasts: %%ranks tp=4, %%ranks dp=2 tp=2 timeout=10 out=NAME."""
        try:
            _ranks(shell, line, cell)
        except ValueError as error:  # the line is wrong; our frames would not help
            show_without_frames(error)
            raise

    shell.register_magic_function(ranks, "cell", "ranks")


def _ranks(shell, line: str, cell: str) -> None:
    mesh, options = parse(line)
    name = remember_cell(f"%%ranks {line}\n{cell}")
    _check_syntax("\n" + cell, name)
    key = (tuple(mesh.items()), options.get("backend"))
    world = _worlds.get(key)
    lost = world is not None and not world.alive
    if world is None or lost:
        world = _worlds[key] = World(mesh, backend=options.get("backend"))
    if lost:
        print("(fresh ranks: what earlier cells defined on them is gone; run those cells again)")
    out = options.get("out")
    values = world.run(run_cell, "\n" + cell, name, bool(out), timeout=float(options.get("timeout", 60)),
                       record=options.get("record", "on") != "off")
    if out:
        shell.user_ns[out] = values


def parse(line: str) -> tuple[dict[str, int], dict[str, str]]:
    """The line after %%ranks: the mesh, and the options timeout=, record=on|off, backend= and out=NAME.

    Raises ValueError that shows the right form.
    """
    mesh: dict[str, int] = {}
    options: dict[str, str] = {}
    for word in shlex.split(line):
        name, equals, value = word.partition("=")
        if not equals or not name or not value or not re.fullmatch(_OPTIONS.get(name, ".*"), value):
            raise ValueError(f"cannot read {word!r} after %%ranks; write name=value, {_USAGE}")
        if name in _OPTIONS:
            options[name] = value
        elif meant := difflib.get_close_matches(name, _OPTIONS, 1, 0.75):
            raise ValueError(f"{name}={value} after %%ranks: did you mean {meant[0]}=? Else name the mesh dimension otherwise, {_USAGE}")
        elif value.lstrip("-").isdigit():
            mesh[name] = int(value)
        else:
            raise ValueError(f"{name}={value} after %%ranks is neither a mesh dimension with its size nor an option, {_USAGE}")
    if not mesh:
        raise ValueError(f"%%ranks needs at least one mesh dimension, {_USAGE}")
    return devices.mesh_shape(mesh, None), options


def run_cell(mesh, source: str, filename: str, keep: bool):
    """Run a cell's body on this rank; prints its last expression, and returns it when ``keep``."""
    body, last = _compile(source, filename)
    if sys.modules["__main__"] is not _cells:
        sys.modules["__main__"] = _cells
        vars(_cells).update(_first_names(mesh))
    exec(body, vars(_cells))
    if last is None:
        return None
    value = eval(last, vars(_cells))
    if value is not None and not keep:
        print(repr(value))
    return value if keep else None


def _first_names(mesh) -> dict:
    import torch
    import torch.distributed as dist

    import tpcourse

    return {"torch": torch, "dist": dist, "tp": tpcourse, "mesh": mesh, "rank": dist.get_rank(),
            "world_size": dist.get_world_size()}


def _check_syntax(source: str, filename: str) -> None:
    """Raise a cell's syntax error once, here, instead of on every rank."""
    try:
        _compile(source, filename)
    except SyntaxError as error:
        text, caret = (error.text or "").rstrip(), " " * max((error.offset or 1) - 1, 0) + "^"
        raise RankRaised(f"SyntaxError: {error.msg}\n  {name_line(filename, error.lineno or 1)}\n    {text}\n    {caret}",
                         [], "SyntaxError") from None


def _compile(source: str, filename: str):
    tree = ast.parse(source, filename)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = compile(ast.Expression(tree.body.pop().value), filename, "eval")
    return compile(tree, filename, "exec"), last
