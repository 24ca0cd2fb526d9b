"""The collectives without autograd, made safe: any strides, any dimension, and the input is never changed.

torch.distributed gets contiguous tensors only: where strides differ between ranks, gloo returns wrong data in
silence. Shards of different sizes travel padded to the longest. `functions` documents the arguments.
"""

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from tpcourse.comm.groups import (Group, check_rank, check_sizes, describe, group_of, group_rank, group_size,
                                  shard_sizes)

Sizes = Sequence[int] | None


def identity(x: Tensor, group: Group) -> Tensor:
    """x itself: nothing is sent."""
    return x


def split(x: Tensor, group: Group, dim: int, sizes: Sizes = None) -> Tensor:
    """This rank's piece of x along `dim`, copied so that it does not keep x alive: nothing is sent."""
    return _fresh(x.split(_shares(x, group, dim, sizes), dim)[group_rank(group)])


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' x, on every rank."""
    out = _fresh(x)
    dist.all_reduce(out, group=group_of(group))
    return out


def all_gather(x: Tensor, group: Group, dim: int, sizes: Sizes = None) -> Tensor:
    """All ranks' x, joined along `dim` in rank order, on every rank."""
    sizes = _sizes_to_join(x, group, dim, sizes)
    x = _pad(x, dim, max(sizes)).contiguous()
    out = x.new_empty(len(sizes) * x.size(0), *x.shape[1:])
    dist.all_gather_single(out, x, group=group_of(group))
    if dim == 0 and min(sizes) == max(sizes):
        return out  # joined as it arrived: no copy
    pieces = out.view(len(sizes), *x.shape)
    return torch.cat([piece.narrow(dim, 0, size) for piece, size in zip(pieces, sizes)], dim)


