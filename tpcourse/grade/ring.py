"""The tasks of lesson 01: collectives built from messages between neighbours."""

import torch
from torch import Tensor

from tpcourse.grade.case import Case, Mistake, Traffic, bytes_text, odd, randn, ranks_text
from tpcourse.grade.hub import Message

ON_PAPER = "On paper, for 3 ranks, write down which chunk each rank sends and which it receives in each step"
SAYS = {  # what a wrong value usually means; {n} ranks
    "changed": "the function must leave its input as it was: work on x.clone()",
    "shifted": "the sums are right but rank r returned chunk (r + {d}) % {n} instead of chunk r",
    "nothing": "nothing was added to what came back: it is a part of this rank's own x",
    "missing": (
        "one rank's share is missing from the sum: a step too few, or something that arrived was not added"
    ),
    "alone": "that is one rank's chunk alone: what arrives must be added, not put in place of the own chunk",
    "whole": "that is the whole sum; reduce-scatter leaves each rank one chunk of it",
    "mixed": (
        f"different chunks were mixed: what arrives is added to the own chunk of the same number. {ON_PAPER}"
    ),
    "rolled": (
        "the chunks are there, but not in the order of ranks: rank r's list begins with the chunk of rank {d}"
    ),
    "reverse": "the chunks are there, but in reverse order of ranks",
    "never": "a chunk never arrived: one step too few, or one chunk was written to the wrong place",
    "added": "the chunks were added up; all-gather puts them side by side",
    "somewhere": f"a chunk is in the wrong place, or came twice. {ON_PAPER}",
    "misplaced": "the chunks of the sum are in the wrong places: chunk i is where chunk i + {d} belongs",
    "one chunk": "that is one chunk of the sum: the all-gather is missing",
    "one summed": "only chunk r of rank r is summed: the all-gather is missing",
    "mean": "every number is the expected one divided by {n}: the task adds, it does not average",
    "times": "every number is {n} times the expected one: some contributions were added more than once",
}
SETTINGS = {"names": ["x"], "group": False, "options": {}}


def reduce_scatter(n: int, rng: torch.Generator) -> list[Case]:
    """``ring_reduce_scatter(x)``, x of n·k numbers on every rank: rank r returns chunk r of the sum."""
    xs = _whole_tensors(n, rng)
    own, total = [x.chunk(n) for x in xs], sum(xs).chunk(n)
    wrong = [(_says("shifted", n, d), [total[(r + d) % n] for r in range(n)]) for d in range(1, n)]
    wrong += _around(list(total), n)
    wrong.append((SAYS["nothing"], [own[r][r] for r in range(n)]))
    for d in range(1, n):
        other = [own[(r + d) % n][r] for r in range(n)]
        wrong.append((SAYS["missing"], [total[r] - other[r] for r in range(n)]))
        wrong.append((SAYS["alone"], other))
    wrong += [(SAYS["whole"], [sum(xs)] * n), (SAYS["mixed"], [])]
    return [_case(n, xs, list(total), wrong, steps=n - 1, chunk=total[0].nbytes, whole=xs[0].nbytes)]


def all_gather(n: int, rng: torch.Generator) -> list[Case]:
    """``ring_all_gather(x)``, x of k numbers: every rank returns all n·k, in the order of ranks."""
    k = odd(rng, 3, 9)
    xs = [randn(rng, k) for _ in range(n)]
    right = torch.cat(xs)
    wrong = [
        (SAYS["reverse"], [torch.cat(xs[::-1])] * n),
        *_around([right] * n, n),
        (SAYS["added"], [sum(xs)] * n),
    ]
    for first, name in ((0, "r"), (1, "r + 1"), (-1, "r - 1")):
        for step in (1, -1):
            rolled = [torch.cat([xs[(r + first + step * i) % n] for i in range(n)]) for r in range(n)]
            wrong.append((_says("rolled", n, name), rolled))
    wrong += [(SAYS["never"], [_without(xs, (r + d) % n) for r in range(n)]) for d in range(1, n)]
    wrong.append((SAYS["somewhere"], []))
    return [_case(n, xs, [right] * n, wrong, steps=n - 1, chunk=xs[0].nbytes, whole=right.nbytes)]


