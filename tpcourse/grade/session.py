"""One learner's code on N ranks: load it, call it, exchange what the ranks send each other, see how it
ends.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from tpcourse.grade.hub import Call, Hub, Message, Misuse
from tpcourse.grade.ranks import Event, Ranks

GRACE = 0.3  # seconds in which other ranks may report the same error as the first one


@dataclass
class Fault:
    """Why a call did not end well: ``kind`` is one of error, exit, stuck, slow, misuse, flood, garbage."""

    kind: str
    text: str
    ranks: list[int]
    error: dict = field(default_factory=dict)


@dataclass
class Outcome:
    """What a call on all ranks left: outputs and facts per rank, every message, what was printed, and a
    fault or None.
    """

    outputs: list[dict[str, Tensor]]
    facts: list[dict]
    messages: list[Message]
    printed: list[str]
    fault: Fault | None = None


class Session:
    """Ranks with a learner's code in them; after a fault they are gone and `alive` is False."""

    def __init__(self, count: int) -> None:
        self.count, self.alive, self.calls = count, True, 0
        self.ranks = Ranks(count)

    def close(self) -> None:
        if self.alive:
            self.alive = False
            self.ranks.close()

    def run(self, commands: list[tuple[dict, list[Tensor]]], seconds: float) -> Outcome:
        """Send each rank its command and serve the ranks until all have answered or something went wrong."""
        self.calls += 1
        run = _Run(self.ranks, seconds, self.calls)
        for rank, (header, tensors) in enumerate(commands):
            self.ranks.send(rank, {**header, "call": self.calls}, tensors)
        try:
            fault = run.until_done()
        except BaseException:
            self.close()
            raise
        messages = sorted(
            run.hub.messages, key=lambda m: m.rank
        )  # each rank's in order; what arrived first is chance
        outcome = Outcome(run.outputs, run.facts, messages, run.take_printed(), fault)
        if fault:
            self.close()
        return outcome


