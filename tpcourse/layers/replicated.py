"""Small layers at the model's entrance, whole on every rank; in sequence parallelism each does its tokens."""

import torch.nn.functional as F
from torch import Tensor, nn

from tpcourse.comm import Group, copy_to_region, scatter_to_region


class ReplicatedLinear(nn.Linear):
    """Y = X A + b with A and b whole on every rank, for data that every rank holds.

    X: [n, ..., in_features], the same on every rank. Y: [n, ..., out_features] on every rank, for use that is
    the same on all; with `sequence_parallel` [n / P, ..., out_features], this rank's part of the first
    dimension, and backward sums the parameters' gradients over the ranks.
    Raises ValueError, with `sequence_parallel`, if P does not divide n.
    Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2.
    """

    def __init__(self, in_features: int, out_features: int, group: Group, bias: bool = True, *,
                 sequence_parallel: bool = False) -> None:
        super().__init__(in_features, out_features, bias)
        self.group, self.sequence_parallel = group, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, ..., in_features], the same on every rank."""
        if not self.sequence_parallel:
            return super().forward(x)
        bias = None if self.bias is None else copy_to_region(self.bias, self.group)
        return F.linear(scatter_to_region(x, self.group, 0), copy_to_region(self.weight, self.group), bias)


class ReplicatedEmbedding(nn.Embedding):
    """Y = E[ids] with E whole on every rank, for small tables such as positions.

    ids: [n, ...], the same on every rank. Y: [n, ..., embedding_dim] on every rank, for use that is the same
    on all; with `sequence_parallel` [n / P, ..., embedding_dim], this rank's part of the first dimension,
    and backward sums the table's gradient over the ranks.
    Raises ValueError, with `sequence_parallel`, if P does not divide n.
    Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, group: Group, *,
                 sequence_parallel: bool = False) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.group, self.sequence_parallel = group, sequence_parallel

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [n, ...], int64 or int32, the same on every rank."""
        if not self.sequence_parallel:
            return super().forward(ids)
        return F.embedding(scatter_to_region(ids, self.group, 0), copy_to_region(self.weight, self.group))
