"""The words of a failure: from what ranks sent, how they died and what they recorded, to the exception a person reads."""

import os
import re
import signal

from tpcourse.launch.failures import CollectiveMismatch, RankDied, RankError, RankRaised, RanksStuck, Unsendable
from tpcourse.launch.output import name_ranks
from tpcourse.launch.places import describe, is_own, name_line, quote_line
from tpcourse.launch.record import Call
from tpcourse.launch.worker import PLACE_OFFSET

_MEANING = {
    signal.SIGKILL: "killed from outside; when nobody did, the system ran out of memory: use smaller tensors or fewer ranks",
    signal.SIGSEGV: "a crash in native code, often a tensor used after it was freed, or an extension's bug",
    signal.SIGABRT: "native code gave up, often a failed check; its message is in the rank's output",
    signal.SIGBUS: "a memory access that cannot be served, often a full disk or shared memory",
    signal.SIGTERM: "asked to end by another process",
}


def raised(errors: dict[int, dict], waiting: list[int]) -> RankError:
    """The error for ranks that raised: equal ones once, the lowest rank first; later ones are counted, not shown."""
    same: dict[tuple, list[int]] = {}
    for rank, error in sorted(errors.items()):
        same.setdefault((error["type"], error["message"], str(error["frames"])), []).append(rank)
    (kind, message, _), ranks = next(iter(same.items()))
    error = errors[ranks[0]]
    lines = [f"{name_ranks(ranks)} raised {kind}: {message}"]
    for filename, line, function, text in error["frames"]:
        lines.append(f"  {name_line(filename, line)}{_inside(function)}")
        if text := quote_line(filename, line, text):
            lines.append(f"    {text}")
    others = [rank for rank in errors if rank not in ranks]
    if others:
        lines.append(f"({name_ranks(others)} raised too: " + "; ".join(
            f"{name_ranks(r)} {k}: {m.splitlines()[0][:200] if m else ''}" for (k, m, _), r in list(same.items())[1:4]) + ")")
    if waiting:
        lines.append(f"({name_ranks(waiting)} had not finished)")
    if kind == "Unsendable":
        return Unsendable("\n".join(lines).replace("raised Unsendable: ", "returned something that cannot travel: "), ranks)
    return RankRaised("\n".join(lines), ranks, kind)


def died(rank: int, code: int | None, stack: str) -> RankError:
    """The error for a rank whose process ended with exit code ``code`` (negative: the signal)."""
    if code is None:
        text = "ended without a trace; the process from which ranks are forked has died with it"
    elif code < 0:
        name = signal.Signals(-code).name
        text = f"was ended by {name}: {_MEANING.get(-code, 'a signal sent by the system or another process')}"
    else:
        text = (f"left with exit code {code} in the middle of its work: something called os._exit({code}). Return from the "
                "function instead, or raise an exception")
    return RankDied(f"rank {rank} {text}" + (f"\nIt was at:\n{stack}" if stack else ""), [rank])


def exited(rank: int, code: str) -> RankError:
    """The error for a rank that called sys.exit()."""
    return RankDied(f"rank {rank} called sys.exit({code}) in the middle of its work. Return from the function instead, or "
                    "raise an exception that says what is wrong", [rank])


def mismatch(calls: list[Call]) -> RankError:
    """The error for calls that do not fit together."""
    differing = [name for name in ("op", "shape", "dtype", "reduce", "peer") if len({getattr(c, name) for c in calls}) > 1]
    words = {"op": "operation", "reduce": "reduce operation", "peer": "root"}
    what = " and ".join(words.get(name, name) for name in differing)
    message = any("send" in call.op for call in calls) and any("recv" in call.op for call in calls)
    if message:
        head = f"a message does not fit its receiver: {what.replace('operation and ', '').replace(' and root', '')} differ"
    else:
        head = f"the ranks' calls do not fit together: {what} differ{'' if ' and ' in what else 's'}"
    tail = "Every rank of a group must make the same calls in the same order, with tensors that match."
    return CollectiveMismatch(f"{head}\n{table(calls)}\n{tail}", [call.rank for call in calls])


