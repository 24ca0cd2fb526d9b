"""What the tasks on split linear layers share: where nn.Linear starts, usual mistakes, limits on bytes."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from tpcourse.grade.case import Mistake, Traffic, bytes_text
from tpcourse.grade.hub import Message

SAYS = {  # what a wrong value usually means: {n} ranks, {name} a parameter or its gradient
    "changed": "the function must leave its inputs as they were: do not use in-place operations on them",
    "no bias": "the bias is missing",
    "sum": "{name} was summed over the ranks: each rank's {name} is its own part's and must stay as it is",
    "mean": "{name} is divided by {n}: nothing is averaged over ranks here",
    "transposed": "dW is transposed: it has the shape of the weight, as torch keeps it",
    "token mean": "db is the mean over tokens; it is the sum",
    "one number": "db is the sum of all of dY: sum over tokens only, and keep one number per column",
    "times": "{name} is {n} times too large: it was summed once too often",
    "whole shard": "the rank holds the whole {name}: each must hold 1/{n} of it",
}


def dense(seed: int, k: int, out: int, bias: bool) -> dict[str, Tensor]:
    """What ``nn.Linear(k, out)`` starts from after ``torch.manual_seed(seed)``, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = nn.Linear(k, out, bias, dtype=torch.float64)
    return {name: parameter.detach() for name, parameter in layer.named_parameters()}


def says(mistake: str, n: int, name: str = "") -> str:
    return SAYS[mistake].format(n=n, name=name)


def bias_mistakes(dbs: list[Tensor], tokens: int) -> list[Mistake]:
    """What people make of a bias' gradient besides the sum over its tokens."""
    return [
        (SAYS["token mean"], [t / tokens for t in dbs]),
        (SAYS["one number"], [t.sum().expand_as(t) for t in dbs]),
    ]


def own_mistakes(name: str, right: list[Tensor], times: str = "") -> list[Mistake]:
    """A gradient that each rank has for itself, summed over the ranks, averaged, or ``times`` too large."""
    n = len(right)
    return [
        (says("sum", n, name), [sum(right)] * n),
        (says("mean", n, name), [t / n for t in right]),
        ((times or SAYS["times"]).format(n=n, name=name), [t * n for t in right]),
    ]


def limited(
    n: int,
    allowed: dict[str, float],
    why: Callable[[str, float], str],
    weights: Iterable[Tensor],
    stays: str,
) -> Traffic:
    """Activations may move, within ``allowed`` wire bytes per rank and phase; what has a shape of ``weights``
    may not: ``stays`` says why. ``why(phase, limit)`` says what needs those bytes.
    """
    weights = list(weights)
    forbidden = {shape for w in weights for shape in (w.shape, w.T.shape, (w.numel(),))}

    def judge(messages: list[Message]) -> str | None:
        for m in messages:
            if m.shape in forbidden:
                what = "the weight" if m.phase == "forward" else "the weight's gradient"
                return (
                    f"{m.phase} moved {what}: {m.op} of {list(m.shape)} (line {m.where[1]}),"
                    f" {bytes_text(m.wire)} per rank. {stays}"
                )
        for r in range(n):
            for phase, limit in allowed.items():
                mine = [m for m in messages if m.rank == r and m.phase == phase]
                sent = sum(m.wire for m in mine)
                if sent > limit + 1e-6:
                    return f"{_calls(mine)} in {phase}: {bytes_text(sent)} per rank; {why(phase, limit)}"
        return None

    return judge


def _calls(messages: list[Message]) -> str:
    listed = [f"{m.op} of {list(m.shape)} (line {m.where[1]})" for m in messages[:3]]
    return f"rank {messages[0].rank} called {', '.join(listed)}"
