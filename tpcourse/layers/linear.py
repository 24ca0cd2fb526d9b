"""Where a tensor-parallel region begins, in a linear map that hides what it sends, and where it ends."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpcourse.comm import Group, even_sizes, group_of, group_size, raw, reduce_from_region, reduce_scatter


def entering_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group,
                    sequence_parallel: bool = False) -> Tensor:
    """Y = X W^T + b, where each rank goes on with its own W. To the bit, it is

        x = all_gather(x, group, 0) if sequence_parallel else copy_to_region(x, group)
        return F.linear(x, weight, bias)

    and it differs in time and memory: backward starts the sum of the ranks' dX, and computes dW and db while
    it is under way. With `sequence_parallel` only this rank's tokens of X are kept, and gathered again while
    dX is computed. A frozen W keeps no X; if X needs no gradient, no dX is computed or summed. Under autocast
    X is kept, and dX summed, in its lower precision.

    X: [..., in], the same on every rank; with `sequence_parallel` [tokens / P, ..., in], this rank's tokens.
    W: [out / P, in] and b: [out / P], this rank's. Y: [..., out / P] or [tokens, ..., out / P].
    Raises ValueError if `sequence_parallel` finds no dimension of tokens before the features.
    Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3; with sequence parallelism:
    Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """
    if sequence_parallel:
        _check_has_tokens(x.shape)
    x, weight, bias = autocast(x, weight, bias)
    if group_size(group) == 1:
        return F.linear(x, weight, bias)
    return _EnteringLinear.apply(x, weight, bias, group, sequence_parallel)


def check_tokens(shape: Sequence[int], group: Group) -> None:
    """Raises ValueError if activations of this shape, [tokens, ..., features], do not split over ranks."""
    _check_has_tokens(shape)
    even_sizes(shape[0], group, f"with sequence_parallel, a first dimension of {shape[0]} tokens")


def _check_has_tokens(shape: Sequence[int]) -> None:
    if len(shape) < 2:
        raise ValueError(f"sequence_parallel splits the tokens of [tokens, ..., features], and a shape of "
                         f"{tuple(shape)} has no dimension for them; add one in front")


def autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in the dtype that autocast, where it is on, gives to a product."""
    device = tensors[0].device.type
    if tensors[0].dtype == torch.float64:  # which autocast leaves alone
        return list(tensors)
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return list(tensors)
    return [t if t is None else t.to(torch.get_autocast_dtype(device)) for t in tensors]


class _EnteringLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, sequence_parallel):
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_dw else None, weight if needs_dx else None)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return F.linear(raw.all_gather(x, group, 0) if sequence_parallel else x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        dx = dw = db = summing = gathering = None
        if needs_dw and ctx.sequence_parallel:
            x, gathering = start_gather(x, ctx.group)
        rows = dy.reshape(-1, dy.size(-1))  # [tokens, out / P]
        if needs_dx:
            dx = (rows @ weight).view(*dy.shape[:-1], weight.size(1))
            dx, summing = start_sum(dx, ctx.group, ctx.sequence_parallel)
        if gathering:
            gathering.wait()
        if needs_dw:
            dw = rows.t() @ x.reshape(-1, x.size(-1))  # [out / P, in]
        if needs_db:
            db = rows.sum(0)
        if summing:
            summing.wait()
        return dx, dw, db, None, None


def start_gather(x: Tensor, group: Group) -> tuple[Tensor, dist.Work]:
    """All ranks' tokens, complete once the work is waited for."""
    out = x.new_empty(group_size(group) * x.size(0), *x.shape[1:])
    return out, dist.all_gather_single(out, x.contiguous(), group=group_of(group), async_op=True)


def start_sum(dx: Tensor, group: Group, scatter: bool) -> tuple[Tensor, dist.Work]:
    """The sum of all ranks' dX, or this rank's tokens of it, complete once the work is waited for."""
    if not scatter:
        return dx, dist.all_reduce(dx, group=group_of(group), async_op=True)
    out = dx.new_empty(dx.size(0) // group_size(group), *dx.shape[1:])
    return out, dist.reduce_scatter_single(out, dx, group=group_of(group), async_op=True)


def leave_region(y: Tensor, bias: Tensor | None, group: Group, sequence_parallel: bool) -> Tensor:
    """Y = y_1 + ... + y_P + b, the sum with which a region ends; the bias is added once, after it.

    y: [..., out], this rank's part. b: [out], whole. Y: [..., out] on every rank, for use that is the same on
    all; with `sequence_parallel` [tokens / P, ..., out], this rank's tokens. db then takes the dY of all
    tokens, which backward gathers in any case, and needs no message of its own.
    """
    if sequence_parallel and bias is not None and group_size(group) > 1:
        return _ScatterAndAdd.apply(y, bias, group)
    y = reduce_scatter(y, group, 0) if sequence_parallel else reduce_from_region(y, group)
    return y if bias is None else y + bias.to(y.dtype)  # of another dtype under autocast


class _ScatterAndAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, bias, group):
        ctx.group, ctx.dtype, ctx.bias_dtype = group, y.dtype, bias.dtype
        return raw.reduce_scatter(y, group, 0) + bias.to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad = raw.all_gather(grad.to(ctx.dtype), ctx.group, 0)  # [tokens, ..., out]
        db = grad.flatten(0, -2).sum(0, dtype=ctx.bias_dtype) if ctx.needs_input_grad[1] else None
        return grad, db, None
