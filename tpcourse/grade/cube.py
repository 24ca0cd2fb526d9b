"""The tasks of lesson 10: Y = X W^T on a mesh i x j x l, the norm over a split hidden, which mesh to take."""

from collections.abc import Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from tpcourse.grade import linear
from tpcourse.grade.case import Case, Mistake, Traffic, bytes_text, odd, randn, ranks_text
from tpcourse.grade.hub import Message
from tpcourse.measure import wire_bytes

Blocks = list[Tensor]  # one for each rank, l varying fastest
AXES = "ijl"
MESHES = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    4: [(1, 2, 2), (2, 1, 2), (2, 2, 1)],
    6: [(1, 2, 3), (2, 3, 1), (3, 1, 2)],
    8: [(2, 2, 2)],
}

SAYS = {  # what a wrong value usually means
    "term": "that is this rank's own term: the ranks along {axis} have others; reduce-scatter adds them",
    "first": "that is the first rank's piece of the sum along {axis} on every rank: each keeps its own",
    "swapped": "j and l are swapped: X is gathered along j, and the terms of Y are added up along l",
    "swapped ij": "i and j are swapped: X is gathered along j and W along i",
    "mean": "{name} is divided by {n}: the terms along {axis} are added, not averaged",
    "times": "{name} is {n} times too large: it was summed once too often",
    "no sum dW": (
        "that is the part of this rank's tokens: the ranks along i have other tokens, and a reduce-scatter"
        " adds their parts up"
    ),
    "own": "those are the statistics of this rank's features alone: mean and variance are over all of them",
    "between": (
        "that is the mean of the ranks' variances: their means differ too, and the variance of the means must"
        " be added"
    ),
    "unbiased": "the variance was divided by one feature less than there are; LayerNorm divides by all",
    "uncentred": "nothing was subtracted: LayerNorm subtracts the mean first",
    "cancels": (
        "where the mean is a million, E[x^2] - E[x]^2 subtracts two numbers near 1e12 and keeps nothing of a"
        " variance of 1; subtract the mean first"
    ),
    "identity": (
        "each rank has the gradient of its own outputs only: every rank uses the statistics for features of"
        " its own, so backward must sum over the ranks, too"
    ),
    "constant": "mean and variance were taken for constants: they depend on x as well",
    "memory": "that mesh sends least, but keeps {kept:,} numbers, and {memory:,} are allowed",
    "indivisible": "that mesh sends least, but does not divide the sizes: n by i j and i l, k by l, m by i j",
    "keeps": "that mesh keeps least; asked for is the one that sends least among those that fit",
    "column": "that is 1 x P x 1, which gathers all of X; another mesh that fits sends less",
    "no weight": "the weight is missing in what is sent: along i it is gathered, and its gradient scattered",
}


class _Mesh:
    """Collectives on lists of blocks, as the ranks of a mesh would make them."""

    def __init__(self, sizes: tuple[int, int, int]) -> None:
        self.sizes = dict(zip(AXES, sizes))
        self.n = sizes[0] * sizes[1] * sizes[2]
        self.places = [dict(zip(AXES, place)) for place in product(*map(range, sizes))]

    def mates(self, rank: int, axis: str) -> list[int]:
        own = self.places[rank]
        return [
            r for r, place in enumerate(self.places) if all(place[a] == own[a] for a in AXES if a != axis)
        ]

    def gather(self, blocks: Blocks, axis: str) -> Blocks:
        return [torch.cat([blocks[mate] for mate in self.mates(r, axis)]) for r in range(self.n)]

    def piece(self, blocks: Blocks, axis: str) -> Blocks:
        """Each rank's piece of its own block."""
        return [block.chunk(self.sizes[axis])[place[axis]] for block, place in zip(blocks, self.places)]

    def sum(self, blocks: Blocks, axis: str) -> Blocks:
        return [sum(blocks[mate] for mate in self.mates(r, axis)) for r in range(self.n)]

    def cut(self, t: Tensor, rows: str, columns: str) -> Blocks:
        """Each rank's cell of the whole t, cut over these axes, the first outermost."""
        cells = []
        for place in self.places:
            cell = t
            for dim, axes in enumerate((rows, columns)):
                for axis in axes:
                    cell = cell.chunk(self.sizes[axis], dim)[place[axis]]
            cells.append(cell.contiguous())
        return cells


