"""The tasks of lesson 04: the MLP gelu(X A + a) B + b, A cut by columns, B by rows; a fused gate and up."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcourse.grade import linear
from tpcourse.grade.case import Case, Mistake, bytes_text, odd, randn, ranks_text
from tpcourse.measure import wire_bytes

GRADIENTS = {"up": "d_up", "up_bias": "d_up_bias", "down": "d_down", "down_bias": "d_down_bias"}
DIM = {"up": 0, "up_bias": 0, "down": 1}  # along which each is split; down_bias is whole on every rank
SAYS = linear.SAYS | {  # what a wrong value usually means; {n} ranks
    "part": "that is only this rank's part of Y: the ranks' parts are terms of one sum",
    "many biases": "down_bias was added {n} times, by every rank before the sum: add it once, after the sum",
    "no down": "down_bias is missing",
    "no up": "up_bias is missing",
    "no gelu": "the GELU between the two products is missing",
    "tanh": "that is the tanh approximation of the GELU; the task is torch's gelu as it comes",
    "late": "the hidden values were summed over the ranks: they are different columns and stay there",
    "part of dX": (
        "that is only this rank's part of dX: the whole X went into every rank's columns. Before the first "
        "product belongs f: nothing forward, an all-reduce backward"
    ),
    "times": (
        "{name} is {n} times too large: all ranks go on with the same Y, so each has the whole dY already, "
        "and backward through the sum at the end (g) adds nothing up"
    ),
    "mean": "{name} is divided by {n}: nothing is averaged over ranks here",
    "alike": "{name} is the same on all {n} ranks: draw the whole layer's numbers, and keep this rank's own",
    "other way": "{name} is split along the wrong dimension: up by torch's rows, down by its columns",
    "cut bias": "down_bias was split: Y has all its columns on every rank, so each holds the whole bias",
    "contiguous": (
        "those are rows {first} and on of the fused weight as it lies there: with them a rank would multiply "
        "a gate by a gate. Cut gate and up each by itself"
    ),
    "up first": "up lies before gate: in the whole weight the gate's rows come first, and so in each part",
    "one of two": "that is only one of the two: every rank needs its rows of gate and its rows of up",
    "same rows": "every rank returned rank 0's rows",
    "dealt": "the rows were dealt out one by one; a rank's rows of gate lie together, and those of up",
}


def says(mistake: str, n: int, name: str = "", first: str = "") -> str:
    return SAYS[mistake].format(n=n, name=name, first=first)


class _Problem:
    """One MLP in float64 on odd sizes, whole; ``w`` by the names of GRADIENTS, as torch keeps them."""

    def __init__(self, n: int, rng: torch.Generator) -> None:
        self.n, self.tokens, self.dim, self.hidden = n, odd(rng, 5, 7), odd(rng, 9, 13), 3 * n
        self.x, self.dy = (randn(rng, self.tokens, self.dim) for _ in range(2))
        shapes = [(self.hidden, self.dim), (self.hidden,), (self.dim, self.hidden), (self.dim,)]
        self.w = {name: randn(rng, *shape) for name, shape in zip(GRADIENTS, shapes)}
        self.y, self.gradients = run(self.x, self.w, self.dy)
        shards = [{k: part(k, t, r, n) for k, t in self.w.items()} for r in range(n)]
        self.alone = [run(self.x, shard, self.dy) for shard in shards]  # what a rank gets without any message

    def sends(self) -> dict[str, float]:
        each = wire_bytes("all_reduce", self.x.nbytes, self.n)
        return {"forward": each, "backward": each}


def run(x: Tensor, w: dict[str, Tensor], dy: Tensor, act=F.gelu) -> tuple[Tensor, dict[str, Tensor]]:
    """Y of the MLP, and every gradient by its name."""
    x, w = x.clone().requires_grad_(), {name: t.clone().requires_grad_() for name, t in w.items()}
    y = act(x @ w["up"].T + w["up_bias"]) @ w["down"].T + w["down_bias"]
    y.backward(dy)
    return y.detach(), {"dX": x.grad} | {GRADIENTS[name]: t.grad for name, t in w.items()}


def part(name: str, whole: Tensor, r: int, n: int) -> Tensor:
    """Rank r's part of a parameter or its gradient."""
    return whole.chunk(n, DIM[name])[r].contiguous() if name in DIM else whole


