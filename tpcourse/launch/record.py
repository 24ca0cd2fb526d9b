"""The record: what each rank has asked of torch.distributed, written where the parent can read it at any moment.

Back ends pass over many mistakes in silence (SUM on one rank and MAX on another, other shapes, other roots). So each rank
notes every call, before it is made, in a ring of slots in memory that it shares with the parent: call number, operation,
group, shape, dtype, reduce operation, root or peer, and the line it came from. The parent compares (`verdict`).

This module is that memory and what stands in it; `recorder` fills it, from what `describe` says of a call.
"""

import mmap
import os
import struct
from dataclasses import dataclass

SLOTS, SLOT_BYTES, HEADER_BYTES = 2048, 512, 64
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
