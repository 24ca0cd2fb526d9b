"""Small layers at the model's entrance: features are split over ranks, and so are the tokens."""

import torch.nn.functional as F
from torch import Tensor, nn

from tpcourse.comm import (Group, copy_to_region, describe, even_sizes, group_rank, group_size, my_slice,
                           scatter_to_region)
from tpcourse.layers.layout import Layout, keep_own, split_along


class _SplitEntrance(nn.Module):
    """What the two layers share: parameters split over `features`, their gradients summed over `tokens`."""

    def __init__(self, features: Group, tokens: Group, copies: Group | None, dims: dict[str, int],
                 whole: nn.Module) -> None:
        super().__init__()
        self.features, self.tokens, self.copies = features, tokens, copies or tokens
        self.dims, self.shapes = dims, {name: tuple(p.shape) for name, p in whole.named_parameters()}
        keep_own(self, self.layouts(), whole)

    def layouts(self) -> dict[str, Layout]:
        """Which features' parameters this rank holds; of those that hold the same the first owns them."""
        first = group_rank(self.copies) == 0
        own = {name: my_slice(self.shapes[name][dim], self.features) for name, dim in self.dims.items()}
        return {name: split_along(dim, self.shapes[name], [own[name]], [first])
                for name, dim in self.dims.items()}

    def _own(self, x: Tensor) -> Tensor:
        """This rank's tokens of x, which every rank holds."""
        even_sizes(len(x), self.tokens, f"a first dimension of {len(x)} tokens")
        return x if group_size(self.tokens) == 1 else scatter_to_region(x, self.tokens, 0)

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name} of {shape}" for name, shape in self.shapes.items())
        return f"{shapes}, features over {describe(self.features)}, tokens over {describe(self.tokens)}"


class SplitInput(_SplitEntrance):
    """Y = X A + b for data that every rank holds: each computes its features of its tokens.

    X: [n, ..., in_features], the same on every rank. Y: [n / T, ..., out_features / P] of the T ranks of
    `tokens` and the P of `features`. Per rank: weight [out_features / P, in_features], bias
    [out_features / P], the same on all of `tokens`, over which backward sums their gradients. `copies`: all
    ranks that hold the same parameters, if more do than those of `tokens`.

    Raises ValueError if P does not divide out_features; in forward, if T does not divide n.
    """

    def __init__(self, in_features: int, out_features: int, features: Group, tokens: Group,
                 copies: Group | None = None) -> None:
        even_sizes(out_features, features, f"out_features={out_features}")
        whole = nn.Linear(in_features, out_features)
        super().__init__(features, tokens, copies, {"weight": 0, "bias": 0}, whole)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, ..., in_features], the same on every rank."""
        x = self._own(copy_to_region(x, self.features))
        return F.linear(x, *(copy_to_region(p, self.tokens) for p in (self.weight, self.bias)))


class SplitEmbedding(_SplitEntrance):
    """Y = E[ids] for small tables such as positions: each rank holds its features of all rows.

    ids: [n, ...], the same on every rank. Y: [n / T, ..., embedding_dim / P] of the T ranks of `tokens` and
    the P of `features`. Per rank: weight [num_embeddings, embedding_dim / P], the same on all of `tokens`,
    over which backward sums its gradient. `copies`: as in `SplitInput`.

    Raises ValueError if P does not divide embedding_dim; in forward, if T does not divide n.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, features: Group, tokens: Group,
                 copies: Group | None = None) -> None:
        even_sizes(embedding_dim, features, f"embedding_dim={embedding_dim}")
        whole = nn.Embedding(num_embeddings, embedding_dim)
        super().__init__(features, tokens, copies, {"weight": 1}, whole)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [n, ...], int64 or int32, the same on every rank."""
        return F.embedding(self._own(ids), copy_to_region(self.weight, self.tokens))
