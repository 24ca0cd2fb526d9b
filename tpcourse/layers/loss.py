"""Cross-entropy over a split vocabulary: the softmax of logits that no rank ever holds whole."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpcourse.comm import Group, describe, group_of, group_rank, group_size, my_slice, reduce_from_region
from tpcourse.layers.vocabulary import check_ids, locate, own_entries


def vocab_parallel_cross_entropy(logits: Tensor, target: Tensor, group: Group, vocab_size: int, *,
                                 padded_vocab_size: int | None = None, ignore_index: int = -100,
                                 label_smoothing: float = 0.0, z_loss: float = 0.0,
                                 reduction: str = "mean") -> Tensor:
    """Per token log Z - (1 - s) x_target - s mean(x) + z (log Z)^2, where Z = sum(exp(x)).

    x are one token's `vocab_size` logits, s is `label_smoothing`, z is `z_loss`; with z = 0 this is
    F.cross_entropy of the whole logits.
    logits: [..., V_r], this rank's columns, where V_1 + ... + V_P = vocab_size and sizes differ by at most
    one. With `padded_vocab_size` that many columns are split instead, and those from vocab_size on do not
    count. target: [...], int64 or int32, the same on every rank; a token whose target is `ignore_index` has
    loss zero.
    Result, on every rank, for use that is the same on all: [...] for reduction "none", a scalar for "sum" and
    "mean", which divides the sum by the number of tokens not ignored (NaN if there are none). Where ranks of
    another mesh dimension hold other tokens, take "sum" and divide by the number of valid tokens of them all.

    It sends two all-reduces: the greatest logit; then, in one message, sum of exponentials, target's logit
    and, for smoothing, sum of logits. That is 1 + 2 (or 3) numbers a token, where gathering the logits takes
    vocab_size. Backward sends nothing; one tensor in the shape of this rank's logits is kept for it.
    16-bit logits are computed, and their loss is returned, in float32.

    Raises ValueError if the logits are gathered or another shard, shapes do not match, a rank would hold
    padding only, an option has no such value, or (on the CPU) a target is outside the vocabulary.
    Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3; label smoothing: Szegedy et al.
    2015, arXiv:1512.00567, section 7; z-loss: PaLM (Chowdhery et al. 2022, arXiv:2204.02311), section 5.
    """
    own = _own_columns(logits, group, vocab_size, padded_vocab_size or vocab_size)
    _check(logits, target, vocab_size, ignore_index, label_smoothing, reduction)
    x = logits[..., : len(own)] if padded_vocab_size else logits
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # [..., V_r]
    greatest = _greatest(x, group)  # [...]
    sums = _Sums.apply(x, greatest, target, own, label_smoothing > 0)  # [2 or 3, ...], this rank's part
    total, at_target, *x_sum = reduce_from_region(sums, group)
    log_z = total.log()
    loss = log_z - (1 - label_smoothing) * at_target
    if label_smoothing:
        loss = loss - label_smoothing * x_sum[0] / vocab_size
    if z_loss:
        loss = loss + z_loss * (log_z + greatest).square()
    return _reduce(loss, target != ignore_index, reduction)


def _greatest(x: Tensor, group: Group) -> Tensor:
    """The greatest of the columns that all ranks hold; it cancels in the loss, so no gradient passes."""
    greatest = x.detach().amax(-1).contiguous()  # torch.distributed needs it
    if group_size(group) > 1:
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group_of(group))
    return greatest


class _Sums(torch.autograd.Function):
    """Over this rank's columns, with x less the greatest: sum(exp(x)), x at the target (zero where another
    rank holds it) and, if `smooth`, sum(x).

    Autograd would run backward through each by itself and add up three tensors of all logits; this makes one.
    """

    @staticmethod
    def forward(ctx, x, greatest, target, own, smooth):
        x = x - greatest.unsqueeze(-1)
        local, elsewhere = locate(target, own)
        at_target = x.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
        x_sum = [x.sum(-1)] if smooth else []
        exp = x.exp_()
        ctx.save_for_backward(exp, local, elsewhere)
        return torch.stack([exp.sum(-1), at_target, *x_sum])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        exp, local, elsewhere = ctx.saved_tensors
        d_total, d_at_target, *d_x_sum = grad.unsqueeze(-1)  # each [..., 1]
        dx = exp * d_total
        dx.scatter_add_(-1, local.unsqueeze(-1), d_at_target.masked_fill(elsewhere.unsqueeze(-1), 0))
        for d in d_x_sum:
            dx += d
        return dx, None, None, None, None


def _reduce(loss: Tensor, valid: Tensor, reduction: str) -> Tensor:
    loss = loss.masked_fill(~valid, 0)
    if reduction == "none":
        return loss
    return loss.sum() / valid.sum() if reduction == "mean" else loss.sum()


def _own_columns(logits: Tensor, group: Group, vocab_size: int, padded_size: int) -> range:
    """The vocabulary entries that this rank's columns stand for, padding left out."""
    held = own_entries(padded_size, group, f"vocab_size={padded_size}")
    if logits.size(-1) != len(held):
        raise ValueError(f"logits have {logits.size(-1)} columns, but rank {group_rank(group)} of "
                         f"{describe(group)} holds {len(held)} of {padded_size}; pass this rank's columns, "
                         "not gathered ones, and padded_vocab_size if there are more than vocab_size")
    last = padded_size - padded_size // group_size(group)  # where the last rank starts
    if not last < vocab_size <= padded_size:
        raise ValueError(f"vocab_size={vocab_size} of padded_vocab_size={padded_size} leaves the last of "
                         f"{describe(group)} nothing or does not fit; it must be {last + 1} to {padded_size}")
    return range(held.start, min(held.stop, vocab_size))


def _check(logits: Tensor, target: Tensor, vocab_size: int, ignore_index: int, smoothing: float,
           reduction: str) -> None:
    if target.shape != logits.shape[:-1]:
        raise ValueError(f"target has shape {tuple(target.shape)} for logits of {tuple(logits.shape)}; pass "
                         f"one target a token, {tuple(logits.shape[:-1])}, and logits with the columns last")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction={reduction!r} is not one of 'none', 'mean', 'sum'")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing={smoothing} is not between 0 and 1")
    check_ids(target, vocab_size, "target", ignore_index)


def loss_of_split_tokens(logits: Tensor, target: Tensor, features: Group, tokens: Group,
                         vocab_size: int) -> Tensor:
    """The mean cross-entropy where `features` split the vocabulary and `tokens` the tokens.

    logits: [T / tokens, V_r]. target: [T], of all tokens and the same on every rank, -100 where none counts:
    so a wrong id raises on all ranks. Result, on every rank: the mean over all tokens that count.
    """
    check_ids(target, vocab_size, "target", -100)
    own = target[my_slice(len(target), tokens)]
    loss = vocab_parallel_cross_entropy(logits, own, features, vocab_size, reduction="sum")
    return reduce_from_region(loss, tokens) / (target != -100).sum()
