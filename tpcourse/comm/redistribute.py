"""An activation changes hands: what ranks lack of their new blocks travels, in one all-to-all."""

from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpcourse.comm.groups import Group, describe, group_of, group_rank, group_size
from tpcourse.comm.placement import Block, Placement, overlap, to_send


def redistribute(x: Tensor, source: Placement, target: Placement, group: Group) -> Tensor:
    """This rank's block of an activation [tokens, features] in `source` becomes its block in `target`.

    x: [tokens / source's parts of them, features / source's parts]. Result: the same with target's parts. One
    all-to-all of exactly what ranks lack: what a rank has already it copies, and where none lacks anything
    there is no message. Between equal placements the result is x itself, and the group is not looked at.

    Backward moves the gradient from `target` to `source` in the same way, and adds up nothing. So ranks that
    hold copies must each have the whole gradient of what they hold, as they do of every scheme's outer
    activations: those who hold a copy go on with equal values, and where a region begins its linear sums the
    gradient over all ranks that the copies are on. A sum over copies here would count it once for each.

    Raises ValueError if x is no matrix, tokens or features do not split into equal parts, or the placements
    are not for the ranks of the group.
    """
    if source == target:
        return x
    if len(source.tokens) != group_size(group):
        raise ValueError(f"a placement on {len(source.tokens)} ranks is not one on {describe(group)}; place "
                         "over all of them")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, not (tokens, features); flatten what is before "
                         "the features")
    return _Redistribute.apply(x, source, target, group)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, source, target, group):
        ctx.back = target, source, group
        return _exchange(x, source, target, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _exchange(grad, *ctx.back), None, None, None


@dataclass(frozen=True)
class _Route:
    """What one rank has to do; blocks are counted from the start of what it holds before or after."""

    shape: tuple[int, int]  # of its new block
    kept: tuple[Block, Block] | None  # what it holds in both: where it was, where it will be
    sent: tuple[tuple[Block, ...], ...]  # to each rank
    arriving: tuple[tuple[Block, ...], ...]  # from each rank
    silent: bool  # whether no rank sends anything


@cache
def _route(source: Placement, target: Placement, n: int, h: int, rank: int) -> _Route:
    old, new = source.block(rank, n, h), target.block(rank, n, h)
    blocks, both = to_send(source, target, n, h), overlap(old, new)
    return _Route(_shape(new), both and (_within(both, old), _within(both, new)),
                  tuple(tuple(_within(block, old) for block in row) for row in blocks[rank]),
                  tuple(tuple(_within(block, new) for block in row[rank]) for row in blocks),
                  not any(block for row in blocks for block in row))


def _exchange(x: Tensor, source: Placement, target: Placement, group: Group) -> Tensor:
    """The new block, a copy: it keeps nothing of x alive."""
    n, h = (size * parts for size, parts in zip(x.shape, source.parts))
    route = _route(source, target, n, h, group_rank(group))
    out = x.new_empty(route.shape)
    if route.kept:
        before, after = route.kept
        out[after] = x[before]
    if not route.silent:
        _fill(out, x, route, group)
    return out


def _fill(out: Tensor, x: Tensor, route: _Route, group: Group) -> None:
    """Sends the blocks of x that others lack, and puts what arrives into `out`."""
    sent = torch.cat([x.new_empty(0), *(x[block].flatten() for blocks in route.sent for block in blocks)])
    lengths, counts = _counts(route.sent), _counts(route.arriving)
    arrived = x.new_empty(sum(counts))
    dist.all_to_all_single(arrived, sent, counts, lengths, group=group_of(group))
    blocks = [block for blocks in route.arriving for block in blocks]
    for block, piece in zip(blocks, arrived.split([_numbers(block) for block in blocks])):
        out[block] = piece.view(_shape(block))


def _counts(blocks: tuple[tuple[Block, ...], ...]) -> list[int]:
    return [sum(map(_numbers, each)) for each in blocks]


def _numbers(block: Block) -> int:
    tokens, features = _shape(block)
    return tokens * features


def _shape(block: Block) -> tuple[int, int]:
    return tuple(span.stop - span.start for span in block)


def _within(block: Block, whole: Block) -> Block:
    """A block of an activation, as one of the part of it that a rank holds."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(block, whole))
