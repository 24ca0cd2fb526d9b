"""Attention: heads are dealt to ranks, and each rank attends with its own."""

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor, nn

from tpcourse.layers import apply_rotary, core_attention, recompute
from tpcourse.schemes import Scheme


class Attention(nn.Module):
    """Y = concat over heads of softmax(Q K^T / sqrt(d)) V, times the output projection.

    X and Y: outer layout, [T, dim] in one process. Between the linears the inner layout: whole sequences,
    this rank's heads; nothing is sent there. `num_kv_heads`: fewer than num_heads for grouped queries.
    `rotary`: positions turn queries and keys. `core`: `core_attention`, `flash_attention` or a function like
    them. With `recompute_core` backward computes the core again instead of keeping its scores.

    Raises ValueError if num_heads does not divide dim, num_kv_heads does not divide num_heads, or the scheme
    cannot deal the heads to its ranks.
    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2; heads over ranks: Shoeybi et al. 2019
    (arXiv:1909.08053), section 3; grouped queries: Ainslie et al. 2023 (arXiv:2305.13245); recomputing the
    core: Korthikanti et al. 2022 (arXiv:2205.05198), section 5.
    """

    def __init__(self, scheme: Scheme, dim: int, num_heads: int, num_kv_heads: int | None = None, *,
                 causal: bool = True, rotary: bool = False, bias: bool = True, dropout: float = 0.0,
                 core: Callable[..., Tensor] = core_attention, recompute_core: bool = False) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if dim % num_heads:
            raise ValueError(f"dim={dim} is not divisible by num_heads={num_heads}; pad to "
                             f"{dim + -dim % num_heads} or take another number of heads")
        self.head_dim = dim // num_heads
        self.qkv = scheme.qkv_linear(dim, self.head_dim, num_heads, num_kv_heads, bias)
        self.proj = scheme.leaving_linear(dim, dim, bias)
        self.heads, self.kv_heads = scheme.local_heads(num_heads, num_kv_heads)
        self.dropout, self.random = scheme.dropout(dropout, inner=True), scheme.random
        self.batch_ranks = scheme.batch_ranks
        self.causal, self.rotary, self.core, self.recompute_core = causal, rotary, core, recompute_core

    def forward(self, x: Tensor, sequence: int) -> Tensor:
        """x: outer layout; `sequence`: the tokens of one sequence."""
        q, k, v = self._heads(self.qkv(x), sequence)  # [batch, heads', sequence, head_dim]
        if self.recompute_core and self.training:
            y = recompute(self._core, q, k, v, random=self.random)
        else:
            y = self._core(q, k, v)
        return self.proj(rearrange(y, "b h s d -> (b s) (h d)"))

    def _heads(self, qkv: Tensor, sequence: int) -> list[Tensor]:
        if len(qkv) % sequence:
            raise ValueError(f"{len(qkv)} tokens on a rank are not whole sequences of {sequence}; pass a "
                             f"batch that is divisible by the {self.batch_ranks} ranks it is split over")
        sizes = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        return [rearrange(part, "(b s) (h d) -> b h s d", s=sequence, d=self.head_dim)
                for part in qkv.split(sizes, -1)]

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.rotary:  # in the core: kept for its recomputation are then q, k and v alone, as one tensor
            positions = torch.arange(q.size(2), device=q.device)
            q, k = apply_rotary(q, positions), apply_rotary(k, positions)
        return self.core(q, k, v, self.causal, self.dropout if self.dropout.p and self.training else None)
