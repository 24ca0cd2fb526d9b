"""The record: what each rank has asked of torch.distributed, written where the parent can read it at any moment.

Back ends pass over many mistakes in silence (SUM on one rank and MAX on another, other shapes, other roots). So each rank
notes every call, before it is made, in a ring of slots in memory that it shares with the parent: call number, operation,
group, shape, dtype, reduce operation, root or peer, and the line it came from. The parent compares (`verdict`).

Calls of the Python functions of torch.distributed and of its functional collectives are noted, hence DTensor's too. What
C++ calls by itself (DistributedDataParallel's reducer, the backward of functional collectives) is not.
"""

import contextlib
import functools
import inspect
import mmap
import os
import site
import struct
import sys
import sysconfig
import threading
from collections import Counter
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

SLOTS, SLOT_BYTES, HEADER_BYTES, SHAPE_CHARACTERS = 2048, 512, 64, 160
_HEADER = struct.Struct("<QQ")  # calls noted so far; the call the rank waits in, counted from 1 (0: none)
_SEPARATOR = "\x1f"


@dataclass(frozen=True)
class Call:
    """One call as a rank noted it.

    ``number`` counts all calls of this rank from 0, ``turn`` those that the same calls of other ranks are matched with (of
    this group, or to or from this peer); ``peer`` is a global rank.
    """

    rank: int
    number: int
    op: str
    turn: int
    group: str
    members: tuple[int, ...]
    dim: str
    shape: str
    dtype: str
    reduce: str
    peer: str
    tag: str
    where: str


class Log:
    """The shared memory of one rank's record; the rank writes, the parent reads."""

    def __init__(self, fd: int, create: bool = False) -> None:
        size = HEADER_BYTES + SLOTS * SLOT_BYTES
        if create:
            os.ftruncate(fd, size)
        self.memory = mmap.mmap(fd, size)
        self.count = 0

    def add(self, fields: list[str]) -> int:
        """Note a call; returns its number."""
        number = self.count
        text = _SEPARATOR.join(fields).encode(errors="replace")[: SLOT_BYTES - 2]
        start = HEADER_BYTES + (number % SLOTS) * SLOT_BYTES
        self.memory[start : start + 2 + len(text)] = len(text).to_bytes(2, "little") + text
        self.count += 1
        self.memory[:8] = self.count.to_bytes(8, "little")
        return number

    def wait_in(self, number: int | None) -> None:
        """Note which call this rank now waits in, or that it waits in none."""
        self.memory[8:16] = (0 if number is None else number + 1).to_bytes(8, "little")

    def waiting(self) -> int | None:
        """The number of the call that the rank waits in now."""
        number = _HEADER.unpack_from(self.memory)[1]
        return number - 1 if number else None

    def since(self, rank: int, number: int) -> list[Call]:
        """The calls from ``number`` on, without those that the ring no longer holds: a fast rank has written over them."""
        count = _HEADER.unpack_from(self.memory)[0]
        calls = (self.read(rank, n) for n in range(max(number, count - SLOTS + 1), count))
        return [call for call in calls if call is not None]

    def read(self, rank: int, number: int) -> Call | None:
        """One call; None when the rank has written over it, or may just be doing so."""
        start = HEADER_BYTES + (number % SLOTS) * SLOT_BYTES
        slot = self.memory[start : start + SLOT_BYTES]
        if number <= _HEADER.unpack_from(self.memory)[0] - SLOTS:
            return None
        text = slot[2 : 2 + int.from_bytes(slot[:2], "little")].decode(errors="replace")
        op, turn, group, members, *rest = (text.split(_SEPARATOR) + [""] * 11)[:11]
        return Call(rank, number, op, int(turn), group, tuple(range(*map(int, members.split(":")))) if ":" in members else
                    tuple(int(m) for m in members.split(",") if m), *rest)


class _Thread(threading.local):
    inside = False  # whether this thread is in a call that is noted already


