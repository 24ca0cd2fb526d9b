"""One job on all ranks, from the parent's side: what they answer, print and record, until it is done or known to be wrong."""

import contextlib
import os
import selectors
import signal
import time

from tpcourse.launch import report, wire
from tpcourse.launch.failures import RankError
from tpcourse.launch.output import Screen, Tape
from tpcourse.launch.processes import PIPE_BYTES, Processes
from tpcourse.launch.verdict import Verdict

TICK_S = 0.05
FAILING_TICK_S = 0.005  # once a rank has failed, to see soon whether the others wait in vain
GRACE_S = 1.0  # after a first failure, what the others still say counts; less when they are seen to wait in vain
_ECHO = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Read error", "Write error")



def _is_echo(error: dict) -> bool:
    return any(words in error.get("message", "") for words in _ECHO)


class Run:
    """Collects the ranks' answers, output and deaths; `results` runs it once."""

    def __init__(self, processes: Processes, verdict: Verdict, timeout: float, record: bool) -> None:
        self.members, self.verdict, self.timeout, self.record = processes.members, verdict, timeout, record
        self.tapes = [Tape() for _ in self.members]
        self.screen = Screen(self.tapes)
        self.values: dict[int, object] = {}
        self.errors: dict[int, dict] = {}
        self.deaths: dict[int, int | None] = {}
        self.last_waits = None
        self.give_up_at = float("inf")
        self.begun = False
        self.settled = False  # whether every rank has answered and waits for the next job

    @property
    def finished(self) -> set[int]:
        return self.values.keys() | self.errors.keys() | self.deaths.keys()

    def results(self, job: bytes) -> list:
        deadline, self.begun = time.monotonic() + self.timeout, True
        try:
            with selectors.DefaultSelector() as selector:
                self._watch(selector)
                for member in self.members:
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its exit status will tell
                        wire.send_frame(member.control, {"record": self.record}, job)
                self._collect(selector, deadline)
        finally:
            self._drain()
            self.screen.finish()
        return [self.values[member.rank] for member in self.members]

    def _watch(self, selector) -> None:
        for member in self.members:
            selector.register(member.control, selectors.EVENT_READ, (member, self._hear))
            selector.register(member.output, selectors.EVENT_READ, (member, self._print))
            selector.register(member.status, selectors.EVENT_READ, (member, self._bury))

    def _collect(self, selector, deadline: float) -> None:
        next_tick = time.monotonic() + TICK_S
        while len(self.finished) < len(self.members):
            ready = [key for key, _ in selector.select(max(0.0, next_tick - time.monotonic()))]
            for key in sorted(ready, key=lambda key: key.data[1] == self._bury):  # first what a rank said before it ended
                member, handle = key.data
                if not handle(member):
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            if self.give_up_at < float("inf"):
                next_tick = min(next_tick, now + FAILING_TICK_S)
            if now >= next_tick:
                next_tick = now + TICK_S
                self._tick(now, deadline)
        self._judge()

    def _hear(self, member) -> bool:
        try:
            header, payload = wire.receive_frame(member.control)
        except (EOFError, ConnectionResetError):
            return False
        if header["kind"] == "result":
            self.values[member.rank] = wire.unpack_result(member.rank, payload)
        else:
            self.errors[member.rank] = header
            self._failed()
        return True

    def _print(self, member) -> bool:
        with contextlib.suppress(BlockingIOError):
            data = os.read(member.output, 1 << 20)
            self.tapes[member.rank].add(data)
            return bool(data)
        return True

    def _bury(self, member) -> bool:
        code = os.read(member.status, 16)
        if member.rank not in self.finished:
            self.deaths[member.rank] = int(code) if code else None
            self._failed()
        return False

    def _failed(self) -> None:
        self.give_up_at = min(self.give_up_at, time.monotonic() + GRACE_S)

    def _tick(self, now: float, deadline: float) -> None:
        self.screen.refresh()
        if self.record:
            self._check_record()
        if now >= self.give_up_at:
            self._judge()
        if now >= deadline:
            raise self._timed_out()

    def _check_record(self) -> None:
        self.verdict.update()
        if calls := self.verdict.mismatch():
            raise report.mismatch(calls)
        failing = self.errors or self.deaths  # then give the others the time to fail too
        waits = self.verdict.stuck(self.finished, set() if failing else self.finished)
        if waits and waits == self.last_waits:
            if self._cause_known():
                self._judge()
            elif not self.errors:
                raise report.stuck(waits, self.finished)
        self.last_waits = waits

    def _cause_known(self) -> bool:
        """Whether a failure is known that is not the mere echo of another ("connection closed by peer")."""
        return bool(self.deaths) or any(not _is_echo(error) for error in self.errors.values())

    def _judge(self) -> None:
        """Raise what is known to be wrong; return when every rank gave a result and the record agrees."""
        if self.record:
            self.verdict.update()
            if calls := self.verdict.mismatch():
                raise report.mismatch(calls)
        everyone = len(self.values) + len(self.errors) == len(self.members)
        self.settled = everyone and not any(error["kind"] == "exit" for error in self.errors.values())
        for rank, code in self.deaths.items():
            raise report.died(rank, code, report.read_stack(self.members[rank].log))
        for rank, error in sorted(self.errors.items()):
            if error["kind"] == "exit":
                raise report.exited(rank, error["code"])
        if self.errors:
            real = {rank: error for rank, error in self.errors.items() if not _is_echo(error)}
            raise report.raised(real or self.errors, [m.rank for m in self.members if m.rank not in self.finished])

    def _timed_out(self) -> RankError:
        late = [member for member in self.members if member.rank not in self.finished]
        for member in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGUSR1)
        enough = time.monotonic() + GRACE_S
        while True:
            time.sleep(0.05)
            stacks = {member.rank: report.read_stack(member.log) for member in late}
            if all(stacks.values()) or time.monotonic() > enough:
                break
        return report.timed_out(self.timeout, stacks, self.verdict.waits() if self.record else {}, self.finished)

    def _drain(self) -> None:
        """Take what is still in the output pipes, once: everything printed before an answer is there by now."""
        for member in self.members:
            with contextlib.suppress(OSError):
                self.tapes[member.rank].add(os.read(member.output, PIPE_BYTES))