def stuck(waits: dict[int, tuple[Call, list[int]]], finished: set[int]) -> RankError:
    """The error for ranks that wait for calls which will never be made."""
    lines = []
    for rank, (call, missing) in sorted(waits.items()):
        lines.append(f"rank {rank} waits in {_calls(call)} for {name_ranks(missing)}\n    {describe(call.where)}")
    calls = [call for _, (call, _) in sorted(waits.items())]
    if len({call.group for call in calls}) > 1:
        lines.append(f"The groups differ:\n{table(calls)}")
    gone = {rank for _, missing in waits.values() for rank in missing} & finished
    if gone:
        lines.append(f"{name_ranks(list(gone))} returned without making the call that the others wait for")
        head = f"{name_ranks(list(waits))} will wait for ever"
    else:
        head = "deadlock: every rank waits for another"
    return RanksStuck(head + "\n" + "\n".join(lines), sorted(waits))


def timed_out(seconds: float, stacks: dict[int, str], waits: dict[int, tuple[Call, list[int]]], finished: set[int]) -> RankError:
    """The error for ranks that were still at work at the timeout: where each one is."""
    lines = []
    for rank, stack in sorted(stacks.items()):
        wait = f" waits in {_calls(waits[rank][0])}" if rank in waits else " is still at work"
        if rank in waits and waits[rank][1]:
            wait += f" for {name_ranks(waits[rank][1])}"
        lines.append(f"rank {rank}{wait}\n{stack or '    (its line could not be read)'}")
    if finished:
        lines.append(f"{name_ranks(list(finished))} had finished")
    return RanksStuck(f"not done after timeout={seconds:g} s\n" + "\n".join(lines) +
                      "\nWas it only slow? Give more time with timeout=", sorted(stacks))


def read_stack(log: int) -> str:
    """The innermost own frame of the stack that a rank's fault handler wrote into its log; empty if there is none."""
    text = os.pread(log, 1 << 16, PLACE_OFFSET).decode(errors="replace").rpartition("most recent call first")[2]
    frames = re.findall(r'File "(.*?)", line (\d+) in (\S+)', text)
    own = [frame for frame in frames if is_own(frame[0])] or frames[:1]
    return "\n".join(f"    {name_line(file, int(line))}{_inside(name)}: {quote_line(file, int(line))}" for file, line, name in own[:1])


def _inside(function: str) -> str:
    return f", in {function}" if function.isidentifier() else ""


def table(calls: list[Call]) -> str:
    """The calls as a table, equal rows merged: ranks, call number, operation, shape, dtype, group, line."""
    head = ("ranks", "call", "operation", "shape", "dtype", "group", "line")
    rows: dict[tuple, list[int]] = {}
    for call in calls:
        row = (f"#{call.number + 1}", _calls(call), call.shape, call.dtype, _group(call), describe(call.where))
        rows.setdefault(row, []).append(call.rank)
    cells = [head] + [(name_ranks(ranks).partition(" ")[2], *row) for row, ranks in rows.items()]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head) - 1)]
    return "\n".join("  " + "  ".join([*(c.ljust(w) for c, w in zip(row, widths)), row[-1]]).rstrip() for row in cells)


def _calls(call: Call) -> str:
    detail = [part for part in (call.reduce, _peer(call)) if part]
    return call.op + (f"({', '.join(detail)})" if detail else "")


def _peer(call: Call) -> str:
    if not call.peer:
        return ""
    role = {"send": "to", "isend": "to", "recv": "from", "irecv": "from"}.get(call.op, "root")
    return f"{role} {call.peer}"


def _group(call: Call) -> str:
    return (f"{call.dim}: " if call.dim else "") + name_ranks(list(call.members))
