"""The layers of SUMMA's grid: linear maps, the vocabulary's table and its head, all in q x q blocks."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from tpcourse.comm import (copy_to_region, describe, even_sizes, group_rank, group_size, my_slice,
                           reduce_scatter, split_sizes)
from tpcourse.layers.heads import KVCopies, SumCopies, check_heads, my_heads
from tpcourse.layers.layout import Layout, Piece, check_shared, keep_own, split_along
from tpcourse.layers.vocabulary import check_ids, locate, own_entries
from tpcourse.schemes.summa import Grid, abt, multiply


class GridLinear(nn.Module):
    """Y = X A + b on the grid, where all lie in blocks: SUMMA's A B, with A B^T for dX and A^T B for dA.

    X: [tokens / (q d), in_features / q]. Y: [tokens / (q d), out_features / q]. Tokens are split over rows
    and depth, features over columns. Per rank: weight [out_features / q, in_features / q] (torch stores A
    transposed), where inputs are split over rows, outputs over columns; bias [out_features / q], the same on
    all rows; both the same at every depth.
    `spans` says which outputs a column of the grid computes: one span or several, such as those of its gate
    and its up projection; `owned`, which of them it answers for if other columns compute them too.

    The layer draws the whole weight as nn.Linear does and keeps its block, as all layers of this scheme do.

    Raises ValueError if q does not divide in_features; in forward, if X has other features.
    Source: Xu et al. 2021 (arXiv:2104.05343), section 3.2; depth: Wang et al. 2021 (arXiv:2105.14500).
    """

    def __init__(self, in_features: int, out_features: int, grid: Grid, spans: Sequence[slice],
                 bias: bool = True, *, owned: Sequence[bool] | None = None) -> None:
        super().__init__()
        even_sizes(in_features, grid.rows, f"in_features={in_features}")
        self.in_features, self.out_features, self.grid = in_features, out_features, grid
        self.spans, self.owned = spans, owned or [True] * len(spans)
        keep_own(self, self.layouts(), nn.Linear(in_features, out_features, bias))

    def layouts(self) -> dict[str, Layout]:
        """Which block of the whole weight and entries of the whole bias this rank holds."""
        inputs, first = my_slice(self.in_features, self.grid.rows), group_rank(self.grid.tokens) == 0
        owned = [own and first for own in self.owned]
        shape = self.out_features, self.in_features
        return {"weight": block(shape, self.spans, inputs, self.grid, self.owned),
                "bias": split_along(0, shape[:1], self.spans, owned)}

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens / (q d), in_features / q]."""
        return self._linear(x, self.weight, self.bias)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        check_block(x, self.in_features, self.grid)
        y = multiply(x, weight.mT, self.grid)
        return y if bias is None else y + copy_to_region(bias, self.grid.tokens).to(y.dtype)  # under autocast

    def extra_repr(self) -> str:
        return (f"{self.in_features} to {self.out_features} features, bias={self.bias is not None}, over "
                f"{describe(self.grid.rows)} and {describe(self.grid.columns)}")


