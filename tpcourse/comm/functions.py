"""The differentiable collectives: what each runs forward, and the conjugate that autograd runs backward.

The table is the module; each function below names its row and says what it is for. Which row is right
depends on what follows. If the ranks go on in different ways, backward must be the true adjoint: the plain
names. If all ranks go on with equal values and compute the same from them, each already holds the whole
gradient: Megatron's region names. The wrong row raises nothing; it leaves gradients P times too large, or
unsummed.

Throughout, x is one rank's tensor and `group` is a process group or one mesh dimension, of P ranks, this one
being rank r. All of them must make the call, and all must run backward through it, or none. x may have any
strides and is never changed. In a group of one rank the result is x itself: nothing is sent, and the other
arguments are not looked at.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpcourse.comm import raw
from tpcourse.comm.groups import Group, group_size

CONJUGATES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    # name                forward             backward              right when what follows is
    "copy_to_region":     (raw.identity,       raw.all_reduce),       # different on each rank (Megatron's f)
    "reduce_from_region": (raw.all_reduce,     raw.identity),         # the same on every rank (Megatron's g)
    "scatter_to_region":  (raw.split,          raw.all_gather),       # different on each rank
    "gather_from_region": (raw.all_gather,     raw.split),            # the same on every rank
    "all_reduce":         (raw.all_reduce,     raw.all_reduce),       # different on each rank, from here on
    "all_gather":         (raw.all_gather,     raw.reduce_scatter),
    "reduce_scatter":     (raw.reduce_scatter, raw.all_gather),
    "all_to_all":         (raw.all_to_all,     raw.all_to_all_back),
    "broadcast":          (raw.broadcast,      raw.reduce),
    "reduce":             (raw.reduce,         raw.broadcast),
    "ring_shift":         (raw.ring_shift,     raw.ring_shift_back),
    "send":               (raw.send,           raw.recv),
    "recv":               (raw.recv,           raw.send),
}


class _Conjugate(torch.autograd.Function):
    """One row of the table; both of its collectives take the same group and arguments."""

    @staticmethod
    def forward(ctx, x, name, group, args):
        forward, ctx.conjugate = CONJUGATES[name]
        ctx.group, ctx.args = group, args
        return forward(x, group, *args)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.conjugate(grad, ctx.group, *ctx.args), None, None, None


def _collective(name: str, x: Tensor, group: Group, *args: object) -> Tensor:
    return x if group_size(group) == 1 else _Conjugate.apply(x, name, group, args)


def copy_to_region(x: Tensor, group: Group) -> Tensor:
    """Enter a tensor-parallel region: x, equal on all ranks, goes into different work; gradients add up.

    x: [...], the same on every rank. Result: x. Nothing is sent forward; backward is an all-reduce.
    Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3, operator f.
    """
    return _collective("copy_to_region", x, group)


def reduce_from_region(x: Tensor, group: Group) -> Tensor:
    """Leave a tensor-parallel region: the sum of the ranks' x, which all of them then use in the same way.

    x: [...], a part of the sum on every rank. Result: [...]. One all-reduce forward, nothing backward.
    If the ranks use the sum in different ways, take `all_reduce`.
    Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3, operator g.
    """
    return _collective("reduce_from_region", x, group)


def scatter_to_region(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Enter a region of shards: of x, equal on all ranks, each keeps its piece; gradients are gathered.

    x: [.., n, ..], the same on every rank. Result: [.., n / P, ..], or [.., sizes[r], ..] if there are sizes.
    Nothing is sent forward; backward is an all-gather.
    Raises ValueError if P does not divide n and no sizes are given, or they do not add up to n.
    """
    return _collective("scatter_to_region", x, group, dim, sizes)


