"""Worlds: ranks that run one function after another, and `spawn`, a world for a single call."""

import contextlib
import os
import selectors
import signal
import threading
import time

from tpcourse.launch import devices, report, torchrun, wire, worker
from tpcourse.launch.failures import RankError, WorldClosed, show_without_frames
from tpcourse.launch.output import Screen, Tape
from tpcourse.launch.processes import PIPE_BYTES, Processes
from tpcourse.launch.verdict import Verdict

TICK_S = 0.05
FAILING_TICK_S = 0.005  # once a rank has failed, to see soon whether the others wait in vain
GRACE_S = 1.0  # after a first failure, what the others still say counts; less when they are seen to wait in vain
_ECHO = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Read error", "Write error")


class World:
    """Ranks that stay alive between calls.

    Args:
        mesh: sizes of the mesh's named dimensions, the last varying fastest, e.g. ``{"dp": 2, "tp": 2}``.
        ranks: short for ``mesh={"tp": ranks}``.
        backend, device: "nccl" or "gloo", "cuda" or "cpu"; chosen from what the machine has when not given.
        threads: CPU threads per rank.

    Raises ValueError or TypeError at once when such a world cannot be had here. Use it in a ``with`` block, or close it.
    """

    def __init__(self, mesh: dict[str, int] | None = None, *, ranks: int | None = None, backend: str | None = None,
                 device: str | None = None, threads: int = 1) -> None:
        _refuse_inside_rank()
        self.mesh = devices.mesh_shape(mesh, ranks)
        count = self.size
        backend, device = devices.choose(count, backend, device)
        devices.announce(backend, device)
        self._ended = ""
        self._free = threading.Lock()
        self._processes = Processes(count, "tpcourse.launch.worker:main", {
            "count": count, "shape": list(self.mesh.values()), "names": list(self.mesh), "backend": backend,
            "device": device, "threads": threads})
        self._verdict = Verdict([member.log for member in self._processes.members])

    @property
    def size(self) -> int:
        """The number of ranks."""
        count = 1
        for size in self.mesh.values():
            count *= size
        return count

    @property
    def alive(self) -> bool:
        """Whether the world can still run something."""
        return not self._ended and self._processes.alive

    def run(self, function, *args, timeout: float = 60.0, record: bool = True) -> list:
        """Run ``function(mesh, *args)`` on every rank; returns the list of their results, in rank order.

        Args:
            function: anything callable; where it lives in a cell or script it is sent by value.
            args: anything that pickles; tensors arrive on the rank's own device.
            timeout: seconds after which ranks that are not done are stopped, and their lines shown.
            record: keep the record of calls that explains mistakes; switch it off to time something very short.

        Results come back as plain data, tensors on the CPU. Raises a RankError that says what happened when a rank fails;
        the world survives when every rank answered, and is closed when one died or had to be stopped.
        """
        if not self.alive:
            raise WorldClosed(f"this world has ended ({self._ended or 'its processes are gone'}); make a new one")
        run = _Run(self._processes, self._verdict, timeout, record)
        if not self._free.acquire(blocking=False):
            raise RankError("this world is at work for another thread; wait for it, or make a world of your own")
        try:
            return run.results(wire.pack_call(function, args))
        except BaseException as error:
            if run.begun and not run.settled:
                self._end("interrupted" if isinstance(error, KeyboardInterrupt) else str(error).partition("\n")[0])
            if isinstance(error, KeyboardInterrupt):
                show_without_frames(error)
            raise
        finally:
            self._free.release()

    def close(self) -> None:
        """End every rank; what they hold is gone."""
        self._end("it was closed")

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._verdict.close()
        self._processes.end()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        return f"World({sizes}{'' if self.alive else ', ended'})"


def spawn(function, *args, mesh: dict[str, int] | None = None, ranks: int | None = None, backend: str | None = None,
          device: str | None = None, threads: int = 1, timeout: float = 60.0, record: bool = True) -> list:
    """Run ``function(mesh, *args)`` on fresh ranks and return the list of their results, in rank order.

    The arguments are those of `World` and `World.run`; the ranks are gone when the call returns or raises. In a script
    that torchrun started, the function runs on torchrun's ranks instead, and every one of them gets the list.
    """
    if torchrun.is_launcher() and worker.current is None:
        return torchrun.run_here(function, args, devices.mesh_shape(mesh, ranks), backend, device, threads)
    with World(mesh, ranks=ranks, backend=backend, device=device, threads=threads) as world:
        return world.run(function, *args, timeout=timeout, record=record)


def _refuse_inside_rank() -> None:
    if worker.current is not None:
        raise RuntimeError(f"this is already a rank, one of {worker.current.size()}: ranks do not start ranks of their own. "
                           "Start them from the notebook or script, or use this rank's mesh")
    if torchrun.is_launcher():
        raise RuntimeError("torchrun has started the ranks already; run a function on them with tp.spawn")


def _is_echo(error: dict) -> bool:
    return any(words in error.get("message", "") for words in _ECHO)


class _Run:
    """One job on all ranks: collects answers, output and deaths until everybody answered or something is known to be wrong."""

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
