"""The parent's judgement of the ranks' records: calls that do not fit together, and waits that nobody will end."""

import math
import os
from collections import defaultdict

from tpcourse.launch.record import HEADER_BYTES, Call, Log

_SENDS, _RECEIVES = ("send", "isend"), ("recv", "irecv")
_MUST_AGREE = ("op", "dtype", "reduce", "peer", "shape")
_OWN_SHAPE = ("all_to_all", "barrier")  # here each rank may rightly bring another shape


class Verdict:
    """Reads the records of all ranks as they grow.

    Collectives are matched by group and position in the group's sequence, messages by sender, receiver, group and tag.
    """

    def __init__(self, fds: list[int]) -> None:
        self.fds = fds
        self.logs: dict[int, Log] = {}
        self.seen = [0] * len(fds)
        self.reached: dict[tuple[int, str], int] = defaultdict(int)  # (rank, group) -> collectives called so far
        self.sent: dict[tuple, int] = defaultdict(int)
        self.received: dict[tuple, int] = defaultdict(int)
        self.open: dict[tuple, dict[int, Call]] = defaultdict(dict)  # what has not been called by everyone yet
        self.position: dict[tuple[int, int], tuple] = {}  # (rank, call number) -> its key in `open`
        self.clash: dict[int, Call] = {}

    def update(self) -> None:
        """Take in the calls noted since the last update."""
        for rank, fd in enumerate(self.fds):
            if rank not in self.logs and os.fstat(fd).st_size > HEADER_BYTES:
                self.logs[rank] = Log(fd)
            for call in self.logs[rank].since(rank, self.seen[rank]) if rank in self.logs else ():
                self.seen[rank] = call.number + 1
                self._take_message(call) if call.op in _SENDS + _RECEIVES else self._take_collective(call)

    def close(self) -> None:
        """Let go of the ranks' memory."""
        for log in self.logs.values():
            log.memory.close()
        self.logs.clear()

    def _take_collective(self, call: Call) -> None:
        place = (call.rank, call.group)
        key = (call.group, self.reached[place])
        self.reached[place] += 1
        self._take(key, call.rank, call, len(call.members))

    def _take_message(self, call: Call) -> None:
        if call.peer == "any":
            return
        sends, peer = call.op in _SENDS, int(call.peer)
        pair = (call.group, *((call.rank, peer) if sends else (peer, call.rank)), call.tag)
        count = self.sent if sends else self.received
        self._take((*pair, count[pair]), call.rank if sends else ~call.rank, call, 2)
        count[pair] += 1

    def _take(self, key: tuple, side: int, call: Call, expected: int) -> None:
        calls = self.open[key]
        self.position[call.rank, call.number] = key
        if not self.clash and not all(_fits(call, other) for other in calls.values()):
            self.clash = calls
        calls[side] = call
        if len(calls) == expected:
            for done in self.open.pop(key).values():
                del self.position[done.rank, done.number]

    def mismatch(self) -> list[Call]:
        """Calls of one position that do not fit together; empty when all do."""
        return sorted(self.clash.values(), key=lambda call: call.rank)

    def waits(self) -> dict[int, tuple[Call, list[int]]]:
        """For each rank that waits in a call now: the call, and the ranks that have not made its counterpart."""
        found = {}
        for rank, log in self.logs.items():
            number = log.waiting()
            if number is not None and number < self.seen[rank]:
                found[rank] = (log.read(rank, number), self._missing(rank, number, log))
        return found

    def _missing(self, rank: int, number: int, log: Log) -> list[int]:
        call = log.read(rank, number)
        if call.peer == "any":
            return [] if any(key[2] == rank for key in self.open if len(key) == 5) else [m for m in call.members if m != rank]
        calls = self.open.get(self.position.get((rank, number)))
        if calls is None:
            return []
        if call.op in _SENDS + _RECEIVES:
            return [int(call.peer)]
        return [member for member in call.members if member not in calls]

    def stuck(self, finished: set[int]) -> dict[int, tuple[Call, list[int]]]:
        """The waits of all unfinished ranks when none of them can ever end; empty while anybody can still move."""
        waits = self.waits()
        unfinished = set(range(len(self.fds))) - finished
        hopeless = unfinished and all(rank in waits and waits[rank][1] for rank in unfinished)
        return waits if hopeless else {}


def _fits(one: Call, other: Call) -> bool:
    if one.op in _SENDS + _RECEIVES:
        return one.dtype == other.dtype and _elements(one.shape) == _elements(other.shape)
    fields = _MUST_AGREE[:-1] if one.op in _OWN_SHAPE else _MUST_AGREE
    return all(getattr(one, name) == getattr(other, name) for name in fields)


def _elements(shape: str) -> int:
    return math.prod(int(size) for size in shape.strip("[]").split(",") if size.strip())