def all_reduce(n: int, rng: torch.Generator) -> list[Case]:
    """``ring_all_reduce(x)``, x of n·k numbers on every rank: every rank returns the sum."""
    xs = _whole_tensors(n, rng)
    total = sum(xs)
    chunks = total.chunk(n)
    wrong = [*_around([total] * n, n), (SAYS["nothing"], xs), (SAYS["one chunk"], list(chunks))]
    for d in range(1, n):
        wrong.append((_says("misplaced", n, d), [torch.cat([chunks[(i - d) % n] for i in range(n)])] * n))
    partly = [torch.cat([chunks[i] if i == r else xs[r].chunk(n)[i] for i in range(n)]) for r in range(n)]
    wrong.append((SAYS["one summed"], partly))
    return [_case(n, xs, [total] * n, wrong, steps=2 * (n - 1), chunk=chunks[0].nbytes, whole=total.nbytes)]


def _says(mistake: str, n: int, d: object = "") -> str:
    return SAYS[mistake].format(n=n, d=d)


def _whole_tensors(n: int, rng: torch.Generator) -> list[Tensor]:
    k = odd(rng, 3, 9)
    return [randn(rng, n * k) for _ in range(n)]


def _without(xs: list[Tensor], missing: int) -> Tensor:
    return torch.cat([torch.zeros_like(x) if i == missing else x for i, x in enumerate(xs)])


def _around(right: list[Tensor], n: int) -> list[Mistake]:
    """The right values divided or multiplied by the number of ranks."""
    return [(_says("mean", n), [t / n for t in right]), (_says("times", n), [t * n for t in right])]


def _case(
    n: int, xs: list[Tensor], right: list[Tensor], wrong: list[Mistake], steps: int, chunk: int, whole: int
) -> Case:
    expected = [{"result": y, "x after the call": x} for x, y in zip(xs, right)]
    changed = [(SAYS["changed"], [])]
    praise = (
        f"each rank sent {messages_text(steps)} of one chunk, {bytes_text(steps * chunk)} = {steps}/{n} of"
        " the whole tensor"
        if n > 1
        else "one rank sent nothing"
    )
    return Case(
        f"{ranks_text(n)}, x of {xs[0].numel()} numbers",
        n,
        "function",
        SETTINGS,
        [[x] for x in xs],
        expected,
        {"result": wrong, "x after the call": changed},
        ring_traffic(n, steps, chunk, whole),
        praise,
    )


def ring_traffic(n: int, steps: int, chunk: int, whole: int) -> Traffic:
    """Every rank sends ``steps`` messages of ``chunk`` bytes, all of them to the same neighbour."""

    def judge(messages: list[Message]) -> str | None:
        for m in messages:
            if m.op != "send":
                return (
                    f"your code called {m.op} (line {m.where[1]}): this task builds the collective from"
                    " messages between neighbours, with dist.send, isend, recv, irecv or batch_isend_irecv"
                )
        if any(m.bytes != chunk for m in messages):
            return _wrong_size(messages, n, steps, chunk, whole)
        for step in (1, -1):
            if all(m.peer == (m.rank + step) % n for m in messages):
                break
        else:
            odd_one = next(m for m in messages if m.peer != (m.rank + 1) % n)
            return (
                f"rank {odd_one.rank} sent to rank {odd_one.peer} (line {odd_one.where[1]}): in a ring every"
                " rank sends only to its right neighbour, (rank + 1) % world_size, and receives from its"
                " left one, (rank - 1) % world_size"
            )
        for r in range(n):
            count = sum(m.rank == r for m in messages)
            if count != steps:
                return (
                    f"rank {r} sent {messages_text(count)} of one chunk; a ring of {n} ranks sends {steps}, "
                    f"{steps}/{n} of the tensor"
                )
        return None

    return judge


def messages_text(count: int) -> str:
    return "1 message" if count == 1 else f"{count} messages"


def _wrong_size(messages: list[Message], n: int, steps: int, chunk: int, whole: int) -> str:
    first = [m for m in messages if m.rank == messages[0].rank]
    sent = sum(m.bytes for m in first)
    what = "of the whole tensor" if all(m.bytes == whole for m in first) else "that are not one chunk each"
    return (
        f"rank {messages[0].rank} sent {bytes_text(sent)} in {messages_text(len(first))} {what}; a ring sends"
        f" one chunk, an n-th of the tensor, in each step: {messages_text(steps)} of {bytes_text(chunk)},"
        f" {bytes_text(steps * chunk)} in all, {steps}/{n} of the tensor"
    )
