"""The tasks of lesson 09: Y = XA where all three lie in blocks on a grid of q x q ranks."""

from collections.abc import Callable
from math import isqrt

import torch
from torch import Tensor

from tpcourse.grade import linear
from tpcourse.grade.case import Case, Mistake, Traffic, bytes_text, odd, randn
from tpcourse.grade.hub import Message

Blocks = list[Tensor]  # one for each rank of the grid, row by row

SAYS = {  # what a wrong value usually means
    "own": "that is the product of this rank's own blocks: Y_ij is the sum over t of X_it A_tj",
    "one step": "that is one step's product alone: the q steps add up",
    "reverse": (
        "the panels do not match: when X comes from column t of the grid, A must come from row t. Every rank"
        " goes through t in the same order"
    ),
    "crossed": (
        "X went along the grid's columns and A along its rows: X_it is wanted by the ranks of row i, A_tj by"
        " those of column j"
    ),
    "in place": (
        "a rank's own block was overwritten by the first broadcast, and passed on as its own in a later step:"
        " receive into a new tensor"
    ),
    "mean": "{name} is divided by {n}: the steps and the ranks' terms are added, not averaged",
    "times": "{name} is {n} times too large: a sum was made once too often",
    "transposed": "{name} is transposed: it has the shape of {of}",
    "no reduce dX": (
        "that is one rank's term: dX_it is the sum over the ranks of row i of dY_ij A_tj transposed, and rank"
        " (i, t) collects it"
    ),
    "no reduce dA": (
        "that is one rank's term: dA_tj is the sum over the ranks of column j of X_it transposed dY_ij, and"
        " rank (t, j) collects it"
    ),
    "own dX": "that is dY_ij times this rank's own A_ij transposed: A_tj comes from row t, step by step",
    "own dA": "that is this rank's own X_ij transposed times dY_ij: X_it comes from column t, step by step",
    "root": (
        "the sum of step t ended on another rank than the one whose block it is: the root of step t is rank t"
        " of the group along which you add"
    ),
}


class _Problem:
    """Blocks of odd sizes, all different, on a grid of n = q x q ranks."""

    def __init__(self, n: int, rng: torch.Generator) -> None:
        self.n, self.q = n, isqrt(n)
        if self.q**2 != n:
            raise ValueError(f"{n} ranks make no square grid; take 1, 4 or 9")
        self.sizes = odd(rng, 5, 7), odd(rng, 9, 11), odd(rng, 3, 3)  # of a block: tokens, inputs, outputs
        tokens, k, m = (size * self.q for size in self.sizes)
        self.x, self.a, self.dy = randn(rng, tokens, k), randn(rng, k, m), randn(rng, tokens, m)
        self.xs, self.as_, self.dys = (self.cut(t) for t in (self.x, self.a, self.dy))
        self.ys, self.dxs = self.cut(self.x @ self.a), self.cut(self.dy @ self.a.T)
        self.das = self.cut(self.x.T @ self.dy)

    def cut(self, t: Tensor) -> Blocks:
        """The block of each rank."""
        return [block.contiguous() for row in t.chunk(self.q) for block in row.chunk(self.q, 1)]

    def at(self, blocks: Blocks, i: int, j: int) -> Tensor:
        return blocks[i * self.q + j]

    def each(self, entry: Callable[[int, int], Tensor]) -> Blocks:
        """``entry(i, j)`` of every rank."""
        return [entry(i, j) for i in range(self.q) for j in range(self.q)]

    def title(self) -> str:
        t, k, m = (size * self.q for size in self.sizes)
        return f"{self.q} x {self.q} ranks, X [{t}, {k}], A [{k}, {m}]"

    def sends(self) -> float:
        """Wire bytes of one product: a rank is the last of one broadcast in q, and the root of one sum."""
        return (self.q - 1) * (self.xs[0].nbytes + self.as_[0].nbytes)


def forward(n: int, rng: torch.Generator) -> list[Case]:
    """``summa_forward(x, a, rows, columns)``."""
    p = _Problem(n, rng)
    inputs = [[x, a] for x, a in zip(p.xs, p.as_)]
    kept = [{"x after the call": x, "a after the call": a} for x, a in inputs]
    expected = [{"result": y, **same} for y, same in zip(p.ys, kept)]
    mistakes = {"result": _forward_mistakes(p), **_unchanged(kept)}
    settings = {"names": ["x", "a"], "group": True, "options": {}, "mesh": _mesh(p)}
    traffic = _traffic(p, {"forward": 1})
    praise = f"each rank sent {bytes_text(p.sends())}, along its row and its column"
    return [Case(p.title(), n, "function", settings, inputs, expected, mistakes, traffic, praise)]


def autograd(n: int, rng: torch.Generator) -> list[Case]:
    """``SummaFunction.apply(x, a, rows, columns)`` and its backward."""
    p = _Problem(n, rng)
    inputs = [[x, a, dy] for x, a, dy in zip(p.xs, p.as_, p.dys)]
    kept = [{"x after the call": x, "a after the call": a} for x, a, _ in inputs]
    expected = [{"Y": y, "dx": dx, "da": da, **same} for y, dx, da, same in zip(p.ys, p.dxs, p.das, kept)]
    mistakes = {"Y": _forward_mistakes(p), "dx": _dx_mistakes(p), "da": _da_mistakes(p), **_unchanged(kept)}
    settings = {"names": ["x", "a"], "wanted": ["x", "a"], "more": [], "mesh": _mesh(p)}
    traffic = _traffic(p, {"forward": 1, "backward": 2})
    praise = f"each rank sent {bytes_text(p.sends())} forward and twice as much backward"
    return [
        Case(p.title(), n, "differentiable", settings, inputs, expected, mistakes, traffic, praise, keeps=0)
    ]


