"""Queries, keys and values of attention from one matrix product: every rank computes those of its heads."""

import torch
from torch import Tensor, nn

from tpcourse.comm import Group, describe, group_rank, group_size
from tpcourse.layers.heads import KVCopies, SumCopies, check_heads, my_heads
from tpcourse.layers.layout import Layout, keep_own, split_along
from tpcourse.layers.linear import entering_linear


class QKVParallelLinear(nn.Module):
    """[Q | K | V] = X [A_q | A_k | A_v] + b, each split by heads: rank r computes Q, K and V of its heads.

    X: [..., in_features], the same on every rank; with `sequence_parallel` [tokens / P, ..., in_features],
    this rank's tokens, and the layer gathers them. Result, of all tokens:
    [..., (num_heads / P + 2 kv_here) head_dim], this rank's queries, then its keys, then its values.
    kv_here = num_kv_heads / P; where there are fewer KV heads than ranks it is 1, and P / num_kv_heads
    consecutive ranks hold a copy of the same KV head. Copies start equal and stay so: backward sums the
    gradients of a head over them.
    Per rank: weight [(num_heads / P + 2 kv_here) head_dim, in_features] and a bias of as many entries.

    The layer draws the whole weight, [(num_heads + 2 num_kv_heads) head_dim, in_features] with the rows of
    all queries, then keys, then values, as nn.Linear does and keeps its own rows.

    All ranks of the group construct it together. Layers of one model share the group of the copies' ranks by
    sharing `copies`. Raises ValueError if P does not divide num_heads,
    num_kv_heads does not divide num_heads, or of num_kv_heads and P neither divides the other.
    Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3; grouped queries: Ainslie et al.
    2023, arXiv:2305.13245, section 2.2.
    """

    def __init__(self, in_features: int, head_dim: int, num_heads: int, num_kv_heads: int, group: Group,
                 bias: bool = True, *, sequence_parallel: bool = False,
                 copies: KVCopies | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_heads(num_heads, num_kv_heads, group)
        self.in_features, self.head_dim, self.group = in_features, head_dim, group
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.sequence_parallel = sequence_parallel
        self.copies = (copies or KVCopies(group)).of(num_kv_heads)
        keep_own(self, self.layouts(), nn.Linear(in_features, self.out_features, bias, dtype=dtype))

    @property
    def out_features(self) -> int:
        """The rows of the whole weight."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def layouts(self) -> dict[str, Layout]:
        """Which rows of the whole weight and entries of the whole bias this rank holds."""
        queries, *kv = my_heads(self.num_heads, self.num_kv_heads, self.group)
        spans = [slice(heads.start * self.head_dim, heads.stop * self.head_dim) for heads in (queries, *kv)]
        first = self.copies is None or group_rank(self.copies) == 0
        return {"weight": split_along(0, (self.out_features, self.in_features), spans, [True, first, first]),
                "bias": split_along(0, (self.out_features,), spans, [True, first, first])}

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features], the same on every rank, or with `sequence_parallel` this rank's tokens."""
        weight, bias = self._shared(self.weight), self._shared(self.bias)
        return entering_linear(x, weight, bias, self.group, self.sequence_parallel)

    def _shared(self, parameter: Tensor | None) -> Tensor | None:
        """The parameter, whose rows of keys and values get the gradients of all their copies."""
        if self.copies is None or parameter is None:
            return parameter
        queries = self.num_heads // group_size(self.group) * self.head_dim
        return SumCopies.apply(parameter, queries, self.copies)

    def extra_repr(self) -> str:
        return (f"{self.in_features} features to {self.num_heads} heads and {self.num_kv_heads} KV heads of "
                f"{self.head_dim}, bias={self.bias is not None}, over {describe(self.group)}")
