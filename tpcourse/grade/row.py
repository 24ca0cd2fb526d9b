"""The tasks of lesson 03: Y = XA with A's rows, and X's features, split over the ranks."""

import torch
from torch import Tensor

from tpcourse.grade import linear
from tpcourse.grade.case import Case, Mistake, Traffic, bytes_text, odd, randn, ranks_text
from tpcourse.measure import wire_bytes

SAYS = linear.SAYS | {  # what a wrong value usually means; {n} ranks
    "part": "that is only this rank's part of Y: each element of Y is a sum over all ranks' features",
    "side by side": "the ranks' parts were put side by side: they are terms of one sum and belong added up",
    "mean Y": "Y was divided by {n}: the parts are added, not averaged",
    "many biases": "the bias was added {n} times, by every rank before the sum: add it once, after the sum",
    "first features": "every rank took rank 0's features of X: rank r takes its own",
    "times": (
        "{name} is {n} times too large: all ranks go on with the same Y, so each has the whole dY already, "
        "and backward through the all-reduce sums nothing"
    ),
    "mean db": (
        "db is divided by {n}: with bias / {n} added on every rank Y comes out right, and db does not. Add "
        "the whole bias once, after the sum"
    ),
    "features alone": (
        "only this rank's features of dX are there, the others are zero: every rank gave the whole X, so "
        "every rank needs the whole dX"
    ),
    "alike": (
        "all {n} shards are equal: draw the whole layer's numbers on every rank, and let each keep its own "
        "columns of weight"
    ),
    "out_features": (
        "that is a split along out_features: row-parallel splits in_features, which is dim 1 of torch's "
        "[out, in] weight"
    ),
    "cut bias": "the bias was split: Y has all its columns on every rank, so each holds the whole bias",
}


class _Problem:
    """One linear layer in float64 on odd sizes, whole and in parts; with ``parallel`` X comes split."""

    def __init__(self, n: int, rng: torch.Generator, bias: bool, parallel: bool = True) -> None:
        self.n, self.parallel, self.own = n, parallel, 3
        self.tokens, self.m, self.k = odd(rng, 5, 7), odd(rng, 9, 13), n * self.own
        self.x, self.weight = randn(rng, self.tokens, self.k), randn(rng, self.m, self.k)
        self.bias = randn(rng, self.m) if bias else None
        self.xs = [t.contiguous() for t in self.x.chunk(n, 1)]
        self.w = [t.contiguous() for t in self.weight.chunk(n, 1)]
        self.parts = [x @ w.T for x, w in zip(self.xs, self.w)]
        self.xa = self.x @ self.weight.T
        self.y = self.xa + (self.bias if bias else 0)
        self.dy = randn(rng, self.tokens, self.m)  # the same on every rank, as Y is

    def given(self, r: int) -> Tensor:
        return self.xs[r] if self.parallel else self.x

    def gradients(self, r: int) -> dict[str, Tensor]:
        dx = self.dy @ (self.w[r] if self.parallel else self.weight)
        db = {} if self.bias is None else {"db": self.dy.sum(0)}
        return {"dX": dx, "dW": self.dy.T @ self.xs[r], **db}

    def says(self, mistake: str, name: str = "") -> str:
        return SAYS[mistake].format(n=self.n, name=name)

    def title(self) -> str:
        rest = ("" if self.bias is not None else ", no bias") + (
            "" if self.parallel else ", input_is_parallel=False"
        )
        return f"{ranks_text(self.n)}, X [{self.tokens}, {self.k}], A with {self.m} columns{rest}"

    def sends(self, backward: bool) -> dict[str, float]:
        """Wire bytes per rank and phase that the lesson's formulas give."""
        gather = 0 if self.parallel else wire_bytes("all_gather", self.x.nbytes, self.n)
        forward = wire_bytes("all_reduce", self.y.nbytes, self.n)
        return {"forward": forward, "backward": gather if backward else 0}


def forward(n: int, rng: torch.Generator) -> list[Case]:
    """``row_parallel_forward(x, weight, bias, group)``."""
    cases = []
    for bias in (True, False):
        p = _Problem(n, rng, bias)
        inputs = [[p.xs[r], p.w[r], *([p.bias] if bias else [])] for r in range(n)]
        names = ["x", "weight", "bias"]
        kept = [dict(zip([f"{name} after the call" for name in names], given)) for given in inputs]
        expected = [{"result": p.y, **kept[r]} for r in range(n)]
        mistakes = {"result": _y_mistakes(p), **{name: [(SAYS["changed"], [])] for name in kept[0]}}
        settings = {"names": names if bias else ["x", "weight", None], "group": True, "options": {}}
        said = _traffic(p, backward=False), _praise(p, backward=False)
        cases.append(Case(p.title(), n, "function", settings, inputs, expected, mistakes, *said))
    return cases


def module(n: int, rng: torch.Generator) -> list[Case]:
    """``RowParallelLinear(in_features, out_features, group, bias, input_is_parallel)``."""
    ways = ((True, True), (True, False), (False, True))
    cases = [_module_case(_Problem(n, rng, bias, parallel), rng) for bias, parallel in ways]
    if n > 1:
        p = _Problem(n, rng, bias=True)
        title = f"{n} ranks, in_features={p.k + 1}, which does not divide by {n}"
        settings, nothing = _settings([p.k + 1, p.m], 0, p), [{} for _ in range(n)]
        inputs = [[p.xs[r], p.dy] for r in range(n)]
        cases.append(
            Case(title, n, "module", settings, inputs, nothing, refuses="ValueError", says=(p.k + 1, n))
        )
    return cases