class Recorder:
    """Notes this rank's calls in ``log`` while ``on``; installed once, before ranks are forked."""

    def __init__(self) -> None:
        self.log: Log | None = None
        self.on = False
        self.thread = _Thread()
        self.noting = threading.Lock()
        self.turns: Counter = Counter()
        self.works = WeakIdKeyDictionary()  # what an asynchronous call gave -> the call's number

    def install(self) -> None:
        """Wrap the collectives of torch.distributed, its functional collectives, and the waits for both."""
        import torch.distributed as dist
        from torch.distributed import _functional_collectives as functional
        from torch.distributed import distributed_c10d as c10d

        for name in filter(lambda name: hasattr(c10d, name), _PLAIN):
            wrapped = self._wrap(name, getattr(c10d, name))
            setattr(c10d, name, wrapped)
            setattr(dist, name, wrapped)
        for name in filter(lambda name: hasattr(functional, name), _FUNCTIONAL):
            setattr(functional, name, self._wrap(name, getattr(functional, name), returns_at_once=True))
        functional.wait_tensor = self._wrap_wait(functional.wait_tensor)
        dist.Work.wait = self._wrap_wait(dist.Work.wait)

    def _wrap(self, name: str, function, returns_at_once: bool = False):
        names = tuple(inspect.signature(function).parameters)
        returns_at_once = returns_at_once or name in ("isend", "irecv")

        @functools.wraps(function)
        def call(*args, **kwargs):
            if torch.compiler.is_compiling() or not self.on or self.thread.inside:
                return function(*args, **kwargs)
            number, waits = None, False
            with contextlib.suppress(Exception):  # a call too odd to note must fail in its own way
                given = {**dict(zip(names, args)), **kwargs}
                number, waits = self._note(name, given), not (returns_at_once or given.get("async_op"))
            with self._inside(number if waits else None):
                result = function(*args, **kwargs)
            if number is not None and not waits:
                with contextlib.suppress(TypeError):  # what cannot be referred to weakly cannot be waited for either
                    self.works[result.elem if type(result).__name__ == "AsyncCollectiveTensor" else result] = number
            return result

        return call

    def _wrap_wait(self, wait):
        @functools.wraps(wait)
        def call(work, *args, **kwargs):
            if torch.compiler.is_compiling() or not self.on or self.thread.inside:
                return wait(work, *args, **kwargs)
            with self._inside(self.works.get(work)):
                return wait(work, *args, **kwargs)

        return call

    def _note(self, name: str, given: dict) -> int:
        fields = _describe(name, given)
        with self.noting:
            line = _line(fields)
            turn = self.turns[line]
            number = self.log.add([fields[0], str(turn), *fields[1:]])
            self.turns[line] += 1
        return number

    @contextlib.contextmanager
    def _inside(self, number: int | None):
        """While in a call: what it calls in turn is not noted, and the rank waits in call ``number`` if that is given."""
        self.thread.inside = True
        if number is not None and not _crowded():
            self.log.wait_in(number)
        try:
            yield
        finally:
            self.thread.inside = False
            if number is not None:
                self.log.wait_in(None)


def _crowded() -> bool:
    """Whether other threads may also talk to ranks, so that this one's wait does not mean that the rank is stuck.

    Daemons are taken for helpers (a progress bar's monitor, a data loader's queue) that do not.
    """
    return threading.active_count() > 1 and any(
        not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate())


_PLAIN = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all", "all_to_all_single", "barrier",
    "broadcast", "gather", "irecv", "isend", "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scatter", "send",
)
_FUNCTIONAL = (
    "all_reduce", "all_gather_single", "all_gather_single_autograd", "all_gather_tensor", "all_gather_tensor_autograd",
    "all_to_all_single", "all_to_all_single_autograd", "broadcast", "reduce_scatter_single", "reduce_scatter_single_autograd",
    "reduce_scatter_tensor", "reduce_scatter_tensor_autograd",
)


def _describe(name: str, given: dict) -> list[str]:
    """The fields of a `Call` (after rank and number) from the arguments of a collective."""
    members, group_name, dim = _membership(_group(given))
    if name == "new_group" and given.get("use_local_synchronization"):  # only its members make this call
        members = tuple(sorted(given.get("ranks") or members))
        group_name = f"new_group {members}"
    operation = name.removesuffix("_autograd").replace("_into_tensor", "").replace("_tensor", "").replace("_single", "")
    shape, dtype = _payload(operation, given)
    reduce = given.get("op", given.get("reduceOp", "SUM" if "reduce" in operation else ""))
    return [operation, group_name, _compact(members), dim, shape, dtype, _reduce_name(reduce),
            _peer(operation, given, members), str(given.get("tag") or 0), _where()]


