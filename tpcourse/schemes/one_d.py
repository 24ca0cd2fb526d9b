"""One-dimensional tensor parallelism, Megatron-LM's: columns, then rows; also with sequence parallelism."""

from collections.abc import Sequence

from torch import Tensor, nn

from tpcourse.comm import Group, Placement, RandomStates, gather_from_region, group_size, split_sizes
from tpcourse.layers import (ColumnParallelLinear, Dropout, LayerNorm, QKVParallelLinear, RMSNorm,
                             RowParallelLinear, VocabParallelEmbedding, VocabParallelHead,
                             vocab_parallel_cross_entropy)
from tpcourse.layers.heads import KVCopies
from tpcourse.layers.replicated import ReplicatedEmbedding, ReplicatedLinear

NORMS = {"layer": LayerNorm, "rms": RMSNorm}


class OneD:
    """Inner features (heads, hidden units, vocabulary) are split over the P ranks of `group`.

    Inner: [tokens, features / P]. Outer: [tokens, features], the same on every rank; with
    `sequence_parallel` [tokens / P, features], each rank its own tokens. `seed` is that of dropout.

    Raises ValueError, when a layer is made, if P does not divide what is split; with sequence parallelism, in
    forward, if P does not divide the tokens.
    Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3; sequence parallelism: Korthikanti et al. 2022
    (arXiv:2205.05198), section 4.2.
    """

    batch_ranks = 1

    def __init__(self, group: Group, sequence_parallel: bool = False, seed: int = 0) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel
        self.outer = Placement.on({"ranks": group_size(group)}, ["ranks"] if sequence_parallel else [])
        self.random, self._copies = RandomStates(seed, group), KVCopies(group)
        self._where = {"group": group, "sequence_parallel": sequence_parallel}  # what every part is told

    def entering_linear(self, in_features: int, out_features: int, bias: bool = True,
                        stride: int | Sequence[int] = 1) -> nn.Module:
        return ColumnParallelLinear(in_features, out_features, bias=bias, stride=stride, **self._where)

    def leaving_linear(self, in_features: int, out_features: int, bias: bool = True) -> nn.Module:
        return RowParallelLinear(in_features, out_features, bias=bias, **self._where)

    def qkv_linear(self, in_features: int, head_dim: int, num_heads: int, num_kv_heads: int,
                   bias: bool = True) -> nn.Module:
        return QKVParallelLinear(in_features, head_dim, num_heads, num_kv_heads, bias=bias,
                                 copies=self._copies, **self._where)

    def local_heads(self, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
        size = group_size(self.group)
        return num_heads // size, max(num_kv_heads // size, 1)  # fewer than ranks: each holds a copy of one

    def embedding(self, num_embeddings: int, dim: int) -> nn.Module:
        return VocabParallelEmbedding(num_embeddings, dim, **self._where)

    def position_embedding(self, num_positions: int, dim: int) -> nn.Module:
        return ReplicatedEmbedding(num_positions, dim, **self._where)

    def input_linear(self, in_features: int, out_features: int) -> nn.Module:
        return ReplicatedLinear(in_features, out_features, **self._where)

    def norm(self, dim: int, kind: str) -> nn.Module:
        return NORMS[kind](dim, **self._where)

    def dropout(self, p: float, inner: bool) -> nn.Module:
        return Dropout(p, self.random, sharded=inner or self.sequence_parallel)

    def head(self, dim: int, vocab_size: int, embedding: nn.Module | None = None) -> nn.Module:
        weight = None if embedding is None else embedding.weight
        return VocabParallelHead(dim, vocab_size, weight=weight, **self._where)

    def loss(self, logits: Tensor, target: Tensor, vocab_size: int) -> Tensor:
        return vocab_parallel_cross_entropy(logits, target, self.group, vocab_size)

    def gather_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        return gather_from_region(logits.detach(), self.group, -1,
                                  split_sizes(vocab_size, group_size(self.group)))
