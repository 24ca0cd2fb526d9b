"""The tasks of lesson 06: a fused weight cut by heads, attention over them, gradients of copied KV heads."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tpcourse.grade import linear
from tpcourse.grade.case import Case, Mistake, Traffic, bytes_text, odd, randn, ranks_text
from tpcourse.grade.hub import Message
from tpcourse.measure import wire_bytes

SAYS = linear.SAYS | {  # what a wrong value usually means; {n} ranks
    "runs": "the rows were cut into {n} runs: cut queries, keys and values each by themselves",
    "in turn": "copies were dealt in turn: ranks that hold a copy of the same KV head follow each other",
    "all kv": "every rank kept the keys and values of all heads: its own queries read fewer",
    "first kv": "every rank kept KV head 0: each keeps the one that its own queries read",
    "v first": "this rank's values come before its keys: the order is queries, keys, values",
    "woven": "the rows go head by head: all of this rank's queries come first, then its keys and values",
    "term": "that is only this rank's term of Y: its heads give one, and Y is the sum of all ranks' terms",
    "mean Y": "Y is divided by {n}: the terms are added, not averaged",
    "no scale": "the scores were not divided by the square root of head_dim",
    "not causal": "tokens see later ones: the attention is causal",
    "one head": "this rank's columns were taken for one head: a head has head_dim of them",
    "mixed": "heads and tokens changed places: the core takes [batch, heads, sequence, head_dim]; transpose",
    "head by head": (
        "qkv's outputs were read as [heads, 3, head_dim]: all of this rank's queries come first, then its"
        " keys, then its values"
    ),
    "part of dX": "that is only this rank's part of dX: X went to all ranks' heads, and their parts add up",
    "mean dX": "dX is divided by {n}: the parts are summed, not averaged",
    "times": (
        "{name} is {n} times too large: all ranks go on with the same Y, so each has the whole dY already, "
        "and backward through that all-reduce sums nothing"
    ),
    "proj rows": (
        "that is a split of proj by its outputs, dim 0: O comes split by heads, its inputs, which are dim 1"
    ),
    "unsummed": "each copy kept its own gradient: the ranks that hold the same KV head add up theirs",
    "all ranks": "all {n} ranks were summed: different KV heads have gradients of their own",
    "mean copies": "the copies' gradients were averaged: each is a part, and they add up",
}


def says(mistake: str, n: int, name: str = "") -> str:
    return SAYS[mistake].format(n=n, name=name)


def shard_qkv(n: int, rng: torch.Generator) -> list[Case]:
    """``shard_qkv(weight, group, head_dim, num_heads, num_kv_heads)``: this rank's rows of q | k | v."""
    fewer = [kv for kv in range(1, n) if n % kv == 0]
    return [_shard_case(n, rng, 2 * n, kv) for kv in dict.fromkeys((2 * n, n, *fewer))]