class _Problem(_Mesh):
    """Odd sizes for each rank that splits them; x, w, dy and the results as whole tensors and as cells."""

    def __init__(self, sizes: tuple[int, int, int], rng: torch.Generator) -> None:
        super().__init__(sizes)
        i, j, l = sizes
        self.tokens, self.k, self.m = odd(rng, 3, 3) * self.n, odd(rng, 3, 5) * l, odd(rng, 3, 3) * i * j
        n, k, m = self.tokens, self.k, self.m
        x, w, dy = (randn(rng, *shape) for shape in ((n, k), (m, k), (n, m)))
        self.x, self.w, self.dy = self.cut(x, "ij", "l"), self.cut(w, "ji", "l"), self.cut(dy, "il", "j")
        self.y, self.dx = self.cut(x @ w.T, "il", "j"), self.cut(dy @ w, "ij", "l")
        self.dw = self.cut(dy.T @ x, "ji", "l")
        self.whole_x, self.whole_w, self.whole_dy = (
            self.gather(*pair) for pair in ((self.x, "j"), (self.w, "i"), (self.dy, "l"))
        )

    def title(self) -> str:
        mesh = " x ".join(map(str, self.sizes.values()))
        return f"{mesh} ranks, X [{self.tokens}, {self.k}], W [{self.m}, {self.k}]"

    def sends(self) -> dict[str, float]:
        """Wire bytes of a rank in each phase; an all-gather and a reduce-scatter of a block send the same."""
        x, w, y = (
            wire_bytes("all_gather", t[0].nbytes, self.sizes[axis])
            for t, axis in ((self.whole_x, "j"), (self.whole_w, "i"), (self.whole_dy, "l"))
        )
        return {"forward": x + w + y, "backward": y + 2 * x + 2 * w}

    def forward_mistakes(self) -> list[Mistake]:
        terms = [x @ w.T for x, w in zip(self.whole_x, self.whole_w)]
        total = self.sum(terms, "l")
        count = self.sizes["l"]
        found = [
            (_says("term", axis="l"), self.piece(terms, "l")),
            (_says("first", axis="l"), [t.chunk(count)[0] for t in total]),
            (_says("mean", name="Y", n=count, axis="l"), [t / count for t in self.y]),
            (_says("times", name="Y", n=count), [t * count for t in self.y]),
        ]
        turned = [x @ w.T for x, w in zip(self.gather(self.x, "i"), self.gather(self.w, "j"))]
        found.append((SAYS["swapped ij"], self.piece(self.sum(turned, "l"), "l")))
        if self.sizes["j"] == count:
            crossed = [x @ w.T for x, w in zip(self.gather(self.x, "l"), self.whole_w)]
            found.append((SAYS["swapped"], self.piece(self.sum(crossed, "j"), "j")))
        return found

    def backward_mistakes(self) -> dict[str, list[Mistake]]:
        dx = [dy @ w for dy, w in zip(self.whole_dy, self.whole_w)]
        dw = [dy.T @ x for dy, x in zip(self.whole_dy, self.whole_x)]
        found = {"dx": [(_says("term", axis="j"), self.piece(dx, "j"))]}
        found["dweight"] = [(SAYS["no sum dW"], self.piece(dw, "i"))]
        for name, axis, right in (("dx", "j", self.dx), ("dweight", "i", self.dw)):
            n = self.sizes[axis]
            found[name] += [
                (_says("mean", name=name, n=n, axis=axis), [t / n for t in right]),
                (_says("times", name=name, n=n), [t * n for t in right]),
            ]
        return found

    def traffic(self) -> Traffic:
        """Messages along one axis of the mesh only, and no more bytes than `sends` says."""
        lines = {frozenset(self.mates(r, axis)) for r in range(self.n) for axis in AXES}
        allowed = self.sends()

        def judge(messages: list[Message]) -> str | None:
            for m in messages:
                if frozenset(m.group) not in lines:
                    return (
                        f"rank {m.rank} called {m.op} of {list(m.shape)} (line {m.where[1]}) among ranks"
                        f" {list(m.group)}, which lie along no one of i, j and l"
                    )
            for r, (phase, limit) in product(range(self.n), allowed.items()):
                sent = [m for m in messages if m.rank == r and m.phase == phase]
                if sum(m.wire for m in sent) > limit + 1e-6:
                    listed = ", ".join(f"{m.op} of {list(m.shape)} (line {m.where[1]})" for m in sent[:6])
                    return (
                        f"rank {r} sent {bytes_text(sum(m.wire for m in sent))} in {phase}: {listed};"
                        f" {bytes_text(limit)} are enough"
                    )
            return None

        return judge