class _Run:
    """The state of one call: who has finished, who waits, what went wrong."""

    def __init__(self, ranks: Ranks, seconds: float, number: int) -> None:
        n = ranks.count
        self.ranks, self.seconds, self.number, self.hub = ranks, seconds, number, Hub(n)
        self.outputs: list[dict] = [{} for _ in range(n)]
        self.facts: list[dict] = [{} for _ in range(n)]
        self.finished: set[int] = set()
        self.waiting: dict[int, int] = {}  # rank -> the call it waits for
        self.errors: dict[int, dict] = {}
        self.fault: Fault | None = None

    def until_done(self) -> Fault | None:
        deadline = time.monotonic() + self.seconds
        while len(self.finished) < self.ranks.count:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return self._error_fault() if self.errors else self._slow()
            for event in self.ranks.events(remaining):
                self._take(event)
                if self.fault:
                    return self.fault
            if self.errors:
                deadline = min(deadline, time.monotonic() + GRACE)
            idle = len(self.finished) + len(self.waiting) + len(self.errors)
            if idle == self.ranks.count and len(self.finished) < self.ranks.count:
                return self._error_fault() if self.errors else self._stuck()
        return None

    def take_printed(self) -> list[str]:
        texts = [data.decode(errors="replace") for data in self.ranks.printed]
        for data in self.ranks.printed:
            data.clear()
        return texts

    def _take(self, event: Event) -> None:
        rank = event.rank
        if event.kind == "frame":
            try:
                self._take_frame(rank, event.header, event.tensors)
            except Misuse as error:
                self.fault = Fault("misuse", str(error), [rank])
            except (
                Exception
            ) as error:  # whatever a rank wrote, it is the rank's fault and not the end of grading
                self.fault = Fault("garbage", f"{type(error).__name__}: {str(error)[:300]}", [rank])
        elif event.kind == "gone":
            self.fault = Fault("exit", _exit_text(rank, event.code), [rank])
        elif event.kind == "flood":
            self.fault = Fault("flood", f"rank {rank} printed more than 1 MiB", [rank])
        else:
            self.fault = Fault("garbage", event.text, [rank])

    def _take_frame(self, rank: int, header: dict, tensors: list[Tensor]) -> None:
        kind = header.pop("kind")
        if kind == "op":
            for to, request, answer in self.hub.submit(rank, header, tensors):
                self.ranks.send(to, {"id": request}, answer)
                if self.waiting.get(to) == request:
                    del self.waiting[to]
        elif kind == "wait":
            if (rank, header["id"]) in self.hub.open_calls:
                self.waiting[rank] = header["id"]
        elif kind == "phase" and header["phase"] == "backward":  # any other would go uncounted
            self.hub.phases[rank] = "backward"
        elif kind == "error":
            self.errors[rank] = header
        elif kind in ("result", "loaded") and rank not in self.finished and header["call"] == self.number:
            self.finished.add(rank)
            self.outputs[rank] = dict(zip([str(n)[:60] for n in header.get("names", [])], tensors))
            self.facts[rank] = dict(header.get("facts", {}))
        else:
            raise ValueError(f"a message of kind {str(kind)[:20]!r}")

    def _error_fault(self) -> Fault:
        first = next(iter(self.errors))
        error = self.errors[first]
        same = sorted(r for r, e in self.errors.items() if e == error)
        return Fault("error", f"{error.get('type')}: {str(error.get('message'))[:1000]}", same, error)

    def _stuck(self) -> Fault:
        calls = {rank: self.hub.open_calls[rank, request] for rank, request in self.waiting.items()}
        lines = [
            (
                f"rank {r} waits in {calls[r]}, line {calls[r].where[1]}"
                if r in calls
                else f"rank {r} has finished"
            )
            for r in range(self.ranks.count)
        ]
        return Fault("stuck", "; ".join(lines + self._crossed(calls)), sorted(calls))

    def _crossed(self, calls: dict[int, Call]) -> list[str]:
        """The first send whose target receives, but from someone else."""
        receives = {c.rank: c.group[c.more["peer"]] for c in self.hub.open_calls.values() if c.op == "recv"}
        for rank in sorted(calls):
            to = calls[rank].group[calls[rank].more["peer"]] if calls[rank].op == "send" else None
            if receives.get(to, rank) != rank:
                return [f"rank {rank} sends to rank {to}, which receives from rank {receives[to]}"]
        return []

    def _slow(self) -> Fault:
        """After the time limit: who still runs, and what they print when asked where they are."""
        running = [r for r in range(self.ranks.count) if r not in self.finished and r not in self.waiting]
        said = {rank: bytes(self.ranks.printed[rank]) for rank in running}
        for rank in running:
            self.ranks.printed[rank].clear()
            self.ranks.interrupt(rank)
        until = time.monotonic() + GRACE
        while (left := until - time.monotonic()) > 0:
            for _ in self.ranks.events(left):
                pass
        places = [f"rank {r}{_place_in(self.ranks.printed[r].decode(errors='replace'))}" for r in running[:8]]
        for rank in running:
            self.ranks.printed[rank][:] = said[rank]
        return Fault("slow", f"not finished after {self.seconds:g} s: " + ", ".join(places), running)


def _place_in(text: str) -> str:
    """The innermost line of a learner's code in what faulthandler printed."""
    for line in text.splitlines():
        if (
            'File "' in line
            and "/site-packages/" not in line
            and "/lib/python" not in line
            and "/tpcourse/" not in line
        ):
            name, _, rest = line.strip().removeprefix('File "').partition('", line ')
            number, _, function = rest.partition(" in ")
            return f" is in {function} (line {number} of {cell_name(name)})"
    return ""


def cell_name(file: str) -> str:
    """What feedback calls a file of code: a graded notebook's cells have numbers, a running one's files of
    their own.
    """
    if file.startswith("cell ") and file[5:].isdigit():
        return file
    return "its cell" if "ipykernel_" in file or file.startswith("<ipython-") else Path(file).name


def _exit_text(rank: int, code: int) -> str:
    if code >= 0:
        return (
            f"rank {rank} ended with exit code {code} before it returned (exit, quit, os._exit or sys.exit)"
        )
    names = {
        -9: "SIGKILL: the system killed it, usually for want of memory",
        -11: "SIGSEGV: it crashed in C code",
        -6: "SIGABRT: it aborted",
        -24: "SIGXCPU: it used up its processor time",
    }
    return f"rank {rank} was ended by {names.get(code, f'signal {-code}')}"