def _shard_case(n: int, rng: torch.Generator, heads: int, kv: int) -> Case:
    d, width, parts = odd(rng, 3, 5), odd(rng, 5, 7), min(kv, n)
    weight = randn(rng, (heads + 2 * kv) * d, width)
    q, k, v = weight.split([heads * d, kv * d, kv * d])
    qs, ks, vs = q.chunk(n), k.chunk(parts), v.chunk(parts)
    places = [r * parts // n for r in range(n)]
    right = [torch.cat([qs[r], ks[places[r]], vs[places[r]]]) for r in range(n)]
    mistakes = [
        (says("runs", n), list(weight.tensor_split(n))),
        (says("in turn", n), [torch.cat([qs[r], ks[r % parts], vs[r % parts]]) for r in range(n)]),
        (says("first kv", n), [torch.cat([qs[r], ks[0], vs[0]]) for r in range(n)]),
        (says("all kv", n), [torch.cat([qs[r], k, v]) for r in range(n)]),
        (says("v first", n), [torch.cat([qs[r], vs[places[r]], ks[places[r]]]) for r in range(n)]),
    ]
    if kv == heads:
        woven = torch.stack([t.unflatten(0, (-1, d)) for t in (q, k, v)], 1).flatten(0, 2)
        mistakes.append((says("woven", n), list(woven.chunk(n))))
    options = {"head_dim": d, "num_heads": heads, "num_kv_heads": kv}
    title = f"{ranks_text(n)}, {heads} heads and {kv} KV heads of {d}"
    nothing = _traffic(n, 0, "every rank has the whole weight here, and cuts it without a message")
    return _function(title, ["weight"], [[weight]] * n, options, right, mistakes, nothing, "nothing was sent")


def kv_gradient(n: int, rng: torch.Generator) -> list[Case]:
    """``kv_gradient(grad, group, num_kv_heads)``: the gradient of this rank's KV head, of all its copies."""
    return [_copies_case(n, rng, kv) for kv in range(1, n + 1) if n % kv == 0]


def _copies_case(n: int, rng: torch.Generator, kv: int) -> Case:
    rows, width = 2 * odd(rng, 3, 5), odd(rng, 5, 7)
    grads = [randn(rng, rows, width) for _ in range(n)]
    copies = n // kv
    right = [sum(grads[r // copies * copies : (r // copies + 1) * copies]) for r in range(n)]
    mistakes = [
        (says("unsummed", n), grads),
        (says("in turn", n), [sum(grads[r % kv :: kv]) for r in range(n)]),
        (says("all ranks", n), [sum(grads)] * n),
        (says("mean copies", n), [t / copies for t in right]),
    ]
    limit = wire_bytes("all_reduce", grads[0].nbytes, copies)
    why = f"one all-reduce over the {ranks_text(copies)} that hold this head, {bytes_text(limit)}, is enough"
    if copies == 1:
        why = "no other rank holds this head, so nothing need be sent"
    title = f"{ranks_text(n)}, {kv} KV head{'s' if kv > 1 else ''}"
    inputs = [[grad] for grad in grads]
    traffic, praise = _traffic(n, limit, why), f"sent {bytes_text(limit)} per rank"
    return _function(title, ["grad"], inputs, {"num_kv_heads": kv}, right, mistakes, traffic, praise)


def _function(
    title: str,
    names: list[str],
    inputs: list[list[Tensor]],
    options: dict,
    right: list[Tensor],
    mistakes: list[Mistake],
    traffic: Traffic,
    praise: str,
) -> Case:
    """A case of a function that must leave its inputs as they were."""
    kept = [{f"{name} after the call": t for name, t in zip(names, given)} for given in inputs]
    expected = [{"result": t, **same} for t, same in zip(right, kept)]
    known = {"result": mistakes, **{name: [(SAYS["changed"], [])] for name in kept[0]}}
    settings = {"names": names, "group": True, "options": options}
    return Case(title, len(right), "function", settings, inputs, expected, known, traffic, praise)


def _traffic(n: int, limit: float, why: str) -> Traffic:
    def judge(messages: list[Message]) -> str | None:
        for r in range(n):
            mine = [m for m in messages if m.rank == r]
            sent = sum(m.wire for m in mine)
            if sent > limit + 1e-6:
                return f"rank {r} sent {bytes_text(sent)} ({mine[0].op}, line {mine[0].where[1]}); {why}"
        return None

    return judge


def _in_blocks(qkv: Tensor, d: int) -> list[Tensor]:
    return [t.unflatten(-1, (-1, d)) for t in qkv.chunk(3, -1)]


def _head_by_head(qkv: Tensor, d: int) -> Sequence[Tensor]:
    return qkv.unflatten(-1, (-1, 3, d)).unbind(-2)


class _Attention:
    """Causal attention in float64, whole and in each rank's term of Y, with all gradients."""

    def __init__(self, n: int, rng: torch.Generator) -> None:
        self.n, self.heads, self.head_dim, self.batch = n, 2 * n, odd(rng, 3, 5), 3
        self.dim, sequence = self.heads * self.head_dim, odd(rng, 5, 7)
        self.x, self.dy = (randn(rng, self.batch, sequence, self.dim) for _ in range(2))
        whole = randn(rng, 3 * self.dim, self.dim), randn(rng, self.dim, self.dim)
        self.qkv, self.proj = (t / self.dim**0.5 for t in whole)
        self.qkvs, self.projs = self.cut(self.qkv, self.proj)
        self.terms, self.parts, self.dqkvs, self.dprojs = [], [], [], []
        for qkv, proj in zip(self.qkvs, self.projs):
            leaves = [t.clone().requires_grad_() for t in (self.x, qkv, proj)]
            term = self.term(*leaves)
            gradients = torch.autograd.grad(term, leaves, self.dy)
            for kept, t in zip(
                (self.terms, self.parts, self.dqkvs, self.dprojs), (term.detach(), *gradients)
            ):
                kept.append(t)
        self.y, self.dx = sum(self.terms), sum(self.parts)

    def cut(self, qkv: Tensor, proj: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Every rank's rows of qkv, from each of its three blocks, and columns of proj."""
        blocks = [t.chunk(self.n) for t in qkv.chunk(3)]
        return [torch.cat(mine) for mine in zip(*blocks)], [t.contiguous() for t in proj.chunk(self.n, 1)]

    def term(
        self,
        x: Tensor,
        qkv: Tensor,
        proj: Tensor,
        scale: bool = True,
        causal: bool = True,
        head_dim: int = 0,
        read: Callable[[Tensor, int], Sequence[Tensor]] = _in_blocks,
        heads_at: int = 1,
    ) -> Tensor:
        """One rank's term of Y; ``read`` makes q, k and v, [batch, sequence, heads, head_dim], of its qkv."""
        d = head_dim or self.head_dim
        q, k, v = (t.transpose(heads_at, 2) for t in read(x @ qkv.T, d))
        scores = q @ k.mT / (d**0.5 if scale else 1)
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(heads_at, 2).flatten(2) @ proj.T

    def otherwise(self, **change: object) -> Tensor:
        """Y with something else done between the projections."""
        return sum(self.term(self.x, *pair, **change) for pair in zip(self.qkvs, self.projs))


def module(n: int, rng: torch.Generator) -> list[Case]:
    """``ParallelAttention(dim, num_heads, group)``, with parameters ``qkv`` and ``proj``."""
    cases = [_module_case(_Attention(n, rng), rng)]
    if n > 1:
        p, heads = _Attention(n, rng), 2 * n + 1
        title = f"{n} ranks, {heads} heads, which do not divide by {n}"
        settings = {"sizes": [heads * p.head_dim, heads], "seed": 0, "options": {}, "gradients": {}}
        nothing = [{} for _ in range(n)]
        refused = {"refuses": "ValueError", "says": (heads, n)}
        cases.append(Case(title, n, "module", settings, [[p.x, p.dy]] * n, nothing, **refused))
    return cases


def _module_case(p: _Attention, rng: torch.Generator) -> Case:
    n, seed = p.n, int(torch.randint(1 << 30, (), generator=rng))
    qkv, proj = _start(p.dim, seed)
    expected = [
        {"qkv at the start": a, "proj at the start": b, "Y": p.y, "dX": p.dx, "dqkv": da, "dproj": db}
        for a, b, da, db in zip(*p.cut(qkv, proj), p.dqkvs, p.dprojs)
    ]
    mistakes = _start_mistakes(n, qkv, proj) | {"Y": _y_mistakes(p)} | _gradient_mistakes(p)
    gradients = {"qkv": "dqkv", "proj": "dproj"}
    settings = {"sizes": [p.dim, p.heads], "seed": seed, "options": {}, "gradients": gradients}
    inputs = [[p.x, p.dy, p.qkvs[r], p.projs[r]] for r in range(n)]
    one = wire_bytes("all_reduce", p.y.nbytes, n)
    stays = "A rank keeps its own heads' weights and moves activations only"
    weights = (p.qkv, p.qkvs[0], p.proj, p.projs[0])
    traffic = linear.limited(n, {"forward": one, "backward": one}, _why, weights, stays)
    title = f"{ranks_text(n)}, {p.heads} heads of {p.head_dim}, X {list(p.x.shape)}"
    praise = f"one all-reduce forward and one backward, {bytes_text(one)} per rank each"
    holds = p.qkvs[0].nbytes + p.projs[0].nbytes
    return Case(title, n, "module", settings, inputs, expected, mistakes, traffic, praise, holds)


def _start(dim: int, seed: int) -> list[Tensor]:
    """The whole qkv and proj as the module must draw them after ``torch.manual_seed(seed)``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(dim, m, bias=False, dtype=torch.float64) for m in (3 * dim, dim)]
    return [layer.weight.detach() for layer in layers]


def _start_mistakes(n: int, qkv: Tensor, proj: Tensor) -> dict[str, list[Mistake]]:
    return {
        "qkv at the start": [
            (says("runs", n), list(qkv.chunk(n))),
            (says("whole shard", n, "qkv"), [qkv] * n),
        ],
        "proj at the start": [
            (says("proj rows", n), list(proj.chunk(n))),
            (says("whole shard", n, "proj"), [proj] * n),
        ],
    }


def _y_mistakes(p: _Attention) -> list[Mistake]:
    n, own = p.n, p.heads // p.n * p.head_dim
    changes = {
        "no scale": {"scale": False},
        "not causal": {"causal": False},
        "one head": {"head_dim": own},
        "mixed": {"heads_at": 2},
        "head by head": {"read": _head_by_head},
    }
    return [
        (says("term", n), p.terms),
        (says("mean Y", n), [p.y / n] * n),
        *((says(name, n), [p.otherwise(**change)] * n) for name, change in changes.items()),
    ]


def _gradient_mistakes(p: _Attention) -> dict[str, list[Mistake]]:
    n = p.n
    times = {
        name: (says("times", n, name), [t * n for t in values])
        for name, values in (("dX", [p.dx] * n), ("dqkv", p.dqkvs), ("dproj", p.dprojs))
    }
    dx = [
        (says("part of dX", n), p.parts),
        (says("mean dX", n), [p.dx / n] * n),
        (says("times", n, "dX"), [t * n for t in p.parts]),
        times["dX"],
    ]
    own = {
        name: [times[name], *linear.own_mistakes(name, values)]
        for name, values in (("dqkv", p.dqkvs), ("dproj", p.dprojs))
    }
    return {"dX": dx, **own}


def _why(phase: str, limit: float) -> str:
    if phase == "forward":
        return f"one all-reduce of the terms of Y, {bytes_text(limit)}, is all that forward needs"
    return f"one all-reduce of dX, {bytes_text(limit)}, is all that backward needs: one f for q, k and v"
