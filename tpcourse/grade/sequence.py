"""The tasks of lesson 07: a norm and an MLP on tokens that are split over ranks, and what a layer keeps."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tpcourse.grade import linear
from tpcourse.grade.case import Case, Mistake, bytes_text, odd, randn, ranks_text
from tpcourse.measure import wire_bytes

SAYS = linear.SAYS | {  # what a wrong value usually means; {n} ranks
    "unsummed": "that is only the part of {name} from this rank's tokens: the ranks' parts are to be summed",
    "mean": "{name} is divided by {n}: nothing is averaged over ranks here",
    "over tokens": "the norm runs over the features of each token, not over the tokens",
    "weight times": "weight or bias was summed over the ranks in forward: they are equal, and used as such",
    "dX summed": "dX was summed over the ranks: each rank's tokens are its own, and so is their dX",
    "own": "{name} comes from this rank's tokens alone: its part of the weight meets the tokens of all ranks",
    "term": "that is only this rank's term of Y, by its own columns: the terms of all ranks are to be summed",
    "first tokens": "every rank took rank 0's tokens of the sum: rank r keeps its own",
    "no gelu": "the GELU between the two products is missing",
    "part of dX": (
        "that is only a part of dX: the gathered tokens went into all ranks' columns, so backward sums the "
        "ranks' parts, and deals them out: a reduce-scatter. And each part needs the dY of all tokens"
    ),
    "all split": "that is all 34 divided by P: without sequence_parallel 10 of them are whole on every rank",
    "ten whole": "10 of the 34 were not divided by P: with sequence_parallel they are",
    "scores": "selective recomputation keeps no scores: the 5as/h is gone",
    "no scores": "the scores are missing: softmax, the mask of its dropout and its result",
    "whole scores": "the scores were not divided by P: a rank has those of its own heads",
    "full whole": "the layer's input is split, too, with sequence_parallel",
    "full split": "without sequence_parallel the layer's input is whole on every rank",
    "numbers": "those are numbers: each takes 2 bytes",
    "wide masks": "a mask of dropout takes one byte an entry, not two",
}


def says(mistake: str, n: int, name: str = "") -> str:
    return SAYS[mistake].format(n=n, name=name)


def norm(n: int, rng: torch.Generator) -> list[Case]:
    """``sequence_parallel_norm(x, weight, bias, group)``, x this rank's tokens."""
    own, h = odd(rng, 3, 5), odd(rng, 7, 11)
    x, dy, weight, bias = (randn(rng, *shape) for shape in ((n * own, h), (n * own, h), (h,), (h,)))
    xs, dys = x.chunk(n), dy.chunk(n)
    parts = [_gradients(_norm, dy, x, weight, bias) for x, dy in zip(xs, dys)]
    y, dx, dw, db = ([part[i] for part in parts] for i in range(4))
    right = [{"Y": y[r], "dx": dx[r], "dweight": sum(dw), "dbias": sum(db)} for r in range(n)]
    other = {
        "over tokens": [F.layer_norm(x.T, (own,)).T * weight + bias for x in xs],
        "no bias": [t - bias for t in y],
        "weight times": [_norm(x, n * weight, n * bias) for x in xs],
    }
    mistakes = {
        "Y": [(says(name, n), wrong) for name, wrong in other.items()],
        "dx": [(says("dX summed", n), [sum(dx)] * n), *linear.own_mistakes("dx", dx)],
        "dweight": _sum_mistakes("dweight", dw),
        "dbias": _sum_mistakes("dbias", db),
    }
    settings = {"names": ["x", "weight", "bias"], "wanted": ["x", "weight", "bias"], "more": []}
    sends = {"forward": 0, "backward": 2 * wire_bytes("all_reduce", weight.nbytes, n)}
    traffic = linear.limited(n, sends, _why_norm, [], "")
    praise = f"nothing sent forward, {bytes_text(sends['backward'])} per rank backward, for the two sums"
    title = f"{ranks_text(n)}, {own} tokens of {h} features each"
    inputs = [[xs[r], weight, bias, dys[r]] for r in range(n)]
    return [Case(title, n, "differentiable", settings, inputs, right, mistakes, traffic, praise)]


