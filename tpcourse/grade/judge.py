"""From what the ranks did to a verdict in sentences: pass, or which rank, which index, and what that usually
means.
"""

import linecache
import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tpcourse.grade import arrays
from tpcourse.grade.case import Case, bytes_text
from tpcourse.grade.session import Fault, Outcome, cell_name

RELATIVE = 1e-9  # float64: order of summation, nothing more


@dataclass
class Verdict:
    """``passed``, and ``lines`` that say why or what was seen; ``printed`` is what the learner's code
    printed.
    """

    case: str
    passed: bool
    lines: list[str]
    printed: list[str] = field(default_factory=list)


def judge(case: Case, outcome: Outcome) -> Verdict:
    """Hold what came back to what ``case`` expects, and what was sent to what it allows."""
    if case.refuses:
        lines = _refusal_lines(case, outcome)
    elif outcome.fault:
        lines = fault_lines(outcome.fault)
        ran_out = outcome.fault.kind == "slow" or outcome.fault.error.get("type") == "MemoryError"
        lines += [case.slow] if case.slow and ran_out else []
    else:
        lines = _wait_lines(outcome) or _value_lines(case, outcome)
        unwritten = lines[:1] == [_nothing("result", 0, {"result": "NoneType"})]
        sent = None if unwritten else case.traffic(outcome.messages)
        lines += [f"What your ranks sent: {sent}."] if sent else []
        lines += _memory_lines(case, outcome)
    return Verdict(case.title, not lines, lines or [case.praise], outcome.printed)


def fault_lines(fault: Fault) -> list[str]:
    """A fault as a learner reads it."""
    if fault.kind == "error":
        return _error_lines(fault)
    hints = {
        "stuck": ["The ranks wait for each other, for ever.", fault.text + ".", _stuck_hint(fault.text)],
        "slow": [f"Your code was {fault.text}."],
        "misuse": ["The ranks' calls do not fit each other.", fault.text + ".", _misuse_hint(fault.text)],
        "exit": [fault.text + ".", "Return a value or raise an error instead of ending the process."],
        "flood": [fault.text + "; nothing is printed in graded code, or little."],
        "garbage": [
            f"Rank {fault.ranks[0]} sent its parent something that is no call of this course: {fault.text}."
        ],
    }
    return [line for line in hints[fault.kind] if line]


def _error_lines(fault: Fault) -> list[str]:
    if fault.error.get("type") == "PackageUsed":
        return [
            f"{fault.error['message']}, and this exercise asks you to write it.",
            "While your code is checked there is torch and torch.distributed, and nothing of tpcourse.",
        ]
    who = f"rank {fault.ranks[0]}" if len(fault.ranks) == 1 else f"ranks {', '.join(map(str, fault.ranks))}"
    lines = [f"{who}: {fault.text}"]
    lines += [_place_text(*place) for place in _places(fault.error)]
    if fault.error.get("type") == "PermissionError":
        lines.append(
            "A checked rank reads Python's own files, writes none, and starts no process or connection. For"
            " ranks to speak there are the plain functions of torch.distributed."
        )
    if fault.error.get("type") in ("EOFError", "BdbQuit"):
        lines.append("A checked rank has no keyboard: print what you want to see.")
    if "allocate" in fault.text or "MemoryError" in fault.text:
        lines.append("A checked rank may use 512 MiB; these tensors need a few KB.")
    return lines


def _places(error: dict) -> list[tuple[str, int, str]]:
    found = error.get("places")
    good = [p for p in found if isinstance(p, list) and len(p) == 3] if isinstance(found, list) else []
    return [(str(p[0]), p[1] if type(p[1]) is int else 0, str(p[2])[:60]) for p in good[-3:]]


def _place_text(file: str, number: int, function: str) -> str:
    """Where in the learner's code, with the line if it is a cell of theirs: no file is opened because a rank
    named it.
    """
    name = cell_name(file)
    known = linecache.cache.get(file, ()) if "cell" in name else ()
    lines = known[2] if len(known) == 4 else []
    text = f": {lines[number - 1].strip()}" if 0 < number <= len(lines) else ""
    return f"in {function or 'the cell'}, line {number} of {name}{text}"


def _stuck_hint(text: str) -> str:
    if "which receives from" in text:
        return "The two ends of a message must name each other: the rank I send to must receive from me."
    if "has finished" in text:
        return (
            "Some ranks returned while others still wait for them: a send needs its receive, and a collective"
            " is called by every rank."
        )
    if "waits in send" in text and "waits in recv" not in text:
        return (
            "Every rank sends before it receives, and a send ends only when the other side receives. Start"
            " both with dist.batch_isend_irecv, or start the send with dist.isend and wait for it after the"
            " receive."
        )
    if "waits in recv" in text and "waits in send" not in text:
        return (
            "Someone waits for a message that nobody sends: look at who sends to whom, and how many messages"
            " there are."
        )
    return ""


def _misuse_hint(text: str) -> str:
    if "float32" in text and "float64" in text:
        return (
            "torch.empty and torch.zeros make float32 unless told otherwise: torch.empty_like(x) takes x's"
            " dtype."
        )
    if "which receives into" in text:
        return "The receiver's buffer must have the size of what is sent."
    return ""


