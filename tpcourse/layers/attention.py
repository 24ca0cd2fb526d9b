"""Attention over the heads that a rank holds: each head is computed by itself, so nothing is sent."""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from tpcourse.layers.dropout import Dropout


def core_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: Dropout | None = None) -> Tensor:
    """O = dropout(softmax(Q K^T / sqrt(head_dim))) V, head by head; with `causal`, no token sees later ones.

    q: [batch, heads, sequence, head_dim]; k, v: [batch, kv_heads, sequence, head_dim], where each k and v
    serves heads / kv_heads consecutive q. All three are this rank's heads. O has the shape of q.
    Nothing is copied to serve several q. Kept for backward: q, k, v, the softmax and, with dropout, its mask
    and its result; scores and the causal mask are not.

    Raises ValueError if kv_heads does not divide heads, or shapes do not match.
    Source: Vaswani et al. 2017, arXiv:1706.03762, equation 1; grouped queries: Ainslie et al. 2023,
    arXiv:2305.13245, section 2.2; what is kept: Korthikanti et al. 2022, arXiv:2205.05198, section 4.1.
    """
    _check(q, k, v)
    batch, heads, sequence, head_dim = q.shape
    groups = heads // k.size(1)
    q = rearrange(q, "b (kv g) s d -> (b kv) (g s) d", g=groups)  # the queries of one k follow each other
    # Contiguous, as a view that is kept would keep the whole fused Q|K|V that it comes from.
    q, k, v = (t.contiguous() for t in (q, *(rearrange(t, "b kv s d -> (b kv) s d") for t in (k, v))))
    later = q.new_full((sequence, sequence), -torch.inf if causal else 0).triu(1)  # added to the scores
    scores = torch.baddbmm(later.repeat(groups, 1), q, k.mT, alpha=head_dim**-0.5)  # [b kv, g s, s]
    attention = rearrange(scores.softmax(-1), "(b kv) (g s) t -> b (kv g) s t", b=batch, g=groups)
    if dropout is not None:
        attention = dropout(attention)
    out = rearrange(attention, "b (kv g) s t -> (b kv) (g s) t", g=groups) @ v  # [b kv, g s, d]
    return rearrange(out, "(b kv) (g s) d -> b (kv g) s d", b=batch, g=groups)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: Dropout | None = None) -> Tensor:
    """What `core_attention` computes, by torch's fused kernel, which never holds all scores at once.

    Shapes as there. Kept for backward: q, k, v, O and one number a query and head.

    Raises ValueError for dropout with p > 0 (the kernel would draw its mask from torch's own stream, which
    knows no regions), and as `core_attention` does.
    Source: Dao et al. 2022, arXiv:2205.14135, algorithm 1.
    """
    _check(q, k, v)
    if dropout is not None and dropout.p > 0:
        raise ValueError(f"flash attention cannot draw dropout p={dropout.p} from the stream of its region; "
                         "take core_attention, or p=0")
    if q.is_meta:  # there torch would take another way and keep the scores, which no real run does
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)[0]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.size(1) != k.size(1))


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4 or k.shape != v.shape or k[:, 0].shape != q[:, 0].shape:
        raise ValueError(f"q has shape {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}; pass "
                         "[batch, heads, sequence, head_dim], of which q may have more heads than k and v")
    if q.size(1) % k.size(1):
        raise ValueError(f"{q.size(1)} heads of q are not divisible by {k.size(1)} heads of k and v; each k "
                         "serves equally many q")
