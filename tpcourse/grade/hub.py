"""Where the ranks' messages are exchanged and counted: the parent's end of `tpcourse.grade.group`.

A rank can reach another only through here, so what the hub saw is what was sent, whatever the rank says of
itself.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tpcourse.grade import arrays
from tpcourse.measure import wire_bytes

REDUCTIONS = {
    "sum": lambda t: t.sum(0),
    "avg": lambda t: t.mean(0),
    "product": lambda t: t.prod(0),
    "max": lambda t: t.amax(0),
    "min": lambda t: t.amin(0),
}
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
COLLECTIVES = (*REDUCING, "broadcast", "gather", "scatter", "all_gather", "all_to_all", "barrier")
MAX_CALLS, MAX_BYTES = 20_000, 64 << 20


class Misuse(Exception):
    """The ranks' calls do not fit each other; the message says which, and where they were made."""


@dataclass
class Call:
    """One operation that one rank started."""

    rank: int
    id: int
    op: str
    group: tuple[int, ...]
    tensors: list[Tensor]
    outputs: list
    where: tuple[str, int]
    more: dict

    def __str__(self) -> str:
        peer = self.more.get("peer")
        to = "" if peer is None else f" {'to' if self.op == 'send' else 'from'} rank {self.group[peer]}"
        what = [arrays.spec(t) for t in self.tensors] or self.outputs
        kind = f" of {what[0][0]} {what[0][1]}" if what else ""
        reduce = f" with {self.more['reduce'].upper()}" if self.op in REDUCING else ""
        root = f" with root {self.group[self.more['root']]}" if self.op in ROOTED else ""
        return f"{self.op}{to}{kind}{reduce}{root}"


@dataclass(frozen=True)
class Message:
    """What one rank put on the wire in one call: ``wire`` bytes, under the bandwidth-optimal algorithm of a
    collective.
    """

    rank: int
    op: str
    peer: int | None
    shape: tuple[int, ...]
    bytes: int
    wire: float
    phase: str
    where: tuple[str, int]
    group: tuple[int, ...] = ()  # among which ranks


@dataclass
class Hub:
    """Matches the calls of ``ranks`` ranks; `submit` returns the answers that became ready."""

    ranks: int
    messages: list[Message] = field(default_factory=list)
    calls: int = 0
    bytes: int = 0
    phases: dict[int, str] = field(default_factory=dict)
    open_calls: dict[tuple[int, int], Call] = field(default_factory=dict)
    _lines: dict = field(default_factory=lambda: defaultdict(list))

    def submit(self, rank: int, header: dict, tensors: list[Tensor]) -> list[tuple[int, int, list[Tensor]]]:
        """Take one call; answers are (rank, id, tensors). Raises Misuse, or ValueError for a frame that is
        no call.
        """
        call = self._read(rank, header, tensors)
        self.calls, self.bytes = self.calls + 1, self.bytes + sum(t.nbytes for t in tensors)
        if self.calls > MAX_CALLS or self.bytes > MAX_BYTES:
            raise Misuse(
                f"the ranks made more than {MAX_CALLS} calls or sent more than {MAX_BYTES >> 20} MiB"
            )
        self.open_calls[rank, call.id] = call
        self._record(call)
        answers = self._match_pair(call) if call.op in ("send", "recv") else self._match_all(call)
        for to, request, _ in answers:
            del self.open_calls[to, request]
        return answers

    def _read(self, rank: int, header: dict, tensors: list[Tensor]) -> Call:
        op, group, where = header["op"], tuple(header["group"]), header["where"]
        more = {k: header[k] for k in ("peer", "tag", "reduce", "root") if k in header}
        if (
            op not in (*COLLECTIVES, "send", "recv")
            or rank not in group
            or not all(type(member) is int and 0 <= member < self.ranks for member in group)
        ):
            raise ValueError(f"no operation of this course: {str(op)[:40]} on ranks {group}")
        for key in ("peer", "root"):
            if key in more and not (type(more[key]) is int and 0 <= more[key] < len(group)):
                raise ValueError(f"{key} {more[key]} is none of {len(group)} ranks")
        if op in REDUCING and more["reduce"] not in REDUCTIONS:
            raise ValueError(f"the exercises know no reduction {more['reduce']!r}")
        if op in ("reduce_scatter", "all_to_all") and len(tensors) != len(group):
            raise ValueError(f"{op} takes one tensor per rank: {len(group)}, got {len(tensors)}")
        for one in header["outputs"]:
            arrays.nbytes(one)
        if op in ("broadcast", "scatter") and any(arrays.spec(t) != header["outputs"][0] for t in tensors):
            raise ValueError(
                f"{op} sends tensors other than {header['outputs'][0]}"
            )  # which is what is counted
        return Call(
            rank,
            int(header["id"]),
            op,
            group,
            tensors,
            header["outputs"],
            (str(where[0]), int(where[1])),
            more,
        )

    def _record(self, call: Call) -> None:
        if call.op in ("recv", "barrier"):
            return
        peer = call.group[call.more["peer"]] if call.op == "send" else None
        shape = tuple(call.tensors[0].shape) if call.tensors else ()
        size = sum(t.nbytes for t in call.tensors)
        phase = self.phases.get(call.rank, "forward")
        self.messages.append(
            Message(call.rank, call.op, peer, shape, size, _wire(call), phase, call.where, call.group)
        )

    def _match_pair(self, call: Call) -> list:
        me, other = call.group.index(call.rank), call.more["peer"]
        source, target = (me, other) if call.op == "send" else (other, me)
        if me == other:
            raise Misuse(f"rank {call.rank} calls {call}: that is itself")
        line = self._lines[call.group, source, target, call.more.get("tag", 0)]
        line.append(call)
        opposite = [c for c in line if c.op != call.op]
        if not opposite:
            return []
        send, recv = (call, opposite[0]) if call.op == "send" else (opposite[0], call)
        line.remove(send), line.remove(recv)
        sent, wanted = arrays.spec(send.tensors[0]), recv.outputs[0]
        if sent[0] != wanted[0] or arrays.nbytes(sent) != arrays.nbytes(wanted):
            raise Misuse(
                f"rank {send.rank} sends {sent[0]} {sent[1]} to rank {recv.rank}, which receives into "
                f"{wanted[0]} {wanted[1]}"
            )
        return [(send.rank, send.id, []), (recv.rank, recv.id, send.tensors)]

    def _match_all(self, call: Call) -> list:
        queues = self._lines[call.group]
        queues.append(call)
        heads = {}
        for one in queues:
            heads.setdefault(one.rank, one)
        if len(heads) > 1:
            _agree([heads[r] for r in sorted(heads)])
        if len(heads) < len(call.group):
            return []
        calls = [heads[r] for r in call.group]
        for one in calls:
            queues.remove(one)
        return [(one.rank, one.id, tensors) for one, tensors in zip(calls, _perform(calls))]


