"""Norms over features that are split over ranks: each token's statistics are put together from parts."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tpcourse.comm import (Group, copy_to_region, describe, even_sizes, group_of, group_rank, group_size,
                           my_slice, raw)
from tpcourse.layers.layout import Layout, split_along
from tpcourse.layers.norm import copy_together, rms_norm


class _SplitNorm(nn.Module):
    """What the two norms share: parameters over `features`, their gradients summed over `tokens`."""

    def __init__(self, dim: int, features: Group, tokens: Group | None, copies: Group | None, eps: float,
                 dtype: torch.dtype | None, centred: bool) -> None:
        super().__init__()
        own = even_sizes(dim, features, f"dim={dim}")[0]
        self.dim, self.features, self.tokens, self.eps = dim, features, tokens, eps
        self.copies = copies or tokens
        self.weight = nn.Parameter(torch.ones(own, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.zeros(own, dtype=dtype)) if centred else None)

    def layouts(self) -> dict[str, Layout]:
        """Which features' parameters this rank holds; of those that hold the same the first owns them."""
        owned = self.copies is None or group_rank(self.copies) == 0
        own = split_along(0, (self.dim,), [my_slice(self.dim, self.features)], [owned])
        return {"weight": own} if self.bias is None else {"weight": own, "bias": own}

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim / P], this rank's features."""
        weight, bias = self._enter()
        if group_size(self.features) > 1:
            return _Normalize.apply(x, weight, bias, self.features, self.eps)
        if bias is None:
            return rms_norm(x, weight, self.eps)
        return F.layer_norm(x, (self.dim,), weight, bias, self.eps)

    def _enter(self) -> tuple[Tensor, Tensor | None]:
        """The parameters as ranks with other tokens use them; their gradients travel in one message."""
        if self.tokens is None:
            return self.weight, self.bias
        if self.bias is None:
            return copy_to_region(self.weight, self.tokens), None
        return copy_together(self.tokens, self.weight, self.bias)

    def extra_repr(self) -> str:
        over = "" if self.tokens is None else f", tokens over {describe(self.tokens)}"
        return f"{self.dim} features over {describe(self.features)}{over}, eps={self.eps}"


class SplitLayerNorm(_SplitNorm):
    """Y = (X - mean(X)) / sqrt(var(X) + eps) w + b over features that are split over P ranks.

    X, Y: [..., dim / P], this rank's features of the same tokens on all ranks of `features`; the ranks of
    `tokens`, if given, hold other tokens. Per rank: weight and bias [dim / P], of its features. `copies`: all
    ranks that hold the same parameters, if more do than those of `tokens`.

    Forward is one all-gather: each rank's mean and variance, put together as Chan et al. do, so that nothing
    cancels where the mean is large. Backward is one all-reduce of two numbers a token,
    under way while the parameters' gradients are computed, and one of those over `tokens`. X and two numbers
    a token are kept. What is computed in 16 bits is computed in float32.

    Raises ValueError if P does not divide dim.
    Source: Ba et al. 2016, arXiv:1607.06450, equation 4; statistics from parts: Chan, Golub and LeVeque,
    "Updating formulae and a pairwise algorithm for computing sample variances", 1979, equation 2.1.
    """

    def __init__(self, dim: int, features: Group, tokens: Group | None = None, *,
                 copies: Group | None = None, eps: float = 1e-5, dtype: torch.dtype | None = None) -> None:
        super().__init__(dim, features, tokens, copies, eps, dtype, centred=True)


class SplitRMSNorm(_SplitNorm):
    """Y = X / sqrt(mean(X^2) + eps) w over features that are split over P ranks.

    Shapes, and what is sent and kept, as in `SplitLayerNorm`, with one number a token: forward is an
    all-reduce too, of the sums of squares.

    Raises ValueError if P does not divide dim.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
    """

    def __init__(self, dim: int, features: Group, tokens: Group | None = None, *,
                 copies: Group | None = None, eps: float = 1e-5, dtype: torch.dtype | None = None) -> None:
        super().__init__(dim, features, tokens, copies, eps, dtype, centred=False)


class _Normalize(torch.autograd.Function):
    """Both norms; without a bias nothing is centred."""

    @staticmethod
    def forward(ctx, x, weight, bias, group, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, variance = (None, _mean_square(wide, group)) if bias is None else _mean_variance(wide, group)
        scale = (variance + eps).rsqrt()  # [..., 1]
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.group = group
        y = _centre(wide, mean) * scale * weight
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, mean, scale = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        dx = dw = db = None
        normed, dy = _centre(x.to(scale.dtype), mean) * scale, dy.to(scale.dtype)
        grad = dy * weight
        if needs_dx:
            sums, summing = _start_sums(grad, normed, mean is not None, ctx.group)
        if needs_dw:
            dw = (dy * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if needs_db:
            db = dy.flatten(0, -2).sum(0).to(weight.dtype)
        if needs_dx:
            summing.wait()
            along, *across = sums / (x.size(-1) * group_size(ctx.group))
            dx = ((_centre(grad, *across) - normed * along) * scale).to(x.dtype)
        return dx, dw, db, None, None


def _centre(x: Tensor, mean: Tensor | None = None) -> Tensor:
    return x if mean is None else x - mean


def _mean_square(x: Tensor, group: Group) -> Tensor:
    """[..., 1]: the mean over all ranks' features of x^2."""
    return raw.all_reduce(x.square().mean(-1, keepdim=True), group) / group_size(group)


def _mean_variance(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """[..., 1] twice: mean and variance over all ranks' features, of which each has as many."""
    variance, mean = torch.var_mean(x, -1, correction=0)
    means, variances = raw.all_gather(torch.stack([mean, variance])[None], group, 0).unbind(1)  # [P, ...]
    return means.mean(0)[..., None], (variances.mean(0) + means.var(0, correction=0))[..., None]


def _start_sums(grad: Tensor, normed: Tensor, centred: bool, group: Group) -> tuple[Tensor, dist.Work]:
    """Per token, over all ranks' features: the sum of grad * normed and, if centred, that of grad."""
    terms = (grad * normed, grad) if centred else (grad * normed,)
    sums = torch.stack([term.sum(-1, keepdim=True) for term in terms])
    return sums, dist.all_reduce(sums, group=group_of(group), async_op=True)