def _module_case(p: _Problem, rng: torch.Generator) -> Case:
    n, bias, seed = p.n, p.bias is not None, int(torch.randint(1 << 30, (), generator=rng))
    whole, small = linear.dense(seed, p.k, p.m, bias), linear.dense(seed, p.own, p.m, bias)
    shards = whole["weight"].chunk(n, 1)
    start = [{f"{k} at the start": t for k, t in (whole | {"weight": shards[r]}).items()} for r in range(n)]
    mistakes = _start_mistakes(p, whole, small) | {"Y": _y_mistakes(p), **_gradient_mistakes(p)}
    expected = [{**start[r], "Y": p.y, **p.gradients(r)} for r in range(n)]
    inputs = [[p.given(r), p.dy, p.w[r], *([p.bias] if bias else [])] for r in range(n)]
    settings, holds = _settings([p.k, p.m], seed, p), sum(t.numel() * 8 for t in start[0].values())
    said = _traffic(p, backward=True), _praise(p, backward=True)
    return Case(p.title(), n, "module", settings, inputs, expected, mistakes, *said, holds)


def _settings(sizes: list[int], seed: int, p: _Problem) -> dict:
    gradients = {"weight": "dW"} | ({} if p.bias is None else {"bias": "db"})
    options = {"bias": p.bias is not None, "input_is_parallel": p.parallel}
    return {"sizes": sizes, "seed": seed, "options": options, "gradients": gradients}


def _start_mistakes(p: _Problem, whole: dict, small: dict) -> dict[str, list[Mistake]]:
    n, weight = p.n, whole["weight"]
    wrong = {
        "weight at the start": [
            (p.says("alike"), [small["weight"]] * n),
            (p.says("alike"), [weight.chunk(n, 1)[0]] * n),
            (p.says("whole shard", "weight"), [weight] * n),
            (p.says("out_features"), list(weight.tensor_split(n, 0))),
        ]
    }
    if "bias" in whole:
        wrong["bias at the start"] = [(p.says("cut bias"), list(whole["bias"].tensor_split(n)))]
    return wrong


def _y_mistakes(p: _Problem) -> list[Mistake]:
    n, bias = p.n, 0 if p.bias is None else p.bias
    first = sum(p.xs[0] @ w.T for w in p.w) + bias
    wrong = [
        (p.says("part"), [part + bias for part in p.parts]),
        (p.says("part"), p.parts),
        (p.says("side by side"), [torch.cat(p.parts, 1) + (0 if p.bias is None else bias.repeat(n))] * n),
        (p.says("side by side"), [torch.cat(p.parts, 1)] * n),
        (p.says("mean Y"), [p.xa / n + bias] * n),
        (p.says("mean Y"), [p.y / n] * n),
        (p.says("first features"), [first] * n),
    ]
    if p.bias is not None:
        wrong += [(p.says("no bias"), [p.xa] * n), (p.says("many biases"), [p.y + (n - 1) * bias] * n)]
    return wrong


def _gradient_mistakes(p: _Problem) -> dict[str, list[Mistake]]:
    n, right = p.n, [p.gradients(r) for r in range(p.n)]
    dxs, dws, db = [g["dX"] for g in right], [g["dW"] for g in right], [p.dy.sum(0)] * n
    spread = [torch.zeros_like(p.x) for _ in range(n)]
    for r in range(n):
        spread[r][:, r * p.own : (r + 1) * p.own] = p.dy @ p.w[r]
    return {
        "dX": [
            (p.says("times", "dX"), [t * n for t in dxs]),
            (p.says("features alone"), spread),
            *linear.own_mistakes("dX", dxs),
        ],
        "dW": [(p.says("transposed"), [t.T for t in dws]), *linear.own_mistakes("dW", dws, SAYS["times"])],
        "db": [
            (p.says("mean db"), [t / n for t in db]),
            (p.says("times", "db"), [t * n for t in db]),
            *linear.bias_mistakes(db, p.tokens),
        ],
    }


def _praise(p: _Problem, backward: bool) -> str:
    sent = p.sends(backward)
    text = f"forward sent {bytes_text(sent['forward'])} per rank, one all-reduce of Y"
    if not backward:
        return text
    return f"{text}; backward {bytes_text(sent['backward'])}{'' if p.parallel else ', one all-gather of dX'}"


def _traffic(p: _Problem, backward: bool) -> Traffic:
    """Activations may move, the weight may not: one all-reduce of Y, and one gather of dX if X was whole."""
    stays = "A row-parallel layer leaves every rank its own rows of A and moves activations only"
    return linear.limited(p.n, p.sends(backward), _why, (p.weight, p.w[0]), stays)


def _why(phase: str, limit: float) -> str:
    if phase == "forward":
        return f"one all-reduce of the parts of Y, {bytes_text(limit)}, is all that forward needs"
    if limit:
        return f"gathering the features of dX takes {bytes_text(limit)}"
    return "every rank has the whole dY and computes its own gradients, so backward needs no message at all"
