"""The scheme of one process: torch's own modules, nothing cut. What the others are compared with."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcourse.comm import Placement, RandomStates
from tpcourse.layers import Dropout

NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


class Dense:
    """Every layer whole in this process; outer and inner layouts are both [tokens, features].

    `seed` is that of dropout. On several ranks each would hold and compute the whole model.
    """

    group, batch_ranks, outer = None, 1, Placement((0,), (0,))

    def __init__(self, seed: int = 0) -> None:
        self.random = RandomStates(seed, None)

    def entering_linear(self, in_features: int, out_features: int, bias: bool = True,
                        stride: int | Sequence[int] = 1) -> nn.Module:
        return nn.Linear(in_features, out_features, bias)

    def leaving_linear(self, in_features: int, out_features: int, bias: bool = True) -> nn.Module:
        return nn.Linear(in_features, out_features, bias)

    def qkv_linear(self, in_features: int, head_dim: int, num_heads: int, num_kv_heads: int,
                   bias: bool = True) -> nn.Module:
        return nn.Linear(in_features, (num_heads + 2 * num_kv_heads) * head_dim, bias)

    def local_heads(self, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
        return num_heads, num_kv_heads

    def embedding(self, num_embeddings: int, dim: int) -> nn.Module:
        return nn.Embedding(num_embeddings, dim)

    def position_embedding(self, num_positions: int, dim: int) -> nn.Module:
        return nn.Embedding(num_positions, dim)

    def input_linear(self, in_features: int, out_features: int) -> nn.Module:
        return nn.Linear(in_features, out_features)

    def norm(self, dim: int, kind: str) -> nn.Module:
        return NORMS[kind](dim, eps=1e-5)

    def dropout(self, p: float, inner: bool) -> nn.Module:
        return Dropout(p, self.random, sharded=inner)

    def head(self, dim: int, vocab_size: int, embedding: nn.Module | None = None) -> nn.Module:
        head = nn.Linear(dim, vocab_size, bias=False)
        if embedding is not None:
            head.weight = embedding.weight
        return head

    def loss(self, logits: Tensor, target: Tensor, vocab_size: int) -> Tensor:
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)

    def gather_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        return logits.detach()