def _line(fields: list[str]) -> tuple[str, ...]:
    """Where a call queues up, to be matched in order with other ranks' calls: its group, for a message also its peer and tag."""
    operation, group, *_, peer, tag, _ = fields
    return (group, operation[-4:], peer, tag) if operation in ("send", "isend", "recv", "irecv") else (group,)


def _group(given: dict):
    from torch.distributed import distributed_c10d as c10d

    group = given.get("group")
    if group is None or isinstance(group, c10d.ProcessGroup):
        return group or c10d._get_default_group()
    from torch.distributed import _functional_collectives as functional

    return c10d._resolve_process_group(functional._resolve_group_name(group, ""))


@functools.cache
def _membership(group) -> tuple[tuple[int, ...], str, str]:
    from torch.distributed import distributed_c10d as c10d

    dim = (group.group_desc or "").removeprefix("mesh_") if (group.group_desc or "").startswith("mesh_") else ""
    return tuple(c10d.get_process_group_ranks(group)), group.group_name, dim


def _compact(members: tuple[int, ...]) -> str:
    """Ranks as text; evenly spaced ones, as those of every mesh dimension are, as start:stop:step."""
    step = members[1] - members[0] if len(members) > 1 else 1
    if members == tuple(range(members[0], members[-1] + 1, max(step, 1))):
        return f"{members[0]}:{members[-1] + 1}:{max(step, 1)}"
    return ",".join(map(str, members))


def _payload(operation: str, given: dict) -> tuple[str, str]:
    """Shape and dtype of what must agree between the ranks (for scatter and gather: one rank's part)."""
    if operation == "new_group":
        return str(sorted(given["ranks"])) if given.get("ranks") else "all ranks", ""
    if operation == "all_gather" and len({part.shape for part in given.get("tensor_list", ())}) > 1:
        given = {"tensor": given["tensor_list"]}  # parts of different sizes, as every rank must expect them
    for name in ("input_list", "input_tensor_list", "tensor", "input_tensor", "self", "input"):
        value = given.get(name)
        if value is not None:
            parts = value if isinstance(value, (list, tuple)) else [value]
            shapes = " ".join(str(list(part.shape)) for part in parts)
            return shapes[:SHAPE_CHARACTERS], str(parts[0].dtype).removeprefix("torch.")
    return "", ""


def _reduce_name(reduce) -> str:
    """SUM, MAX ...: of a string, of a constant, or of a ReduceOp that was made from one and perhaps a factor."""
    return str(getattr(reduce, "op", reduce)).rpartition(".")[2].upper()


def _peer(operation: str, given: dict, members: tuple[int, ...]) -> str:
    """The root or peer as a global rank; empty where a call has none, "any" for a receive from anyone."""
    names = {"send": "dst", "isend": "dst", "reduce": "dst", "gather": "dst"}
    if operation not in names and operation not in ("recv", "irecv", "broadcast", "scatter"):
        return ""
    name = names.get(operation, "src")
    inside = given.get("group_" + name)
    if inside is not None:
        return str(members[inside])
    peer = given.get(name)
    if peer is None:
        return "any" if operation in ("recv", "irecv") else "0"
    return str(peer)


def _skipped_roots() -> tuple[str, ...]:
    import tpcourse

    libraries = (os.path.dirname(os.path.dirname(torch.__file__)), sysconfig.get_path("purelib"), site.getusersitepackages())
    folders = (*libraries, os.path.dirname(tpcourse.__file__), os.path.dirname(os.__file__))
    return (*(folder + os.sep for folder in folders), "<frozen", "<string", "<__array_function__")


_SKIPPED: tuple[str, ...] = ()


def is_own(filename: str) -> bool:
    """Whether a frame's file is the person's own: not torch, not the standard library, not this package."""
    global _SKIPPED
    _SKIPPED = _SKIPPED or _skipped_roots()
    return not filename.startswith(_SKIPPED)


def _where() -> str:
    frame = first = sys._getframe(2)
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or first
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
