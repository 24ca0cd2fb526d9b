"""The check that stands after each task in an exercise."""

import io
import marshal
import secrets
import types
from collections.abc import Callable, Sequence

import cloudpickle
import torch

from tpcourse.grade.code import Code
from tpcourse.grade.judge import Verdict
from tpcourse.grade.tasks import task

SECONDS = 10.0


class CheckFailed(Exception):
    """A check did not pass; the message says where and what that usually means."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows this in place of a traceback: the message is about the learner's code, not about
        this one.
        """
        return [str(self)]


def check(
    name: str, answer: Callable, ranks: Sequence[int] = (), seed: int | None = None, seconds: float = SECONDS
) -> None:
    """Run ``answer`` as the task ``name`` on fresh ranks and say what came of it.

    Inputs are drawn afresh each time; ``seed`` draws the same ones again, ``ranks`` asks for other numbers
    of ranks than the task's own, ``seconds`` is the time that one call may take. Raises CheckFailed with the
    first thing that is wrong, ValueError for a task that does not exist.
    """
    todo = task(name)
    counts = tuple(ranks) or todo.ranks
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    pickled = torch.frombuffer(bytearray(_by_value(answer)), dtype=torch.uint8)
    code = Code(lambda start, stop: ({"do": "pickle", "name": name}, [pickled]), seconds)
    try:
        for count in counts:
            verdicts = code.verdicts(todo.cases(count, generator(seed, count)), name, parts=1)
            if not verdicts[-1].passed:
                raise CheckFailed(_failure(name, verdicts[-1], count, seed))
    finally:
        code.close()
    print(f"✓ {name} is right on {_listed(counts)} ranks.")
    print("\n".join(f"  {v.case}: {v.lines[0]}." for v in verdicts if v.lines[0]))


def generator(seed: int, count: int) -> torch.Generator:
    """The source of a case's numbers for ``count`` ranks."""
    return torch.Generator().manual_seed(seed * 1000 + count)


def _failure(name: str, verdict: Verdict, count: int, seed: int) -> str:
    again = f"The same numbers again: check({name!r}, {name}, ranks=[{count}], seed={seed})"
    lines = [*verdict.lines, *printed_lines(verdict.printed), again]
    return "\n".join([f"✗ {name}, {verdict.case}", *(f"  {line}" for line in lines)])


def printed_lines(texts: list[str]) -> list[str]:
    """What the ranks printed, equal texts once, the first 20 lines of each."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text.strip():
            groups.setdefault(text.strip(), []).append(rank)
    lines = []
    for text, ranks in groups.items():
        lines.append(f"printed by rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}:")
        lines += [f"  {line[:200]}" for line in text.splitlines()[:20]]
    return lines


class _Pickler(cloudpickle.Pickler):
    """Code keeps the name of its file (cloudpickle drops it), so that feedback shows the line in its cell."""

    def reducer_override(self, obj):
        if isinstance(obj, types.CodeType):
            return marshal.loads, (marshal.dumps(obj),)
        return super().reducer_override(obj)


def _by_value(answer: Callable) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(answer)
        return buffer.getvalue()
    except Exception as error:
        raise CheckFailed(
            f"✗ your code cannot be sent to the ranks: {error}. Let it use only what it defines itself, torch"
            " and torch.distributed"
        ) from None


def _listed(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(counts) == 1 else f"{', '.join(map(str, counts[:-1]))} and {counts[-1]}"
