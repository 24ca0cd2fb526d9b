"""The tasks of lesson 02: Y = XA with A's columns split over the ranks."""

import torch
from torch import Tensor

from tpcourse.grade import linear
from tpcourse.grade.case import Case, Mistake, Traffic, bytes_text, odd, randn, ranks_text
from tpcourse.measure import wire_bytes

SAYS = linear.SAYS | {  # what a wrong value usually means; {m} columns on each of {n} ranks
    "whole": "that is the whole Y: without gather_output a rank returns its own columns only",
    "own": "those are this rank's columns only: with gather_output every rank returns the whole Y",
    "added": "the ranks' columns were added up: they belong side by side, along the last dimension",
    "many biases": "the bias was added {n} times instead of once",
    "stacked": (
        "the ranks' columns were joined along dim 0, as all_gather_into_tensor lays them out: put them side "
        "by side along the last dimension"
    ),
    "reshaped": (
        "the ranks' blocks were joined along dim 0 and then reshaped, which mixes tokens and columns: join "
        "the blocks along the last dimension"
    ),
    "reverse": "the columns are in the reverse order of ranks",
    "one buffer": "one rank's columns came {n} times: [buffer] * {n} is one and the same buffer {n} times",
    "own first": "the columns begin with the rank's own: they belong in the order of ranks",
    "part of dX": (
        "that is only this rank's part of dX: every rank's columns depend on the whole X, so the parts must "
        "be summed with an all-reduce in backward"
    ),
    "mean dX": "dX is divided by {n}: the parts are summed, not averaged",
    "times gathered": (
        "{name} is {n} times too large: with gather_output every rank gets the same gradient of Y, so "
        "backward takes this rank's columns and sums nothing"
    ),
    "alike": (
        "all {n} shards are equal: every rank drew its own share after the same seed, or kept the same rows."
        " Draw the whole layer's numbers on every rank, and let rank r keep rows {m}r to {m}(r + 1)"
    ),
    "in_features": (
        "that is a split along in_features: column-parallel splits out_features, which is dim 0 of torch's "
        "[out, in] weight"
    ),
}


class _Problem:
    """One linear layer in float64 on odd sizes: the whole and each rank's part. Weights are [out, in], as
    torch keeps them.
    """

    def __init__(self, n: int, rng: torch.Generator, bias: bool, alike: bool) -> None:
        self.n, self.tokens, self.k, self.m = n, odd(rng, 5, 7), odd(rng, 9, 13), odd(rng, 3, 3)
        self.x, self.weight = randn(rng, self.tokens, self.k), randn(rng, n * self.m, self.k)
        self.bias = randn(rng, n * self.m) if bias else None
        self.y = self.x @ self.weight.T + (self.bias if bias else 0)
        self.dy = randn(rng, self.tokens, n * self.m)  # the whole gradient of Y; a rank's columns are its own
        self.alike = alike  # with gather_output each rank holds the whole Y; the same gradient comes back
        self.dx = self.dy @ self.weight
        self.w, self.dw = self.weight.chunk(n), (self.dy.T @ self.x).chunk(n)
        self.b = self.bias.chunk(n) if bias else [None] * n
        self.ys, self.dys = self.y.chunk(n, 1), self.dy.chunk(n, 1)

    def result(self, r: int) -> Tensor:
        return self.y if self.alike else self.ys[r].contiguous()

    def upstream(self, r: int) -> Tensor:
        return self.dy if self.alike else self.dys[r].contiguous()

    def gradients(self, r: int) -> dict[str, Tensor]:
        db = {} if self.bias is None else {"db": self.dys[r].sum(0)}
        return {"dX": self.dx, "dW": self.dw[r], **db}

    def says(self, mistake: str, name: str = "") -> str:
        return SAYS[mistake].format(n=self.n, m=self.m, name=name)

    def title(self) -> str:
        return (
            f"{ranks_text(self.n)}, X [{self.tokens}, {self.k}], A with {self.n * self.m} columns"
            f"{'' if self.bias is not None else ', no bias'}{', gather_output=True' if self.alike else ''}"
        )