def _says(mistake: str, **words: object) -> str:
    return SAYS[mistake].format(**words)


def _problems(n: int, rng: torch.Generator) -> list[_Problem]:
    if n not in MESHES:
        raise ValueError(f"there is no mesh of three dimensions for {n} ranks here; take {list(MESHES)}")
    return [_Problem(sizes, rng) for sizes in MESHES[n]]


def _case(
    p: _Problem,
    do: str,
    settings: dict,
    inputs: list[Blocks],
    expected: list[dict],
    mistakes: dict,
    praise: str,
    keeps: int | None = None,
) -> Case:
    """A case on p's mesh whose inputs must be afterwards what they were."""
    names = ["x", "weight"]
    kept = [{f"{name} after the call": t for name, t in zip(names, given)} for given in inputs]
    mistakes |= {name: [(linear.SAYS["changed"], [])] for name in kept[0]}
    expected = [{**right, **same} for right, same in zip(expected, kept)]
    settings = {"names": names, "mesh": p.sizes, **settings}
    return Case(p.title(), p.n, do, settings, inputs, expected, mistakes, p.traffic(), praise, keeps=keeps)


def forward(n: int, rng: torch.Generator) -> list[Case]:
    """``cube_forward(x, weight, i, j, l)``."""
    cases = []
    for p in _problems(n, rng):
        inputs = [[x, w] for x, w in zip(p.x, p.w)]
        praise = f"each rank sent {bytes_text(p.sends()['forward'])}: no more than a block along each axis"
        expected, settings = [{"Y": y} for y in p.y], {"group": True, "options": {}, "called": "Y"}
        mistakes = {"Y": p.forward_mistakes()}
        cases.append(_case(p, "function", settings, inputs, expected, mistakes, praise))
    return cases


def autograd(n: int, rng: torch.Generator) -> list[Case]:
    """``CubeFunction.apply(x, weight, i, j, l)`` and its backward, which gathers again."""
    cases = []
    for p in _problems(n, rng):
        inputs = [[x, w, dy] for x, w, dy in zip(p.x, p.w, p.dy)]
        expected = [{"Y": y, "dx": dx, "dweight": dw} for y, dx, dw in zip(p.y, p.dx, p.dw)]
        sends = [bytes_text(p.sends()[phase]) for phase in ("forward", "backward")]
        praise = (
            f"each rank sent {sends[0]} forward, at most {sends[1]} backward, and kept its own cells only"
        )
        settings = {"wanted": ["x", "weight"], "more": []}
        mistakes = {"Y": p.forward_mistakes(), **p.backward_mistakes()}
        cases.append(_case(p, "differentiable", settings, inputs, expected, mistakes, praise, keeps=0))
    return cases