def reduce_scatter(x: Tensor, group: Group, dim: int, sizes: Sizes = None) -> Tensor:
    """This rank's piece, along `dim`, of the sum of all ranks' x."""
    sizes = _shares(x, group, dim, sizes)
    if dim == 0 and min(sizes) == max(sizes):
        pieces = x.contiguous()  # one after the other already: no copy
    else:
        pieces = torch.cat([_pad(piece, dim, max(sizes)) for piece in x.split(sizes, dim)])
    out = pieces.new_empty(pieces.size(0) // len(sizes), *pieces.shape[1:])
    dist.reduce_scatter_single(out, pieces, group=group_of(group))
    mine = sizes[group_rank(group)]
    return out if mine == max(sizes) else _fresh(out.narrow(dim, 0, mine))


def all_to_all(x: Tensor, group: Group, split_dim: int, concat_dim: int, split_sizes: Sizes = None,
               concat_sizes: Sizes = None) -> Tensor:
    """x cut along `split_dim`, piece s sent to rank s; arrivals joined along `concat_dim` in rank order."""
    to_send = _shares(x, group, split_dim, split_sizes)
    to_join = _sizes_to_exchange(x, group, split_dim, concat_dim, split_sizes, concat_sizes)
    pieces = [piece.flatten() for piece in x.split(to_send, split_dim)]
    lengths = [len(piece) for piece in pieces]
    shapes = [list(x.shape) for _ in to_join]
    for shape, size in zip(shapes, to_join):
        shape[split_dim] = to_send[group_rank(group)]
        shape[concat_dim] = size
    counts = [prod(shape) for shape in shapes]
    out = x.new_empty(sum(counts))
    dist.all_to_all_single(out, torch.cat(pieces), counts, lengths, group=group_of(group))
    return torch.cat([piece.view(shape) for piece, shape in zip(out.split(counts), shapes)], concat_dim)


def all_to_all_back(x: Tensor, group: Group, split_dim: int, concat_dim: int, split_sizes: Sizes = None,
                    concat_sizes: Sizes = None) -> Tensor:
    """Undoes an all_to_all of the same arguments: every piece goes back where it came from."""
    return all_to_all(x, group, concat_dim, split_dim, concat_sizes, split_sizes)


def broadcast(x: Tensor, group: Group, root: int) -> Tensor:
    """The root's x, on every rank."""
    out = _fresh(x)
    dist.broadcast(out, group=group_of(group), group_src=check_rank(root, group))
    return out


def reduce(x: Tensor, group: Group, root: int) -> Tensor:
    """The sum of all ranks' x on the root, zeros on the others."""
    out = _fresh(x)
    dist.reduce(out, group=group_of(group), group_dst=check_rank(root, group))
    return out if group_rank(group) == root else out.zero_()


def ring_shift(x: Tensor, group: Group, by: int) -> Tensor:
    """The x of the rank `by` places before this one, on a ring that leads from the last rank to the first."""
    rank, size = group_rank(group), group_size(group)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    messages = [dist.P2POp(dist.isend, x.contiguous(), group=group_of(group), group_peer=(rank + by) % size),
                dist.P2POp(dist.irecv, out, group=group_of(group), group_peer=(rank - by) % size)]
    for message in dist.batch_isend_irecv(messages):
        message.wait()
    return out


def ring_shift_back(x: Tensor, group: Group, by: int) -> Tensor:
    """Undoes a ring_shift of the same arguments."""
    return ring_shift(x, group, -by)


def send(x: Tensor, group: Group, peer: int) -> Tensor:
    """Sends x to the peer. Nothing arrives: the result is zeros in the shape of x, which take no memory."""
    dist.send(x.contiguous(), group=group_of(group), group_dst=check_rank(peer, group, other=True))
    return x.new_zeros(()).expand_as(x)


def recv(like: Tensor, group: Group, peer: int) -> Tensor:
    """What the peer sends, in a new tensor with the shape and dtype of `like`."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    dist.recv(out, group=group_of(group), group_src=check_rank(peer, group, other=True))
    return out


def _fresh(x: Tensor) -> Tensor:
    """A contiguous copy."""
    return x.clone(memory_format=torch.contiguous_format)


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """x, with zeros after its end along `dim` until it has `size` entries there."""
    missing = size - x.size(dim)
    return pad(x, [0, 0] * (-1 - dim if dim < 0 else x.dim() - 1 - dim) + [0, missing]) if missing else x


def _shares(x: Tensor, group: Group, dim: int, sizes: Sizes) -> list[int]:
    """How much of x, a whole, each rank holds along `dim`."""
    return shard_sizes(x.size(dim), group, sizes, f"dimension {dim} of size {x.size(dim)}")


def _sizes_to_join(x: Tensor, group: Group, dim: int, sizes: Sizes) -> list[int]:
    """How much each rank brings along `dim`, where this rank brings x."""
    rank, n = group_rank(group), x.size(dim)
    sizes = [n] * group_size(group) if sizes is None else check_sizes(sizes, group)
    if sizes[rank] != n:
        raise ValueError(f"rank {rank} of {describe(group)} has {n} entries in dimension {dim}, not "
                         f"{sizes[rank]} as sizes={sizes} say; pass every rank's size, in rank order")
    return sizes


def _sizes_to_exchange(x: Tensor, group: Group, split_dim: int, concat_dim: int, split_sizes: Sizes,
                       concat_sizes: Sizes) -> list[int]:
    """How much arrives from each rank along `concat_dim` in an all-to-all."""
    if (split_dim - concat_dim) % x.dim():
        return _sizes_to_join(x, group, concat_dim, concat_sizes)
    if (split_sizes is None) != (concat_sizes is None):
        raise ValueError(f"an all-to-all along one dimension needs split_sizes (what goes to each rank) and "
                         f"concat_sizes (what each sends here) or neither, not {split_sizes}, {concat_sizes}")
    return _shares(x, group, split_dim, None) if concat_sizes is None else check_sizes(concat_sizes, group)