def _mesh(p: _Problem) -> dict[str, int]:
    return {"rows": p.q, "columns": p.q}


def _unchanged(kept: list[dict]) -> dict[str, list[Mistake]]:
    return {name: [(linear.SAYS["changed"], [])] for name in kept[0]}


def _forward_mistakes(p: _Problem) -> list[Mistake]:
    q, steps = p.q, range(p.q)
    terms = [p.each(lambda i, j, t=t: p.at(p.xs, i, t) @ p.at(p.as_, t, j)) for t in steps]
    return [
        (SAYS["own"], [x @ a for x, a in zip(p.xs, p.as_)]),
        *((SAYS["one step"], parts) for parts in (terms[-1], terms[0])),
        (
            SAYS["reverse"],
            p.each(lambda i, j: sum(p.at(p.xs, i, t) @ p.at(p.as_, q - 1 - t, j) for t in steps)),
        ),
        (SAYS["crossed"], p.each(lambda i, j: sum(p.at(p.xs, t, j) @ p.at(p.as_, i, t) for t in steps))),
        (SAYS["in place"], p.each(lambda i, j: q * p.at(p.xs, i, 0) @ p.at(p.as_, 0, j))),
        (SAYS["in place"], p.each(lambda i, j: sum(p.at(p.xs, i, 0) @ p.at(p.as_, t, j) for t in steps))),
        *_scaled(p, "Y", p.ys),
    ]


def _dx_mistakes(p: _Problem) -> list[Mistake]:
    q, steps = p.q, range(p.q)

    def term(i: int, j: int, t: int) -> Tensor:
        return p.at(p.dys, i, j) @ p.at(p.as_, t, j).T

    return [
        (SAYS["no reduce dX"], p.each(lambda i, j: term(i, j, j))),
        (SAYS["own dX"], p.each(lambda i, j: term(i, j, i))),
        (SAYS["own dX"], p.each(lambda i, j: sum(term(i, c, i) for c in steps))),
        (SAYS["root"], p.each(lambda i, j: p.at(p.dxs, i, q - 1 - j))),
        (SAYS["root"], p.each(lambda i, j: p.at(p.dxs, i, 0))),
        (SAYS["transposed"].format(name="dX", of="the transpose of X's block"), [t.T for t in p.dxs]),
        *_scaled(p, "dX", p.dxs),
    ]


def _da_mistakes(p: _Problem) -> list[Mistake]:
    q, steps = p.q, range(p.q)

    def term(i: int, j: int, t: int) -> Tensor:
        return p.at(p.xs, i, t).T @ p.at(p.dys, i, j)

    return [
        (SAYS["no reduce dA"], p.each(lambda i, j: term(i, j, i))),
        (SAYS["own dA"], p.each(lambda i, j: term(i, j, j))),
        (SAYS["own dA"], p.each(lambda i, j: sum(term(r, j, j) for r in steps))),
        (SAYS["root"], p.each(lambda i, j: p.at(p.das, q - 1 - i, j))),
        (SAYS["root"], p.each(lambda i, j: p.at(p.das, 0, j))),
        (
            SAYS["transposed"].format(name="dA", of="nn.Linear's weight, but A lies as it is here"),
            [t.T for t in p.das],
        ),
        *_scaled(p, "dA", p.das),
    ]


def _scaled(p: _Problem, name: str, right: Blocks) -> list[Mistake]:
    q = p.q
    return [
        (SAYS["mean"].format(name=name, n=q), [t / q for t in right]),
        (SAYS["times"].format(name=name, n=q), [t * q for t in right]),
    ]


def _traffic(p: _Problem, products: dict[str, int]) -> Traffic:
    """Blocks of X and A, or of their gradients, by broadcast or reduce along a row or a column of the grid,
    and no more bytes than ``products`` products take in each phase.
    """
    shapes = {p.xs[0].shape, p.as_[0].shape}
    lines = {frozenset(range(i * p.q, (i + 1) * p.q)) for i in range(p.q)}
    lines |= {frozenset(range(j, p.n, p.q)) for j in range(p.q)}

    def judge(messages: list[Message]) -> str | None:
        for m in messages:
            call = f"rank {m.rank} called {m.op} of {list(m.shape)} (line {m.where[1]}) in {m.phase}"
            if m.op not in ("broadcast", "reduce"):
                return (
                    f"{call}: SUMMA broadcasts blocks and reduces blocks, so that no rank holds more than two"
                )
            if frozenset(m.group) not in lines:
                return f"{call} among ranks {list(m.group)}, which are neither a row nor a column of the grid"
            if m.bytes and m.shape not in shapes:
                return (
                    f"{call}: blocks of X and A move, {' and '.join(str(list(s)) for s in shapes)}; Y's stays"
                )
        for r in range(p.n):
            for phase, count in products.items():
                sent = sum(m.wire for m in messages if m.rank == r and m.phase == phase)
                if sent > count * p.sends() + 1e-6:
                    what = "a product takes" if count == 1 else f"{count} products take"
                    return (
                        f"rank {r} sent {bytes_text(sent)} in {phase};"
                        f" {what} {bytes_text(count * p.sends())}: each block of X passes along its row"
                        " once, each of A along its column"
                    )
        return None

    return judge
