"""The parent's judgement of the ranks' records: calls that do not fit together, and waits that nobody will end."""

import math
import os
from collections import Counter, defaultdict

from tpcourse.launch.record import HEADER_BYTES, Call, Log

_SENDS, _RECEIVES = ("send", "isend"), ("recv", "irecv")
_MUST_AGREE = ("op", "dtype", "reduce", "peer", "shape")
_OWN_SHAPE = ("all_to_all", "barrier")  # here each rank may rightly bring another shape


class Verdict:
    """Reads the records of all ranks as they grow.

    Collectives are matched by group and turn, messages by sender, receiver, group, tag and turn. The ranks count the turns,
    so that a record with gaps (a ring of slots that went round between two looks) is still matched rightly. Once a rank has
    received from anyone, nobody can tell which message it got: its later messages are not compared.
    """

    def __init__(self, fds: list[int]) -> None:
        self.fds = fds
        self.logs: dict[int, Log] = {}
        self.seen = [0] * len(fds)
        self.made: Counter = Counter()  # (line, side) -> calls made, see `_place`
        self.open: dict[tuple, dict] = defaultdict(dict)  # (line, turn) -> by side, what not everyone has called yet
        self.from_anyone: set[tuple] = set()  # mailboxes (see there) that were read without naming the sender
        self.posted: set[tuple] = set()  # mailboxes with receives that do not block
        self.clash: dict = {}

    def update(self) -> None:
        """Take in the calls noted since the last update."""
        for rank, fd in enumerate(self.fds):
            if rank not in self.logs and os.fstat(fd).st_size > HEADER_BYTES:
                self.logs[rank] = Log(fd)
            for call in self.logs[rank].since(rank, self.seen[rank]) if rank in self.logs else ():
                self.seen[rank] = call.number + 1
                self._take(call)

    def close(self) -> None:
        """Let go of the ranks' memory."""
        for log in self.logs.values():
            log.memory.close()
        self.logs.clear()

    def _take(self, call: Call) -> None:
        line, side = _place(call)
        for lost in range(self.made[line, side], call.turn):
            self.open.pop((line, lost), None)
        self.made[line, side] = call.turn + 1
        is_message = call.op in _SENDS + _RECEIVES
        if call.peer == "any":
            self.from_anyone.add(_mailbox(call))
        if call.op == "irecv":
            self.posted.add(_mailbox(call))
        if is_message and _mailbox(call) in self.from_anyone:
            return
        calls = self.open[line, call.turn]
        if not self.clash and not all(_fits(call, other) for other in calls.values()):
            self.clash = calls
        calls[side] = call
        if all(self.made[line, each] > call.turn for each in (("sender", "receiver") if is_message else call.members)):
            del self.open[line, call.turn]

    def mismatch(self) -> list[Call]:
        """Calls of one turn that do not fit together; empty when all do."""
        return sorted(self.clash.values(), key=lambda call: call.rank)

    def waits(self) -> dict[int, tuple[Call, list[int]]]:
        """For each rank that waits in a call now: the call, and the ranks that have not made its counterpart."""
        found = {}
        for rank, log in self.logs.items():
            number = log.waiting()
            call = log.read(rank, number) if number is not None and number < self.seen[rank] else None
            if call is not None:
                found[rank] = (call, self._missing(call))
        return found

    def _missing(self, call: Call) -> list[int]:
        line, side = _place(call)
        if call.op not in _SENDS + _RECEIVES:
            return [member for member in call.members if self.made[line, member] <= call.turn]
        if _mailbox(call) in self.from_anyone:
            return self._missing_from_anyone(call)
        return [int(call.peer)] if self.made[line, "receiver" if side == "sender" else "sender"] <= call.turn else []

    def _missing_from_anyone(self, call: Call) -> list[int]:
        """As `_missing` where senders are not told apart: known of receives only, and while none is left unmatched before."""
        mailbox = _mailbox(call)
        sent, received = (sum(count for (line, side), count in self.made.items() if side == wanted and
                              (line[0], *line[2:]) == mailbox) for wanted in ("sender", "receiver"))
        if call.op in _SENDS or sent >= received or (sent and mailbox in self.posted):
            return []
        return [member for member in call.members if member != call.rank] if call.peer == "any" else [int(call.peer)]

    def stuck(self, finished: set[int], returned: set[int]) -> dict[int, tuple[Call, list[int]]]:
        """The waits that can never end, empty while anybody may still move.

        They are those for a call of a rank that has ``returned``; or of all ranks that are not ``finished``, when each of
        them waits for another.
        """
        waits = {rank: wait for rank, wait in self.waits().items() if wait[1] and rank not in finished}
        if len(waits) + len(finished) == len(self.fds):
            return waits
        return {rank: (call, missing) for rank, (call, missing) in waits.items()
                if (returned.issuperset(missing) if call.peer == "any" else returned.intersection(missing))}


def _place(call: Call) -> tuple[tuple, int | str]:
    """The line in which a call queues up to be matched (a group's, or of messages one way), and whose part in it it is."""
    if call.op in _SENDS:
        return (call.group, str(call.rank), call.peer, call.tag), "sender"
    if call.op in _RECEIVES:
        return (call.group, call.peer, str(call.rank), call.tag), "receiver"
    return (call.group,), call.rank


def _mailbox(call: Call) -> tuple[str, str, str]:
    """Group, receiver and tag of a message."""
    return call.group, call.peer if call.op in _SENDS else str(call.rank), call.tag


def _fits(one: Call, other: Call) -> bool:
    if one.op in _SENDS + _RECEIVES:
        return one.dtype == other.dtype and _elements(one.shape) == _elements(other.shape)
    fields = _MUST_AGREE[:-1] if one.op in _OWN_SHAPE else _MUST_AGREE
    return all(getattr(one, name) == getattr(other, name) for name in fields)


def _elements(shape: str) -> int:
    return math.prod(int(size) for size in shape.strip("[]").split(",") if size.strip())
