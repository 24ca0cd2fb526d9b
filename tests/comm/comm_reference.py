"""What every collective means, in one process: ranks are entries of a list, and autograd sees one graph."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpcourse.comm import split_sizes

Ranks = list[Tensor]


@dataclass
class Case:
    """One collective with its arguments: args[r] are rank r's, shapes[r] its input's shape."""

    name: str
    args: list[tuple]
    shapes: list[tuple[int, ...]]
    reference: Callable[[Ranks], Ranks]

    @property
    def copies(self) -> bool:
        """Whether the ranks' inputs are copies of one tensor."""
        return self.name in ("copy_to_region", "scatter_to_region")

    @property
    def used_alike(self) -> bool:
        """Whether all ranks use the result in the same way, so that it counts once."""
        return self.name in ("reduce_from_region", "gather_from_region")

    def tensors(self) -> tuple[Ranks, Ranks]:
        """Random inputs and upstream gradients, different on each rank as far as the meaning allows."""
        xs = [torch.randn(shape, dtype=torch.float64) for shape in self.shapes]
        if self.copies:
            xs = [xs[0].clone() for _ in xs]
        grads = [torch.randn(y.shape, dtype=torch.float64) for y in self.reference(xs)]
        return xs, [grads[0].clone() for _ in grads] if self.used_alike else grads

    def expected(self, xs: Ranks, grads: Ranks) -> tuple[Ranks, Ranks]:
        """Every rank's result and input gradient, from autograd through the whole."""
        leaves = [x.clone().requires_grad_() for x in xs[: 1 if self.copies else None]]
        ys = self.reference(leaves * len(xs) if self.copies else leaves)
        counted = 1 if self.used_alike else len(ys)
        loss = sum((y * grad).sum() for y, grad in zip(ys[:counted], grads))
        found = torch.autograd.grad(loss, leaves, materialize_grads=True)
        return [y.detach() for y in ys], list(found) * len(xs) if self.copies else list(found)


def uneven(p: int) -> list[int]:
    """Seven entries over p ranks, very unevenly; one rank holds none."""
    return {1: [7], 2: [7, 0], 3: [2, 0, 5], 4: [0, 4, 1, 2]}[p]


def shape_with(dim: int, n: int) -> tuple[int, ...]:
    shape = [3, 5, 2]
    shape[dim] = n
    return tuple(shape)


def plain_cases(p: int) -> list[Case]:
    """The collectives that take no dimension."""
    sums = {"all_reduce": lambda xs: [sum(xs)] * p, "reduce_from_region": lambda xs: [sum(xs)] * p,
            "copy_to_region": lambda xs: list(xs)}
    cases = [Case(name, [()] * p, [(3, 5, 2)] * p, reference) for name, reference in sums.items()]
    for root in {0, p - 1}:
        cases += [
            Case("broadcast", [(root,)] * p, [(3, 5, 2)] * p, lambda xs, root=root: [xs[root]] * p),
            Case("reduce", [(root,)] * p, [(3, 5, 2)] * p,
                 lambda xs, root=root: [sum(xs) if r == root else 0 * sum(xs) for r in range(p)]),
        ]
    for by in (1, -1, 2, p, 5):
        cases.append(Case("ring_shift", [(by,)] * p, [(3, 5, 2)] * p,
                          lambda xs, by=by: [xs[(r - by) % p] for r in range(p)]))
    return cases


def sharding_cases(p: int, dim: int, sizes: list[int] | None) -> list[Case]:
    """Split, gather and reduce-scatter along `dim`: equal shards of 2 entries, or `sizes`."""
    shares, args = sizes or [2] * p, [(dim,) if sizes is None else (dim, sizes)] * p
    whole, shards = [shape_with(dim, sum(shares))] * p, [shape_with(dim, n) for n in shares]
    gather = lambda xs: [torch.cat(xs, dim)] * p  # noqa: E731
    scatter = lambda xs: [x.split(shares, dim)[r] for r, x in enumerate(xs)]  # noqa: E731
    return [
        Case("scatter_to_region", args, whole, scatter),
        Case("gather_from_region", args, shards, gather),
        Case("all_gather", args, shards, gather),
        Case("reduce_scatter", args, whole, lambda xs: scatter([sum(xs)] * p)),
    ]


def resharding(p: int, split_dim: int, concat_dim: int, held: Sequence[int] | None = None,
               wanted: Sequence[int] | None = None) -> Case:
    """An all-to-all over two dimensions: shards along concat_dim become shards along split_dim."""
    before, after = held or [2] * p, wanted or [3] * p
    shapes = []
    for n in before:
        shape = list(shape_with(concat_dim, n))
        shape[split_dim] = sum(after)
        shapes.append(tuple(shape))
    args = (split_dim, concat_dim) + (() if held is None else (wanted, held))
    return Case("all_to_all", [args] * p, shapes,
                lambda xs: list(torch.cat(xs, concat_dim).split(after, split_dim)))


def exchange(p: int, dim: int, counts: list[list[int]] | None = None) -> Case:
    """An all-to-all along one dimension: counts[s][r] entries go from rank s to rank r."""
    sent = counts or [[2] * p for _ in range(p)]
    received = [[sent[s][r] for s in range(p)] for r in range(p)]
    args = [(dim, dim) if counts is None else (dim, dim, sent[r], received[r]) for r in range(p)]
    return Case("all_to_all", args, [shape_with(dim, sum(row)) for row in sent],
                lambda xs: [torch.cat(column, dim) for column in
                            zip(*(x.split(row, dim) for x, row in zip(xs, sent)))])


def all_cases(p: int) -> list[Case]:
    """A little of everything, for tests that are about something else than the arguments."""
    return (plain_cases(p) + sharding_cases(p, 1, None) + sharding_cases(p, -1, split_sizes(7, p))
            + [resharding(p, 0, 1), exchange(p, 1)])