def forward(n: int, rng: torch.Generator) -> list[Case]:
    """``column_parallel_forward(x, weight, bias, group, gather_output)``."""
    cases = []
    for bias, gather in ((True, False), (True, True), (False, True)):
        p = _Problem(n, rng, bias, alike=gather)
        inputs = [[p.x, p.w[r], *([p.b[r]] if bias else [])] for r in range(n)]
        names = ["x", "weight", "bias"]
        kept = [dict(zip([f"{name} after the call" for name in names], given)) for given in inputs]
        expected = [{"result": p.result(r), **kept[r]} for r in range(n)]
        mistakes = {"result": _y_mistakes(p), **{name: [(SAYS["changed"], [])] for name in kept[0]}}
        settings = {"names": names, "group": True, "options": {"gather_output": gather}}
        if not bias:
            settings["names"] = ["x", "weight", None]
        cases.append(
            Case(
                p.title(),
                n,
                "function",
                settings,
                inputs,
                expected,
                mistakes,
                column_traffic(p, backward=False),
                _praise(p, backward=False),
            )
        )
    return cases


def autograd(n: int, rng: torch.Generator) -> list[Case]:
    """``ColumnParallelFunction.apply(x, weight, bias, group)`` and its backward."""
    cases = []
    for bias in (True, False):
        p = _Problem(n, rng, bias, alike=False)
        inputs = [[p.x, p.w[r], *([p.b[r]] if bias else []), p.upstream(r)] for r in range(n)]
        expected = [{"Y": p.result(r), **p.gradients(r)} for r in range(n)]
        mistakes = {"Y": _y_mistakes(p), **_gradient_mistakes(p)}
        cases.append(
            Case(
                p.title(),
                n,
                "autograd",
                {"bias": bias},
                inputs,
                expected,
                mistakes,
                column_traffic(p, backward=True),
                _praise(p, backward=True),
            )
        )
    return cases


def module(n: int, rng: torch.Generator) -> list[Case]:
    """``ColumnParallelLinear(in_features, out_features, group, bias, gather_output)``."""
    cases = [
        _module_case(_Problem(n, rng, bias, alike=gather), rng)
        for bias, gather in ((True, False), (True, True), (False, False))
    ]
    if n > 1:
        p = _Problem(n, rng, bias=True, alike=False)
        out = n * p.m + 1
        settings = _settings([p.k, out], seed=0, bias=True, gather=False)
        inputs = [[p.x, p.upstream(r)] for r in range(n)]
        cases.append(
            Case(
                f"{n} ranks, out_features={out}, which does not divide by {n}",
                n,
                "module",
                settings,
                inputs,
                [{} for _ in range(n)],
                refuses="ValueError",
                says=(out, n),
            )
        )
    return cases


def _module_case(p: _Problem, rng: torch.Generator) -> Case:
    n, bias, seed = p.n, p.bias is not None, int(torch.randint(1 << 30, (), generator=rng))
    whole, small = linear.dense(seed, p.k, n * p.m, bias), linear.dense(seed, p.k, p.m, bias)
    start = [{f"{name} at the start": t.chunk(n)[r] for name, t in whole.items()} for r in range(n)]
    mistakes = {f"{name} at the start": _start_mistakes(p, name, whole[name], small[name]) for name in whole}
    mistakes |= {"Y": _y_mistakes(p), **_gradient_mistakes(p)}
    expected = [{**start[r], "Y": p.result(r), **p.gradients(r)} for r in range(n)]
    inputs = [[p.x, p.upstream(r), p.w[r], *([p.b[r]] if bias else [])] for r in range(n)]
    settings = _settings([p.k, n * p.m], seed, bias, gather=p.alike)
    traffic, praise = column_traffic(p, backward=True), _praise(p, backward=True)
    holds = sum(t.nbytes for t in start[0].values())
    return Case(p.title(), n, "module", settings, inputs, expected, mistakes, traffic, praise, holds)