def norm(n: int, rng: torch.Generator) -> list[Case]:
    """``split_layer_norm(x, group)``: eps = 1e-5, no parameters; tokens whose mean is a million."""
    tokens, own = odd(rng, 3, 7), odd(rng, 5, 7)
    whole = (1e6 + randn(rng, tokens, n * own) + 3 * randn(rng, 1, n * own)).requires_grad_()
    dy = randn(rng, tokens, n * own)
    y = F.layer_norm(whole, (n * own,))
    y.backward(dy)
    xs, dys = whole.detach().chunk(n, 1), dy.chunk(n, 1)
    expected = [
        {"Y": a, "dx": b, "x after the call": x.contiguous()}
        for a, b, x in zip(y.detach().chunk(n, 1), whole.grad.chunk(n, 1), xs)
    ]
    mistakes = {
        "Y": _norm_mistakes(xs),
        "dx": _norm_gradients(xs, dys),
        "x after the call": [(linear.SAYS["changed"], [])],
    }
    limit = wire_bytes("all_gather", n * 2 * tokens * 8, n)
    title = f"{ranks_text(n)}, X [{tokens}, {n * own}], mean 1e6"
    settings = {"names": ["x"], "wanted": "x", "more": []}
    inputs = [[x.contiguous(), d.contiguous()] for x, d in zip(xs, dys)]
    praise = f"forward and backward sent at most {bytes_text(limit)} per rank each: two numbers a token"
    return [
        Case(
            title, n, "differentiable", settings, inputs, expected, mistakes, _norm_traffic(n, limit), praise,
            absolute=1e-6,
        )
    ]


def _norm_traffic(n: int, limit: float) -> Traffic:
    """Two numbers a token, gathered by all, and no more, forward and backward."""

    def judge(messages: list[Message]) -> str | None:
        for r, phase in product(range(n), ("forward", "backward")):
            sent = sum(m.wire for m in messages if m.rank == r and m.phase == phase)
            if sent > limit + 1e-6:
                return (
                    f"rank {r} sent {bytes_text(sent)} in {phase}; two numbers a token, gathered by all, are"
                    f" {bytes_text(limit)}: features stay where they are"
                )
        return None

    return judge


def _norm_mistakes(xs: tuple[Tensor, ...]) -> list[Mistake]:
    whole, n = torch.cat(xs, 1), len(xs)
    mean, variance = whole.mean(1, keepdim=True), whole.var(1, correction=0, keepdim=True)
    within = sum(x.var(1, correction=0, keepdim=True) for x in xs) / n
    size = whole.size(1)

    def scaled(var: Tensor, mean: Tensor = mean) -> Blocks:
        return [(x - mean) / (var + 1e-5).sqrt() for x in xs]

    return [
        (SAYS["own"], [F.layer_norm(x, x.shape[1:]) for x in xs]),
        (SAYS["between"], scaled(within)),
        (SAYS["unbiased"], scaled(variance * size / (size - 1))),
        (SAYS["uncentred"], scaled(variance + mean.square(), torch.zeros_like(mean))),
        (SAYS["uncentred"], scaled(variance, torch.zeros_like(mean))),
        (SAYS["cancels"], []),
    ]


