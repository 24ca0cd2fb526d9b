"""Norms over features that every rank holds whole: local, but for the gradients of their parameters."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tpcourse.comm import Group, copy_to_region, describe, group_size, raw


class LayerNorm(nn.LayerNorm):
    """Y = (X - mean(X)) / sqrt(var(X) + eps) w + b, over the last dimension.

    X, Y: [..., dim]: all tokens on every rank, or with `sequence_parallel` this rank's. Per rank: weight and
    bias [dim], whole. Nothing is sent forward. With `sequence_parallel` each rank's tokens give a part of the
    parameters' gradients; backward adds them up, weight's and bias' in one all-reduce. X and two numbers a
    token are kept for it.

    Source: Ba et al. 2016, arXiv:1607.06450, equation 4; sequence parallelism: Korthikanti et al. 2022,
    arXiv:2205.05198, section 4.2.2.
    """

    def __init__(self, dim: int, group: Group, *, sequence_parallel: bool = False, eps: float = 1e-5,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__(dim, eps, dtype=dtype)
        self.group, self.sequence_parallel = group, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim]."""
        weight, bias = self.weight, self.bias
        if self.sequence_parallel:
            weight, bias = copy_together(self.group, weight, bias)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)

    def extra_repr(self) -> str:
        return _describe(self)


class RMSNorm(nn.RMSNorm):
    """Y = X / sqrt(mean(X^2) + eps) w, over the last dimension.

    X, Y: [..., dim]: all tokens on every rank, or with `sequence_parallel` this rank's. Per rank: weight
    [dim], whole. What it sends is what `LayerNorm` sends, without a bias. X and one number a token are kept.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
    """

    def __init__(self, dim: int, group: Group, *, sequence_parallel: bool = False, eps: float = 1e-5,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__(dim, eps, dtype=dtype)
        self.group, self.sequence_parallel = group, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim]."""
        weight = copy_to_region(self.weight, self.group) if self.sequence_parallel else self.weight
        return rms_norm(x, weight, self.eps)

    def extra_repr(self) -> str:
        return _describe(self)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X / sqrt(mean(X^2) + eps) w over the last dimension; X and one number a token are kept for backward."""
    if x.is_cuda:  # one kernel there; elsewhere torch composes it of many, which keep X twice in float32
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RootMeanSquare.apply(x, weight, eps)


class _RootMeanSquare(torch.autograd.Function):
    """X / sqrt(mean(X^2) + eps) w, computed in float32 at least."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, scale = ctx.saved_tensors
        dy, normed = dy.to(scale.dtype), x * scale
        grad = dy * weight
        dx = (grad - normed * (grad * normed).mean(-1, keepdim=True)).mul_(scale)
        dw = (dy * normed).reshape(-1, len(weight)).sum(0)
        return dx.to(x.dtype), dw.to(weight.dtype), None


def copy_together(group: Group, *parameters: Tensor) -> tuple[Tensor, ...]:
    """`copy_to_region` for several vectors, whose gradients travel in one message; nothing is copied."""
    return parameters if group_size(group) == 1 else _CopyTogether.apply(group, *parameters)


class _CopyTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, *parameters):
        ctx.group = group
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        total = raw.all_reduce(torch.cat(grads), ctx.group)
        return None, *total.split([len(grad) for grad in grads])


def _describe(norm: LayerNorm | RMSNorm) -> str:
    return (f"{norm.normalized_shape[0]} features, eps={norm.eps}, "
            f"sequence_parallel={norm.sequence_parallel}, over {describe(norm.group)}")