class GridQKV(GridLinear):
    """A GridLinear to queries, keys and values: a column of the grid computes those of its heads, q | k | v.

    Result: [tokens / (q d), (num_heads / q + 2 kv_here) head_dim], with kv_here = num_kv_heads / q; where
    there are fewer KV heads than columns it is 1, and q / num_kv_heads consecutive columns hold a copy of the
    same KV head, whose gradients backward sums.

    All ranks construct it together. Raises ValueError if q does not divide num_heads, num_kv_heads does not
    divide num_heads, or of num_kv_heads and q neither divides the other.
    """

    def __init__(self, in_features: int, head_dim: int, num_heads: int, num_kv_heads: int, grid: Grid,
                 copies: KVCopies, bias: bool = True) -> None:
        check_heads(num_heads, num_kv_heads, grid.columns)
        spans = [slice(head_dim * heads.start, head_dim * heads.stop)
                 for heads in my_heads(num_heads, num_kv_heads, grid.columns)]
        same = copies.of(num_kv_heads)
        first = same is None or group_rank(same) == 0
        super().__init__(in_features, head_dim * (num_heads + 2 * num_kv_heads), grid, spans, bias,
                         owned=[True, first, first])
        self.copies = same

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens / (q d), in_features / q]."""
        return self._linear(x, self._shared(self.weight), self._shared(self.bias))

    def _shared(self, parameter: Tensor | None) -> Tensor | None:
        """The parameter, whose rows of keys and values get the gradients of all their copies."""
        if self.copies is None or parameter is None:
            return parameter
        queries = self.spans[0].stop - self.spans[0].start
        return SumCopies.apply(parameter, queries, self.copies)


class _GridTable(nn.Module):
    """A table with one row an entry of the vocabulary: entries over rows, as evenly as can be, features over
    columns, the same at every depth."""

    def __init__(self, vocab_size: int, dim: int, grid: Grid, what: str) -> None:
        super().__init__()
        even_sizes(dim, grid.columns, f"dim={dim}")
        self.own = own_entries(vocab_size, grid.rows, f"{what}={vocab_size}")
        self.vocab_size, self.dim, self.grid = vocab_size, dim, grid

    def layouts(self) -> dict[str, Layout]:
        """Which block of the whole table this rank holds."""
        entries, features = slice(self.own.start, self.own.stop), my_slice(self.dim, self.grid.columns)
        return {"weight": block((self.vocab_size, self.dim), [entries], features, self.grid)}

    def extra_repr(self) -> str:
        return (f"{self.vocab_size} entries of {self.dim} features, over {describe(self.grid.rows)} and "
                f"{describe(self.grid.columns)}")


class GridEmbedding(_GridTable):
    """Y = E[ids] on the grid: every rank looks up the ids it holds, and each column adds up.

    ids: [tokens], the same on every rank. Y: [tokens / (q d), dim / q]. Per rank: weight [V_i, dim / q],
    where V_1 + ... + V_q = num_embeddings and sizes differ by at most one. Forward is a reduce-scatter, along
    the column, of the tokens at this depth; backward an all-gather, and the gradient's sum over depth.

    Raises ValueError if q does not divide dim, or there are fewer embeddings than q; in forward, if q d does
    not divide the tokens, and for an id outside the vocabulary (on the CPU).
    """

    def __init__(self, num_embeddings: int, dim: int, grid: Grid) -> None:
        super().__init__(num_embeddings, dim, grid, "num_embeddings")
        keep_own(self, self.layouts(), nn.Embedding(num_embeddings, dim))

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [tokens], int64 or int32, the same on every rank."""
        check_ids(ids, self.vocab_size, "ids")
        local, elsewhere = locate(at_my_depth(ids, self.grid), self.own)  # [tokens / d]
        depth = self.grid.depth
        weight = self.weight if depth is None else copy_to_region(self.weight, depth)
        y = F.embedding(local, weight).masked_fill(elsewhere.unsqueeze(-1), 0)  # [tokens / d, dim / q]
        return reduce_scatter(y, self.grid.rows, 0)  # [tokens / (q d), dim / q]


class GridHead(_GridTable):
    """logits = X E^T on the grid: SUMMA's A B^T, so that E lies as in GridEmbedding and can be its table.

    X: [tokens / (q d), dim / q]. logits: [tokens / (q d), V_j], vocabulary over columns. Per rank: weight
    [V_i, dim / q], where V_1 + ... + V_q = vocab_size and sizes differ by at most one.
    `weight` is a parameter to share instead of an own one, such as a GridEmbedding's.

    Raises ValueError if q does not divide dim, there are fewer entries than q, or `weight` has another shape.
    """

    def __init__(self, dim: int, vocab_size: int, grid: Grid, weight: nn.Parameter | None = None) -> None:
        super().__init__(vocab_size, dim, grid, "vocab_size")
        keep_own(self, self.layouts(), nn.Linear(dim, vocab_size, bias=False))
        if weight is not None:
            over = f"{describe(grid.rows)} and {describe(grid.columns)}"
            self.weight = check_shared(weight, self.weight, over)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens / (q d), dim / q]."""
        check_block(x, self.dim, self.grid)
        sizes = split_sizes(self.vocab_size, group_size(self.grid.rows))
        return multiply(x, self.weight, self.grid, abt, sizes)


def block(shape: Sequence[int], spans: Sequence[slice], columns: slice, grid: Grid,
          owned: Sequence[bool] | None = None) -> Layout:
    """The rows in `spans`, one after the other, of the whole's `columns`; the first depth owns them."""
    first = grid.depth is None or group_rank(grid.depth) == 0
    width, pieces, start = slice(0, columns.stop - columns.start), [], 0
    for span, own in zip(spans, owned or [True] * len(spans)):
        stop = start + span.stop - span.start
        pieces.append(Piece((slice(start, stop), width), (span, columns), own and first))
        start = stop
    return Layout(tuple(shape), tuple(pieces))


def check_block(x: Tensor, features: int, grid: Grid) -> None:
    """Raises ValueError if x is not [tokens, this rank's features]."""
    own = features // group_size(grid.columns)
    if x.dim() != 2 or x.size(1) != own:
        raise ValueError(f"x has shape {tuple(x.shape)}, not (tokens, {own}), for {features} features over "
                         f"{describe(grid.columns)}; pass this rank's features")


def at_my_depth(x: Tensor, grid: Grid) -> Tensor:
    """Of what all ranks hold of all tokens, that of the tokens at this rank's depth: [tokens / d, ...].

    Raises ValueError if q d does not divide the tokens.
    """
    even_sizes(len(x), grid.tokens, f"a first dimension of {len(x)} tokens")
    if grid.depth is None:
        return x
    shares = x.unflatten(0, (group_size(grid.rows), group_size(grid.depth), -1))  # [q, d, n, ...]
    return shares[:, group_rank(grid.depth)].flatten(0, 1)