def _norm_gradients(xs: tuple[Tensor, ...], dys: tuple[Tensor, ...]) -> list[Mistake]:
    """What comes of the identity in the place of backward's all-reduce, and of statistics as constants."""
    whole, size = torch.cat(xs, 1), sum(x.size(1) for x in xs)
    scale = (whole.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()

    def alone(x: Tensor, dy: Tensor) -> Tensor:
        own = x.clone().requires_grad_()
        rest = whole.sum(1, keepdim=True) - x.sum(1, keepdim=True)
        centred = own - (own.sum(1, keepdim=True) + rest) / size
        others = (whole - whole.mean(1, keepdim=True)).square().sum(1, keepdim=True)
        others = others - centred.detach().square().sum(1, keepdim=True)
        y = centred / ((centred.square().sum(1, keepdim=True) + others) / size + 1e-5).sqrt()
        y.backward(dy)
        return own.grad

    return [
        (SAYS["identity"], [alone(x, dy) for x, dy in zip(xs, dys)]),
        (SAYS["constant"], [dy * scale for dy in dys]),
        (SAYS["identity"], []),
    ]


def choose(n: int, rng: torch.Generator) -> list[Case]:
    """``choose_mesh(n, k, m, ranks, memory)``: [i, j, l], by arithmetic alone."""
    return [_choice(n, rng, binding) for binding in ("memory", "divisibility", "nothing")]


def _choice(n: int, rng: torch.Generator, binding: str) -> Case:
    """Drawn until one mesh is best, and what ``binding`` says changes the answer."""
    while True:
        ranks = (8, 16, 32, 64)[int(torch.randint(4, (), generator=rng))]
        shape = [odd(rng, 3, 15) * 2 ** int(torch.randint(3, 10, (), generator=rng)) for _ in range(3)]
        every = list(_meshes(ranks))
        even = [mesh for mesh in every if _fits(mesh, *shape)]
        if not even:
            continue
        memory = max(_kept(mesh, *shape) for mesh in every)
        if binding == "memory":
            memory = _kept(even[int(torch.randint(len(even), (), generator=rng))], *shape)
        fitting = [mesh for mesh in even if _kept(mesh, *shape) <= memory]
        best = min(fitting, key=lambda mesh: _sent(mesh, *shape))
        unique = sum(_sent(mesh, *shape) == _sent(best, *shape) for mesh in fitting) == 1
        least = {"memory": even, "divisibility": every, "nothing": even}[binding]
        same = min(least, key=lambda mesh: _sent(mesh, *shape)) == best
        if unique and len(fitting) > 1 and same == (binding == "nothing"):
            return _choice_case(n, shape, ranks, memory, best, every, even, fitting)


def _choice_case(
    n: int, shape: list[int], ranks: int, memory: int, best: tuple, every: list, even: list, fitting: list
) -> Case:
    def answer(meshes: list) -> Blocks:
        return [torch.tensor(min(meshes, key=lambda mesh: _sent(mesh, *shape))).double()] * n

    greedy = min(even, key=lambda mesh: _sent(mesh, *shape))
    weightless = min(
        fitting, key=lambda mesh: _sent(mesh, *shape) - 2 * (mesh[0] - 1) * shape[1] * shape[2]
    )
    frugal = torch.tensor(min(even, key=lambda mesh: _kept(mesh, *shape))).double()
    wrong = [
        (_says("memory", kept=_kept(greedy, *shape), memory=memory), answer(even)),
        (SAYS["indivisible"], answer(every)),
        (SAYS["indivisible"], answer([mesh for mesh in every if _kept(mesh, *shape) <= memory])),
        (SAYS["no weight"], [torch.tensor(weightless).double()] * n),
        (SAYS["keeps"], [frugal] * n),
        (SAYS["column"], [torch.tensor((1, ranks, 1)).double()] * n),
    ]
    options = dict(zip("nkm", shape)) | {"ranks": ranks, "memory": memory}
    title = (
        f"{ranks} ranks, n = {shape[0]:,}, k = {shape[1]:,}, m = {shape[2]:,}, at most {memory:,} numbers"
    )
    settings = {"names": [], "group": False, "options": options}
    praise = f"{' x '.join(map(str, best))} sends {_sent(best, *shape) // ranks:,} numbers a rank"
    right = torch.tensor(best).double()
    mistakes = {"result": [pair for pair in wrong if not torch.equal(pair[1][0], right)]}
    return Case(
        title,
        n,
        "function",
        settings,
        [[]] * n,
        [{"result": torch.tensor(best)}] * n,
        mistakes,
        praise=praise,
    )


def _meshes(ranks: int) -> Iterator[tuple[int, int, int]]:
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    return (mesh for mesh in product(sizes, repeat=3) if mesh[0] * mesh[1] * mesh[2] == ranks)


def _fits(mesh: tuple[int, int, int], n: int, k: int, m: int) -> bool:
    i, j, l = mesh
    return n % (i * j) == n % (i * l) == k % l == m % (i * j) == 0


def _sent(mesh: tuple[int, int, int], n: int, k: int, m: int) -> int:
    """Numbers that one rank sends forward and backward, with kept copies, times the ranks: an integer."""
    i, j, l = mesh
    return 2 * ((j - 1) * n * k + (i - 1) * k * m + (l - 1) * n * m)


def _kept(mesh: tuple[int, int, int], n: int, k: int, m: int) -> int:
    """Numbers of the gathered blocks of X and W, rounded up."""
    i, j, l = mesh
    return -(-n * k // (i * l)) - (-k * m // (j * l))