def mlp(n: int, rng: torch.Generator) -> list[Case]:
    """``sequence_parallel_mlp(x, up, down, group)``, x this rank's tokens."""
    own, h, m = odd(rng, 3, 5), odd(rng, 7, 11), 4 * n  # even: no tokens of a weight's shape
    x, dy, up, down = (randn(rng, *shape) for shape in ((n * own, h), (n * own, h), (m, h), (h, m)))
    xs, dys, ups = x.chunk(n), dy.chunk(n), up.chunk(n)
    downs = [t.contiguous() for t in down.chunk(n, 1)]
    y, dx, *_ = _gradients(_mlp, dy, x, up, down)
    terms = [_gradients(_mlp, dy, x, *pair) for pair in zip(ups, downs)]  # of all tokens, by a rank's columns
    alone = [_gradients(_mlp, dy, x, *rest) for dy, x, *rest in zip(dys, xs, ups, downs)]
    right = [
        {"Y": y.chunk(n)[r], "dx": dx.chunk(n)[r], "dup": terms[r][2], "ddown": terms[r][3]} for r in range(n)
    ]
    settings = {"names": ["x", "up", "down"], "wanted": ["x", "up", "down"], "more": []}
    one = wire_bytes("all_gather", x.nbytes, n)
    stays = "Each rank keeps its own columns and rows of the weights; what moves are tokens"
    limits = {"forward": 2 * one, "backward": 3 * one}
    traffic = linear.limited(n, limits, _why_mlp, (up, ups[0], down, downs[0]), stays)
    praise = f"forward sent {bytes_text(2 * one)} per rank, backward {bytes_text(3 * one)}, X gathered again"
    inputs = [[xs[r], ups[r], downs[r], dys[r]] for r in range(n)]
    title = f"{ranks_text(n)}, {own} tokens each, width {h}, {m} hidden"
    mistakes = _mlp_mistakes(n, (x, up, down), right, terms, alone)
    keeps = 2 * len(x) * (m // n) * 8  # what goes into GELU, and what comes out
    said = mistakes, traffic, praise
    return [Case(title, n, "differentiable", settings, inputs, right, *said, keeps=keeps)]


def _mlp_mistakes(n: int, whole: tuple, right: list, terms: list, alone: list) -> dict[str, list[Mistake]]:
    x, up, down = whole
    y = [
        (says("term", n), [terms[r][0].chunk(n)[r] for r in range(n)]),
        (says("first tokens", n), [right[0]["Y"]] * n),
        (says("no gelu", n), list((x @ up.T @ down.T).chunk(n))),
    ]
    found = {"Y": y}
    found["dx"] = [(says("part of dX", n), [terms[r][1].chunk(n)[r] for r in range(n)])]
    for i, name in enumerate(("dx", "dup", "ddown"), start=1):
        own = (says("own", n, name), [t[i] for t in alone])
        found.setdefault(name, [own]).extend(linear.own_mistakes(name, [t[name] for t in right]))
    return found


def activation_bytes(n: int, rng: torch.Generator) -> list[Case]:
    """``activation_bytes(s, b, h, a, P, sequence_parallel, recompute)`` for P = n, in each of six ways."""
    a = 2 * n
    s, b, h = odd(rng, 5, 11), odd(rng, 1, 3), a * odd(rng, 3, 7)
    ways = [(split, way) for split in (False, True) for way in ("none", "selective", "full")]
    return [_bytes_case(n, {"s": s, "b": b, "h": h, "a": a, "P": n}, *way) for way in ways]


def _bytes_case(n: int, size: dict[str, int], split: bool, way: str) -> Case:
    s, b, h, a, _ = size.values()
    x, inner, scores = s * b * h, s * b * h / n, a * s * s * b / n
    outer, rest = (x / n if split else x), (5 * scores if way == "none" else 0)
    right = 2 * outer if way == "full" else 10 * outer + 24 * inner + rest
    wrong = {
        "full whole" if split else "full split": 2 * x if split else 2 * inner,
        "ten whole" if split else "all split": 24 * inner + rest + 10 * (x if split else inner),
        "scores": 10 * outer + 24 * inner + 5 * scores,
        "no scores": 10 * outer + 24 * inner,
        "whole scores": 10 * outer + 24 * inner + 5 * scores * n,
        "numbers": right / 2,
        "wide masks": 12 * outer + 24 * inner + rest * 6 / 5,
    }
    mistakes = [(says(name, n), [_number(value)] * n) for name, value in wrong.items() if value != right]
    settings = {"arguments": size | {"sequence_parallel": split, "recompute": way}}
    given = ", ".join(f"{name}={value!r}" for name, value in settings["arguments"].items())
    expected = [{"result": _number(right)} for _ in range(n)]
    traffic = linear.limited(n, {"forward": 0}, lambda *_: "a formula needs no message", [], "")
    praise = f"{bytes_text(right)} on each rank"
    return Case(given, n, "number", settings, [[]] * n, expected, {"result": mistakes}, traffic, praise)


def _number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def _mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.gelu(x @ up.T) @ down.T


def _gradients(function: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> list[Tensor]:
    """The function's result, then the gradient of each input."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def _sum_mistakes(name: str, parts: list[Tensor]) -> list[Mistake]:
    n, total = len(parts), sum(parts)
    return [
        (says("unsummed", n, name), parts),
        (says("mean", n, name), [total / n] * n),
        (says("times", n, name), [total * n] * n),
    ]


def _why_norm(phase: str, limit: float) -> str:
    if phase == "forward":
        return "each token is normed by itself, so forward needs no message at all"
    return f"the sum of the ranks' dW and db, {bytes_text(limit)}, is all that backward needs"


def _why_mlp(phase: str, limit: float) -> str:
    what = "an all-gather of X and a reduce-scatter of Y"
    if phase == "backward":
        what = "an all-gather of dY, one of X and a reduce-scatter of dX"
    return f"{what}, {bytes_text(limit)}, is all that {phase} needs"
