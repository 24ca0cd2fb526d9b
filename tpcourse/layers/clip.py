"""Gradient clipping over ranks: the norm of the whole model's gradient, in which every entry counts once."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcourse.comm import Group, group_of, group_size
from tpcourse.layers.layout import model_layouts


def clip_grad_norm_(model: nn.Module, max_norm: float, group: Group | None) -> Tensor:
    """Scales the gradients so that the norm of them all is at most `max_norm`; returns the norm before.

    The norm is that of the whole model, a scalar in float32 or better, the same on every rank: each rank adds
    up the squares of the entries that it owns, and one all-reduce of one number adds up the ranks. Parameters
    without a gradient count as zeros. All ranks of the group must make the call; without a group this process
    has the whole model.
    Raises ValueError if `max_norm` is negative.
    Source: Pascanu, Mikolov and Bengio 2013, arXiv:1211.5063, section 3.2, as torch.nn.utils.clip_grad_norm_
    does it, with 1e-6 added to the norm.
    """
    if max_norm < 0:
        raise ValueError(f"max_norm={max_norm} is negative; pass zero or more")
    norm = _sum_of_owned_squares(model, group)
    if group is not None and group_size(group) > 1:
        dist.all_reduce(norm, group=group_of(group))
    norm = norm.sqrt_()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))
    return norm


def _sum_of_owned_squares(model: nn.Module, group: Group | None) -> Tensor:
    """Over the pieces of all gradients that this rank owns."""
    layouts = model_layouts(model, group)
    parameters = dict(model.named_parameters())
    kind = torch.float32
    for parameter in parameters.values():  # of all, so that every rank sends the same dtype
        kind = torch.promote_types(kind, parameter.dtype)
    total = torch.zeros((), dtype=kind, device=next(iter(parameters.values())).device)
    for name, parameter in parameters.items():
        for piece in layouts[name].pieces:
            if piece.owned and parameter.grad is not None:
                total += parameter.grad[piece.here].to(kind).square().sum()
    return total