def _settings(sizes: list[int], seed: int, bias: bool, gather: bool) -> dict:
    gradients = {"weight": "dW"} | ({"bias": "db"} if bias else {})
    options = {"bias": bias, "gather_output": gather}
    return {"sizes": sizes, "seed": seed, "options": options, "gradients": gradients}


def _start_mistakes(p: _Problem, name: str, whole: Tensor, small: Tensor) -> list[Mistake]:
    n = p.n
    return [
        (p.says("alike"), [small] * n),
        (p.says("alike"), [whole.chunk(n)[0]] * n),
        (p.says("whole shard", name), [whole] * n),
        (p.says("in_features"), list(whole.tensor_split(n, -1))),
    ]


def _y_mistakes(p: _Problem) -> list[Mistake]:
    n, ys, stacked = p.n, p.ys, torch.cat(p.ys)
    wrong = [
        (p.says("whole"), [p.y] * n),
        (p.says("own"), list(ys)),
        (p.says("added"), [sum(ys)] * n),
        (p.says("stacked"), [stacked] * n),
        (p.says("reshaped"), [stacked.reshape(p.y.shape)] * n),
        (p.says("reverse"), [torch.cat(ys[::-1], 1)] * n),
        (p.says("one buffer"), [torch.cat([ys[-1]] * n, 1)] * n),
        (p.says("own first"), [torch.cat([ys[(r + i) % n] for i in range(n)], 1) for r in range(n)]),
    ]
    if p.bias is not None:
        biases = [p.bias if p.alike else p.b[r] for r in range(n)]
        wrong.append((p.says("no bias"), [p.result(r) - biases[r] for r in range(n)]))
        wrong.append((p.says("many biases"), [p.result(r) + (n - 1) * biases[r] for r in range(n)]))
    return wrong


def _gradient_mistakes(p: _Problem) -> dict[str, list[Mistake]]:
    n, dws, dbs = p.n, list(p.dw), [dy.sum(0) for dy in p.dys]
    parts = [p.dys[r] @ p.w[r] for r in range(n)]
    times = SAYS["times gathered"] if p.alike else SAYS["times"]
    dx = [
        (p.says("part of dX"), parts),
        (p.says("mean dX"), [p.dx / n] * n),
        (times.format(n=n, name="dX"), [p.dx * n] * n),
    ]
    dw = [(p.says("transposed"), [t.T for t in dws]), *linear.own_mistakes("dW", dws, times)]
    db = [*linear.bias_mistakes(dbs, p.tokens), *linear.own_mistakes("db", dbs, times)]
    return {"dX": dx, "dW": dw, "db": db}


def _allowed(p: _Problem, backward: bool) -> dict[str, float]:
    """Wire bytes per rank and phase that the lesson's formula gives."""
    gathered = wire_bytes("all_gather", p.y.nbytes, p.n) if p.alike else 0
    return {"forward": gathered, "backward": wire_bytes("all_reduce", p.x.nbytes, p.n) if backward else 0}


def _praise(p: _Problem, backward: bool) -> str:
    sent = _allowed(p, backward)
    text = f"forward sent {bytes_text(sent['forward'])} per rank"
    return f"{text}, backward {bytes_text(sent['backward'])}: one all-reduce of dX" if backward else text


def column_traffic(p: _Problem, backward: bool) -> Traffic:
    """Activations may move, the weight may not: one gather of Y if asked for, one all-reduce of dX in
    backward.
    """
    stays = "A column-parallel layer leaves every rank its own columns of A and moves activations only"
    return linear.limited(p.n, _allowed(p, backward), _why, (p.weight, p.w[0]), stays)


def _why(phase: str, limit: float) -> str:
    if phase == "backward":
        return (
            f"one all-reduce of dX, {bytes_text(limit)}, is all that backward needs"
            if limit
            else "no backward was asked for"
        )
    if limit:
        return f"gathering the columns of Y takes {bytes_text(limit)}"
    return "every rank holds the whole X and its own columns of A, so forward needs no message at all"