def _refusal_lines(case: Case, outcome: Outcome) -> list[str]:
    fault = outcome.fault
    if fault and fault.kind == "error" and fault.error.get("type") == case.refuses:
        if set(case.says) <= set(map(int, re.findall(r"\d{1,9}", fault.text))):
            return []
        return [f"Your {fault.text}", f"It must say both numbers, {case.says[0]} and {case.says[1]}."]
    if fault:
        return [f"Expected {case.refuses}; instead:", *fault_lines(fault)]
    when = "at construction" if case.do == "module" else "at once"
    return [f"Expected {case.refuses}, and your code went on: say {when} what does not divide, and by what."]


def _value_lines(case: Case, outcome: Outcome) -> list[str]:
    for name in case.expected[0]:
        got = [outputs.get(name) for outputs in outcome.outputs]
        right = [expected[name] for expected in case.expected]
        for rank in range(case.ranks):
            difference = _difference(name, rank, got[rank], right[rank], outcome.facts[rank], case.absolute)
            if difference:
                meaning = _meaning(case, name, got, right)
                return [difference, *([f"What this usually means: {meaning}."] if meaning else [])]
    return []


def _difference(
    name: str, rank: int, got: Tensor | None, right: Tensor, facts: dict, absolute: float
) -> str:
    """Where ``got`` differs from ``right``, or nothing."""
    if got is None:
        return _nothing(name, rank, facts)
    if got.shape != right.shape:
        return f"rank {rank}, {name}: expected shape {list(right.shape)}, got {list(got.shape)}"
    if got.dtype != right.dtype:
        return f"rank {rank}, {name}: expected dtype {right.dtype}, got {got.dtype}"
    wrong = ~torch.isclose(got, right, rtol=RELATIVE, atol=absolute)
    if not wrong.any():
        return ""
    index = tuple(wrong.nonzero()[0].tolist())
    return (
        f"rank {rank}, {name}{list(index)}: expected {right[index].item():.6g}, got {got[index].item():.6g} "
        f"({int(wrong.sum())} of {wrong.numel()} numbers differ)"
    )


def _nothing(name: str, rank: int, facts: dict) -> str:
    kind = str(facts.get(name, ""))[:40]
    if name == "Y" and name not in facts:
        return (
            f"rank {rank}: the module's parameters are {_parameters(facts)}; give it those that the task names,"
            " and no other"
        )
    if name in ("result", "Y"):
        return (
            f"rank {rank}: your code returned {kind or 'nothing'} where a tensor is expected"
            f"{': it is not written yet, or its return is missing' if kind in ('', 'NoneType') else ''}"
        )
    if name.endswith(" at the start"):
        return (
            f"rank {rank}: the module has no parameter called {name.removesuffix(' at the start')}; it has"
            f" {_parameters(facts)}"
        )
    if name not in facts:
        return (
            f"rank {rank}: no {name}: autograd finds no way back from Y. A collective fills buffers that know"
            " nothing of gradients"
        )
    return (
        f"rank {rank}: {name} did not come back: backward gave {kind if kind != 'NoneType' else 'None'} there"
    )


def _parameters(facts: dict) -> str:
    found = facts.get("parameters")
    return ", ".join(str(key)[:40] for key in found) if isinstance(found, dict) and found else "none"


def _meaning(case: Case, name: str, got: list[Tensor | None], right: list[Tensor]) -> str:
    """The first known mistake that explains what all ranks returned."""
    numbers_only = all(g is not None and arrays.spec(g) == arrays.spec(r) for g, r in zip(got, right))
    for text, wrong in case.mistakes.get(name, []):
        if wrong and all(
            g is not None and g.shape == w.shape and torch.allclose(g.double(), w, RELATIVE, case.absolute)
            for g, w in zip(got, wrong)
        ):
            return text
        if not wrong and numbers_only:
            return text
    return ""


def _wait_lines(outcome: Outcome) -> list[str]:
    for rank, facts in enumerate(outcome.facts):
        left = facts.get("never waited for")
        if isinstance(left, list) and left and isinstance(left[0], list) and len(left[0]) == 2:
            op, line = str(left[0][0])[:40], str(left[0][1])[:10]
            return [
                f"Rank {rank} started {op} on line {line} and never waited for it: call wait() on what it"
                " returned, or its numbers may not have left, or not have come, when you use them."
            ]
    return []


def _memory_lines(case: Case, outcome: Outcome) -> list[str]:
    for rank, facts in enumerate(outcome.facts):
        kept = facts.get("kept")
        if case.keeps is not None and type(kept) is int and kept > case.keeps:
            return [
                f"Rank {rank} keeps {bytes_text(kept)} for backward besides its inputs; {bytes_text(case.keeps)}"
                " are allowed: keep your own blocks and gather again."
            ]
    if case.holds is None:
        return []
    for rank, facts in enumerate(outcome.facts):
        held = facts.get("held")
        if type(held) is int and held > 1.5 * case.holds:
            return [
                f"Rank {rank} holds {bytes_text(held)} of tensors after the module is built; its shard is"
                f" {bytes_text(case.holds)}. Keep only this rank's part, as a copy and not as a view of the"
                " whole."
            ]
    return []
