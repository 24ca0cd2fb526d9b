"""The ledger: every collective and point-to-point message that torch dispatches, counted to the byte."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction, Function
from torch.autograd.graph import _engine_run_backward
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from .calls import communicates, decode
from .table import Row, Table
from .wire import wire_bytes


@contextlib.contextmanager
def ledger(mesh: DeviceMesh | None = None) -> Iterator[Table]:
    """Record every collective and point-to-point message of this rank inside the `with`, whoever issues it.

    Yields a `Table`: `book.calls` holds each call as a `Row`, `book.rows` equal ones added up,
    `book.total("wire_bytes", phase="backward")` a sum; `print(book)` shows it. Bytes are defined in
    `wire.wire_bytes`; a group of one rank is listed and sends nothing.

    `dim` of a row is the mesh dimension's name. A dimension that spans all ranks has no group of its own and
    reads "world" unless the `mesh` is given; other groups read as their description or name.

    `phase` is "backward" while autograd runs backward, "recomputation" for what `torch.utils.checkpoint` (or
    a hand-written backward, under `enable_grad`) runs forward again, else "forward". A custom backward under
    `create_graph=True` cannot be told from a recomputation and is called one.

    Counted once each: asynchronous and coalesced calls, functional collectives, what a DTensor operation
    issues, the buckets of DistributedDataParallel (tested on gloo); nested ledgers each see everything. Not
    seen: calls from another Python thread, kernels that fuse communication with computation, and a call that
    raises.
    """
    book = Table()
    names = {} if mesh is None else {mesh.get_group(d).group_name: d for d in mesh.mesh_dim_names or ()}
    with _Recorder(book, names):
        yield book


class _Recorder(TorchDispatchMode):
    def __init__(self, book: Table, names: dict[str, str]) -> None:
        super().__init__()
        self.book, self.names = book, names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor or the like: it unwraps itself, and we see what it then calls
        out = func(*args, **(kwargs or {}))
        if communicates(func):
            phase = _phase()
            self.book.calls.extend(self._row(call, phase) for call in decode(func, args, kwargs or {}))
        return out

    def _row(self, call, phase: str) -> Row:
        n = call.group.size()
        wire = wire_bytes(
            call.op, call.message_bytes, n, kept_bytes=call.kept_bytes, from_root=call.from_root
        )
        return Row(call.op, _dim(call.group, self.names), n, 1, call.message_bytes, wire, phase)


def _dim(group: dist.ProcessGroup, names: dict[str, str]) -> str:
    """The mesh dimension that this group belongs to, or what else it is called."""
    name, description = group.group_name, group.group_desc
    if name in names:
        return names[name]
    if description in ("default_pg", "mesh_default"):
        return "world"
    return f"group {name}" if description == "undefined" else description.removeprefix("mesh_")


_APPLY = Function.apply.__func__.__code__
_CUSTOM_BACKWARD = {BackwardCFunction.apply.__code__, BackwardCFunction.apply_boxed.__code__}


def _phase() -> str:
    """Where in a step we are: autograd says whether backward runs, the frames above us what runs inside it.

    The gradient mode alone does not tell: it is off in a custom function's forward, also when that is
    recomputed.
    """
    if torch._C._current_graph_task_id() == -1:
        return "forward"
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return "recomputation"
        if frame.f_code is _APPLY and any(getattr(a, "requires_grad", False) for a in frame.f_locals["args"]):
            return "recomputation"  # gradients do not require gradients, so this is a forward
        if frame.f_code in _CUSTOM_BACKWARD:
            return "recomputation" if torch.is_grad_enabled() else "backward"
        frame = frame.f_back
    return "backward"
