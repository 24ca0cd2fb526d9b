"""N confined ranks as the parent sees them: frames in, frames out, what they print, and how they end."""

import contextlib
import json
import os
import selectors
import signal
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from tpcourse.grade import arrays
from tpcourse.launch.processes import Processes

_SIZES = struct.Struct("<IQ")
MAX_HEADER, MAX_PAYLOAD, MAX_PRINTED = 1 << 16, 32 << 20, 1 << 20
MEMORY_BYTES, CPU_SECONDS = 512 << 20, 120


@dataclass
class Event:
    """Something a rank did: "frame" (header, tensors), "garbage" (text), "flood", or "gone" (exit code)."""

    kind: str
    rank: int
    header: dict = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    text: str = ""
    code: int = 0


class Ranks:
    """``count`` ranks for one learner's code; `close` kills them. What they write is parsed as data, within
    limits.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.processes = Processes(
            count,
            "tpcourse.grade.rank:main",
            {"ranks": count, "memory_bytes": MEMORY_BYTES, "cpu_seconds": CPU_SECONDS},
        )
        self.inbox = [bytearray() for _ in range(count)]
        self.outbox = [bytearray() for _ in range(count)]
        self.printed = [bytearray() for _ in range(count)]
        self.selector = selectors.DefaultSelector()
        for member in self.processes.members:
            member.control.setblocking(False)
            os.set_blocking(member.output, False)
            for file, what in (
                (member.control, "control"),
                (member.output, "output"),
                (member.status, "status"),
            ):
                self.selector.register(file, selectors.EVENT_READ, (what, member.rank))

    def close(self) -> None:
        self.selector.close()
        self.processes.end()

    def send(self, rank: int, header: dict, tensors: list[Tensor] = ()) -> None:
        """Queue a frame for ``rank``; it leaves while `events` runs."""
        specs, payload = arrays.pack(tensors)
        text = json.dumps({**header, "tensors": specs}).encode()
        self.outbox[rank] += _SIZES.pack(len(text), len(payload)) + text + payload
        self._push(rank)

    def interrupt(self, rank: int) -> None:
        """Ask a rank that does not come back to print where it is; it may not answer."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes.members[rank].pid, signal.SIGUSR1)

    def events(self, seconds: float) -> Iterator[Event]:
        """What happens within ``seconds``, or nothing; returns after the first batch."""
        for key, mask in self.selector.select(max(0.0, seconds)):
            what, rank = key.data
            if mask & selectors.EVENT_WRITE:
                self._push(rank)
            if mask & selectors.EVENT_READ:
                yield from getattr(self, f"_read_{what}")(rank, key.fileobj)

    def _push(self, rank: int) -> None:
        control = self.processes.members[rank].control
        try:
            while self.outbox[rank]:
                del self.outbox[rank][: control.send(self.outbox[rank])]
        except BlockingIOError:
            pass
        except OSError:
            self.outbox[rank].clear()
        waiting = selectors.EVENT_WRITE if self.outbox[rank] else 0
        with contextlib.suppress(KeyError):  # the rank has hung up
            self.selector.modify(control, selectors.EVENT_READ | waiting, ("control", rank))

    def _read_control(self, rank: int, control) -> Iterator[Event]:
        try:
            data = control.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(control)
            return
        self.inbox[rank] += data
        try:
            yield from self._frames(rank)
        except Exception as error:  # whatever it wrote, it was the rank
            self.selector.unregister(control)
            yield Event("garbage", rank, text=f"{type(error).__name__}: {str(error)[:200]}")

    def _frames(self, rank: int) -> Iterator[Event]:
        inbox = self.inbox[rank]
        while len(inbox) >= _SIZES.size:
            header_size, payload_size = _SIZES.unpack_from(inbox)
            if header_size > MAX_HEADER or payload_size > MAX_PAYLOAD:
                raise ValueError(
                    f"a message of {header_size} + {payload_size} bytes; at most {MAX_PAYLOAD >> 20} MiB are"
                    " taken"
                )
            start, end = _SIZES.size + header_size, _SIZES.size + header_size + payload_size
            if len(inbox) < end:
                return
            header = json.loads(bytes(inbox[_SIZES.size : start]))
            if not isinstance(header, dict):
                raise ValueError("a header that is no object")
            tensors = arrays.unpack(header.pop("tensors"), inbox[start:end])
            del inbox[:end]
            yield Event("frame", rank, header, tensors)

    def _read_output(self, rank: int, pipe: int) -> Iterator[Event]:
        data = os.read(pipe, 1 << 16)
        if not data:
            self.selector.unregister(pipe)
        elif len(self.printed[rank]) + len(data) > MAX_PRINTED:
            yield Event("flood", rank)
        else:
            self.printed[rank] += data

    def _read_status(self, rank: int, pipe: int) -> Iterator[Event]:
        text = os.read(pipe, 64)
        self.selector.unregister(pipe)
        yield Event("gone", rank, code=int(text or b"0"))