def _wire(call: Call) -> float:
    """Bytes this rank puts on the wire, counted as the ledger of `tpcourse.measure` counts them."""
    n, op, more = len(call.group), call.op, call.more
    size = sum(t.nbytes for t in call.tensors)
    if op in ("all_gather", "gather"):
        size *= n
    if op == "broadcast":
        size = arrays.nbytes(call.outputs[0])
    me = call.group.index(call.rank)
    kept = call.tensors[me].nbytes if op == "all_to_all" else None
    return wire_bytes(op, size, n, kept_bytes=kept, from_root=(me - more.get("root", 0)) % n)


def _agree(calls: list[Call]) -> None:
    """Raise Misuse unless the calls are the same operation on tensors that fit."""

    def essence(call: Call) -> tuple:
        shapes = [] if call.op == "all_to_all" or not call.tensors else [arrays.spec(t) for t in call.tensors]
        if call.op in ("broadcast", "scatter"):
            shapes = call.outputs
        return call.op, call.more.get("reduce"), call.more.get("root"), shapes

    first = calls[0]
    for call in calls[1:]:
        if essence(call) != essence(first):
            raise Misuse(f"rank {first.rank} calls {first}, rank {call.rank} calls {call}")


def _perform(calls: list[Call]) -> list[list[Tensor]]:
    """What each rank gets from a collective, in the order of the group."""
    op, root, n = calls[0].op, calls[0].more.get("root"), len(calls)
    inputs = [call.tensors for call in calls]
    if op == "barrier":
        return [[] for _ in calls]
    if op in REDUCING:
        combine = REDUCTIONS[calls[0].more["reduce"]]
        total = [combine(torch.stack(parts)) for parts in zip(*inputs, strict=True)]
        if op == "reduce_scatter":
            return [[part] for part in total]
        return [total if op == "all_reduce" or i == root else [] for i in range(n)]
    if op == "broadcast":
        return [inputs[root]] * n
    if op == "scatter":
        return [[inputs[root][i]] for i in range(n)]
    if op == "all_to_all":
        return [[inputs[j][i] for j in range(n)] for i in range(n)]
    gathered = [tensors[0] for tensors in inputs]
    return [gathered if op == "all_gather" or i == root else [] for i in range(n)]