def module(n: int, rng: torch.Generator) -> list[Case]:
    """``ParallelMLP(dim, hidden, group)``."""
    p, seed = _Problem(n, rng), int(torch.randint(1 << 30, (), generator=rng))
    whole, small = _start(seed, p.dim, p.hidden), _start(seed, p.dim, p.hidden // n)
    start = [{f"{k} at the start": part(k, t, r, n) for k, t in whole.items()} for r in range(n)]
    right = [{"dX": p.gradients["dX"]} | {g: part(k, p.gradients[g], r, n) for k, g in GRADIENTS.items()}
             for r in range(n)]
    mistakes = {f"{k} at the start": _start_mistakes(n, k, whole[k], small[k]) for k in whole}
    mistakes |= {"Y": _y_mistakes(p), **_gradient_mistakes(p, right)}
    expected = [{**start[r], "Y": p.y, **right[r]} for r in range(n)]
    inputs = [[p.x, p.dy, *(part(k, t, r, n) for k, t in p.w.items())] for r in range(n)]
    title = f"{ranks_text(n)}, X [{p.tokens}, {p.dim}], {p.hidden} hidden"
    settings = {"sizes": [p.dim, p.hidden], "seed": seed, "options": {}, "gradients": GRADIENTS}
    stays = "Each rank keeps its own columns of A and rows of B; what moves is as large as X or Y"
    weights = [t for k in ("up", "down") for t in (p.w[k], part(k, p.w[k], 0, n))]
    traffic, sent = linear.limited(n, p.sends(), _why, weights, stays), bytes_text(p.sends()["forward"])
    praise = f"forward and backward sent {sent} per rank each: one all-reduce of Y, one of dX"
    holds = sum(t.numel() * 8 for t in start[0].values())
    cases = [Case(title, n, "module", settings, inputs, expected, mistakes, traffic, praise, holds)]
    if n > 1:
        title, nothing = f"{n} ranks, hidden={p.hidden + 1}, which does not divide by {n}", [{}] * n
        settings, given = settings | {"sizes": [p.dim, p.hidden + 1]}, [[p.x, p.dy]] * n
        said = {"refuses": "ValueError", "says": (p.hidden + 1, n)}
        cases.append(Case(title, n, "module", settings, given, nothing, **said))
    return cases


def shard_gate_up(n: int, rng: torch.Generator) -> list[Case]:
    """``shard_gate_up(weight, group)``, weight [2 hidden, in], the gate's rows above those of up."""
    own, k = odd(rng, 3, 7), odd(rng, 3, 9)
    weight = randn(rng, 2 * n * own, k)
    gates, ups = (half.chunk(n) for half in weight.chunk(2))
    right = [torch.cat(pair) for pair in zip(gates, ups)]
    expected = [{"result": t, "weight after the call": weight} for t in right]
    wrong = [
        (says("contiguous", n, first=f"{2 * own}r"), list(weight.chunk(n))),
        (says("up first", n), [torch.cat(pair) for pair in zip(ups, gates)]),
        (says("one of two", n), list(gates)),
        (says("one of two", n), list(ups)),
        (says("same rows", n), [right[0]] * n),
        (says("dealt", n), [weight[r::n] for r in range(n)]),
        (says("dealt", n), [torch.stack(pair, 1).flatten(0, 1) for pair in zip(gates, ups)]),
        (says("whole shard", n, "weight"), [weight] * n),
    ]
    mistakes = {"result": wrong, "weight after the call": [(SAYS["changed"], [])]}
    settings = {"names": ["weight"], "group": True, "options": {}}
    traffic = linear.limited(n, {"forward": 0}, lambda *_: "every rank has the whole weight already", [], "")
    title, praise = f"{ranks_text(n)}, gate and up of {n * own} rows each", "nothing was sent"
    cases = [Case(title, n, "function", settings, [[weight]] * n, expected, mistakes, traffic, praise)]
    if n > 1:
        hidden, said = n * own + 1, {"refuses": "ValueError", "says": (n * own + 1, n)}
        title = f"{n} ranks, hidden={hidden}, which does not divide by {n} (weight has {2 * hidden} rows)"
        inputs = [[randn(rng, 2 * hidden, k)]] * n
        cases.append(Case(title, n, "function", settings, inputs, [{}] * n, **said))
    return cases


def _start(seed: int, dim: int, hidden: int) -> dict[str, Tensor]:
    """What two dense layers start from, drawn one after the other."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(dim, hidden, dtype=torch.float64), nn.Linear(hidden, dim, dtype=torch.float64)
    return dict(zip(GRADIENTS, [p.detach() for layer in layers for p in layer.parameters()]))


def _start_mistakes(n: int, name: str, whole: Tensor, small: Tensor) -> list[Mistake]:
    if name not in DIM:
        return [(says("cut bias", n), list(whole.tensor_split(n)))]
    return [
        (says("alike", n, name), [small] * n),
        (says("alike", n, name), [part(name, whole, 0, n)] * n),
        (says("whole shard", n, name), [whole] * n),
        (says("other way", n, name), list(whole.tensor_split(n, whole.dim() - 1 - DIM[name]))),
    ]


def _y_mistakes(p: _Problem) -> list[Mistake]:
    n, bias = p.n, p.w["down_bias"]
    own = [part("up", p.w["up"], r, n) for r in range(n)]
    late = F.gelu(sum(p.x @ w.T for w in own) + sum(part("up_bias", p.w["up_bias"], r, n) for r in range(n)))
    others = {
        "no gelu": run(p.x, p.w, p.dy, lambda h: h)[0],
        "tanh": run(p.x, p.w, p.dy, lambda h: F.gelu(h, approximate="tanh"))[0],
        "no up": run(p.x, p.w | {"up_bias": torch.zeros(p.hidden, dtype=bias.dtype)}, p.dy)[0],
        "no down": p.y - bias,
        "many biases": p.y + (n - 1) * bias,
        "late": sum(late @ part("down", p.w["down"], r, n).T for r in range(n)) + bias,
    }
    parts = [y for y, _ in p.alone]
    wrong = [(says("part", n), parts), (says("part", n), [y - bias for y in parts])]
    return wrong + [(says(mistake, n), [y] * n) for mistake, y in others.items()]


def _gradient_mistakes(p: _Problem, right: list[dict[str, Tensor]]) -> dict[str, list[Mistake]]:
    n, times = p.n, SAYS["times"]
    parts = [gradients["dX"] for _, gradients in p.alone]
    wrong = {"dX": [(says("part of dX", n), parts), (says("part of dX", n), [t * n for t in parts])]}
    for name in ("dX", *GRADIENTS.values()):
        own = [gradients[name] for gradients in right]
        known = linear.own_mistakes(name, own, times)
        alike = name in ("dX", "d_down_bias")  # the same on every rank: there a sum over them is n times it
        wrong.setdefault(name, []).extend(known[1:] if alike else known)
    return wrong


def _why(phase: str, limit: float) -> str:
    what = "the parts of Y" if phase == "forward" else "the parts of dX"
    return f"one all-reduce of {what}, {bytes_text(limit)}, is all that {phase} needs"