def gather_from_region(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Leave a region of shards: the ranks' x joined along `dim`, which all of them then use in the same way.

    x: [.., n, ..] on every rank, or [.., sizes[r], ..]. Result: [.., P n, ..] or [.., sum(sizes), ..].
    One all-gather forward, nothing backward. If the ranks use the result differently, take `all_gather`.
    Raises ValueError if this rank's x does not have sizes[r] entries.
    """
    return _collective("gather_from_region", x, group, dim, sizes)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' x, which each then uses in its own way; backward is an all-reduce too.

    x: [...] on every rank. Result: [...]. If all ranks use the sum in the same way, take
    `reduce_from_region`: this one then makes the gradient P times too large.
    """
    return _collective("all_reduce", x, group)


def all_gather(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """The ranks' x joined along `dim`, which each then uses in its own way; backward is a reduce-scatter.

    x: [.., n, ..] on every rank, or [.., sizes[r], ..]. Result: [.., P n, ..] or [.., sum(sizes), ..].
    If all ranks use the result in the same way, take `gather_from_region`.
    Raises ValueError if this rank's x does not have sizes[r] entries.
    """
    return _collective("all_gather", x, group, dim, sizes)


def reduce_scatter(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """The sum of the ranks' x, of which each keeps its piece along `dim`; backward is an all-gather.

    x: [.., n, ..], a part of the sum on every rank. Result: [.., n / P, ..], or [.., sizes[r], ..] if there
    are sizes.
    Raises ValueError if P does not divide n and no sizes are given, or they do not add up to n.
    """
    return _collective("reduce_scatter", x, group, dim, sizes)


def all_to_all(x: Tensor, group: Group, split_dim: int, concat_dim: int,
               split_sizes: Sequence[int] | None = None, concat_sizes: Sequence[int] | None = None) -> Tensor:
    """x is cut along `split_dim` and piece s goes to rank s; what arrives is joined along `concat_dim`.

    Two dimensions: what was sharded along `concat_dim` becomes sharded along `split_dim`.
    x: [.., n, .., m, ..]. Result: [.., n / P, .., P m, ..]. For uneven shards, all ranks pass the same
    lists: rank s held concat_sizes[s] entries before and holds split_sizes[s] after.
    One dimension for both: ranks exchange entries. Each passes its own lists: split_sizes[s] entries go to
    rank s, concat_sizes[s] come from it.
    Backward is the all-to-all that undoes it.
    Raises ValueError if P does not divide n and no split_sizes are given, if sizes do not fit x, or if the
    exchange has one list without the other.
    """
    return _collective("all_to_all", x, group, split_dim, concat_dim, split_sizes, concat_sizes)


def broadcast(x: Tensor, group: Group, src: int) -> Tensor:
    """Rank src's x, on every rank; backward is a reduce: src gets the sum of the gradients, the others zeros.

    x: [...]; its values only matter on src, but its shape, dtype and whether it requires grad are the same
    on all ranks. Result: [...]. `src` counts within the group; ValueError if the group has no such rank.
    """
    return _collective("broadcast", x, group, src)


def reduce(x: Tensor, group: Group, dst: int) -> Tensor:
    """The sum of the ranks' x on rank dst, zeros on the others; backward is a broadcast of dst's gradient.

    x: [...] on every rank. Result: [...].
    `dst` counts within the group; ValueError if the group has no such rank.
    """
    return _collective("reduce", x, group, dst)


def ring_shift(x: Tensor, group: Group, by: int = 1) -> Tensor:
    """Each rank passes x to the one `by` places after it, the last to the first; backward passes it back.

    x: [...], of one shape on all ranks. Result: [...], the x of rank (r - by) mod P. `by` may be negative.
    """
    return x if by % group_size(group) == 0 else _collective("ring_shift", x, group, by)


def send(x: Tensor, group: Group, dst: int) -> Tensor:
    """Sends x to rank dst, which calls `recv`; backward waits for the gradient that comes from there.

    x: [...]. Result: a scalar zero that stands for the message in the graph: add it to this rank's loss, or
    call its backward(). `dst` counts within the group; ValueError if the group has no such rank or it is
    this one.
    """
    return _Conjugate.apply(x, "send", group, (dst,)).sum()


def recv(like: Tensor, group: Group, src: int) -> Tensor:
    """What rank src sends; backward sends the gradient back to it.

    like: [...], a tensor of the shape and dtype that will come; its values do not matter. It requires grad if
    and only if what src sends does, e.g. torch.empty(4, 8, requires_grad=True). Result: [...].
    `src` counts within the group; ValueError if the group has no such rank or it is this one.
    """
    return _Conjugate.apply(like, "recv", group, (src,))
