"""Three-dimensional tensor parallelism: every linear on a mesh i x j x l, in which j and l swap roles."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpcourse.comm import (Group, RandomStates, describe, even_sizes, gather_from_region, group_rank,
                           group_size, my_slice, split_sizes)
from tpcourse.layers import Dropout
from tpcourse.layers.heads import KVCopies, SumCopies, check_heads, my_heads
from tpcourse.layers.layout import Layout, block_sizes, block_spans, keep_own
from tpcourse.layers.linear import leave_region
from tpcourse.layers.loss import loss_of_split_tokens
from tpcourse.layers.split_entrance import SplitEmbedding, SplitInput
from tpcourse.layers.split_norm import SplitLayerNorm, SplitRMSNorm
from tpcourse.layers.vocabulary import check_ids, locate
from tpcourse.schemes.base import placement_on
from tpcourse.schemes.cube import (Axes, CubeLinear, check_leaving, cube_linear, gather_stored,
                                   own_words, stored)

NORMS = {"layer": SplitLayerNorm, "rms": SplitRMSNorm}


class ThreeD:
    """Tokens, features and weights are split over a mesh of three dimensions, i x j x l, any sizes.

    Outer: [tokens / (i j), h / l]. Inner: [tokens / (i l), h' / j] in whole sequences: i l must divide the
    batch.
    Weights: [out / j, in / l] of an entering linear, [out / l, in / j] of a leaving one; of these rows each
    rank along i stores a part.
    `leave`: "reduce_scatter", as above; with "all_reduce" tokens are split over i only. Outer is then
    [tokens / i, h / l], the same on all of j; inner [tokens / i, h' / j], the same on all of l, and i must
    divide the batch.
    `keep_gathered`: what linears gather, tokens over j or l and weights over i, is kept for backward: on
    q x q x q, 1/q^2 of their inputs and weights. Without it backward gathers again, and 1/q^3 is kept.
    `seed` is that of dropout.

    1 x P x 1 is Megatron-LM's tensor parallelism, with sequence parallelism if `leave` is "reduce_scatter";
    P x 1 x 1 is fully sharded data parallelism, which usually gathers again.

    Raises ValueError for a mesh without three named dimensions and another `leave`; when a layer is made, if
    a feature dimension does not split; in forward, if the tokens do not.
    Source: Bian et al. 2021 (arXiv:2105.14450), section 3; fully sharded: Zhao et al. 2023
    (arXiv:2304.11277).
    """

    def __init__(self, mesh: DeviceMesh, leave: str = "reduce_scatter", keep_gathered: bool = True,
                 seed: int = 0) -> None:
        names = mesh.mesh_dim_names or ()
        if len(names) != 3:
            raise ValueError(f"the mesh has the named dimensions {names}, not three; make one such as "
                             "init_device_mesh('cpu', (2, 2, 2), mesh_dim_names=('i', 'j', 'l'))")
        if leave not in ("reduce_scatter", "all_reduce"):
            raise ValueError(f"leave={leave!r} is not one of 'reduce_scatter', 'all_reduce'")
        i, j, l = names
        scatter = leave == "reduce_scatter"
        self.entering = Axes(mesh[i], mesh[j], mesh[l], scatter, keep_gathered)
        self.leaving = self.entering.swapped()
        self.group, self.outer = _join(mesh, names), placement_on(mesh, [i, j] if scatter else [i], [l])
        over_ij, over_il = _join(mesh, (i, j)), _join(mesh, (i, l))
        if scatter:
            outer_tokens, self.inner_tokens = over_ij, over_il
            self.random = RandomStates(seed, self.group)
        else:  # an outer activation has a shard for each (i, l), an inner one for each (i, j)
            outer_tokens = self.inner_tokens = mesh[i]
            self.random = RandomStates(seed, over_ij, shards=over_il)
        self.batch_ranks, self._copies = group_size(self.inner_tokens), KVCopies(mesh[j])
        # What norms and the entrance are told: features, tokens, and who holds the same parameters.
        self._outer = {"features": mesh[l], "tokens": outer_tokens, "copies": over_ij}

    def entering_linear(self, in_features: int, out_features: int, bias: bool = True,
                        stride: int | Sequence[int] = 1) -> nn.Module:
        rows = block_spans(block_sizes(out_features, stride, self.entering.enter), self.entering.enter)
        return CubeLinear(in_features, out_features, self.entering, rows, bias)

    def leaving_linear(self, in_features: int, out_features: int, bias: bool = True) -> nn.Module:
        rows = block_spans(block_sizes(out_features, 1, self.leaving.enter), self.leaving.enter)
        return CubeLinear(in_features, out_features, self.leaving, rows, bias)

    def qkv_linear(self, in_features: int, head_dim: int, num_heads: int, num_kv_heads: int,
                   bias: bool = True) -> nn.Module:
        return CubeQKV(in_features, head_dim, num_heads, num_kv_heads, self.entering, self._copies, bias)

    def local_heads(self, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
        size = group_size(self.entering.enter)
        return num_heads // size, max(num_kv_heads // size, 1)  # fewer than ranks: each holds a copy of one

    def embedding(self, num_embeddings: int, dim: int) -> nn.Module:
        return CubeEmbedding(num_embeddings, dim, self.leaving)

    def position_embedding(self, num_positions: int, dim: int) -> nn.Module:
        return SplitEmbedding(num_positions, dim, **self._outer)

    def input_linear(self, in_features: int, out_features: int) -> nn.Module:
        return SplitInput(in_features, out_features, **self._outer)

    def norm(self, dim: int, kind: str) -> nn.Module:
        return NORMS[kind](dim, **self._outer)

    def dropout(self, p: float, inner: bool) -> nn.Module:
        return Dropout(p, self.random, sharded=inner or self.entering.scatter)

    def head(self, dim: int, vocab_size: int, embedding: nn.Module | None = None) -> nn.Module:
        own = own_words(vocab_size, self.entering.enter, self.entering.storage, f"vocab_size={vocab_size}")
        return CubeLinear(dim, vocab_size, self.entering, [slice(own.start, own.stop)], bias=False,
                          weight=None if embedding is None else embedding.weight)

    def loss(self, logits: Tensor, target: Tensor, vocab_size: int) -> Tensor:
        return loss_of_split_tokens(logits, target, self.entering.enter, self.inner_tokens, vocab_size)

    def gather_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        columns = split_sizes(vocab_size, group_size(self.entering.enter))
        logits = gather_from_region(logits.detach(), self.entering.enter, -1, columns)
        return gather_from_region(logits, self.inner_tokens, 0)


def _join(mesh: DeviceMesh, names: Sequence[str]) -> Group:
    """One group of the ranks along these dimensions; those of size 1 do not count."""
    names = [name for name in names if mesh[name].size() > 1] or names[:1]
    return mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]._flatten("_".join(names))


class CubeQKV(CubeLinear):
    """[Q | K | V] = X W^T + b, entering: heads over j, and the rows of this rank's Q, K and V stored over i.

    X: [tokens / (i j), in_features / l]. Result: [tokens / (i l), (num_heads / j + 2 kv_here) head_dim], this
    rank's queries, then its keys, then its values; which those are, also where there are fewer KV heads than
    ranks along j, is said in `QKVParallelLinear`.

    Raises ValueError if j does not divide num_heads, num_kv_heads does not divide num_heads, of num_kv_heads
    and j neither divides the other, and what `CubeLinear` does.
    """

    def __init__(self, in_features: int, head_dim: int, num_heads: int, num_kv_heads: int, axes: Axes,
                 copies: KVCopies, bias: bool = True) -> None:
        check_heads(num_heads, num_kv_heads, axes.enter)
        same = copies.of(num_kv_heads)
        first = same is None or group_rank(same) == 0
        rows = [slice(heads.start * head_dim, heads.stop * head_dim)
                for heads in my_heads(num_heads, num_kv_heads, axes.enter)]
        super().__init__(in_features, (num_heads + 2 * num_kv_heads) * head_dim, axes, rows, bias,
                         owned=[True, first, first])
        self.copies, self.queries = same, rows[0].stop - rows[0].start

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens / (i j), in_features / l]."""
        self._check(x)
        return cube_linear(x, self._shared(self.weight), self._shared(self.bias), self.axes, self.rows)

    def _shared(self, parameter: Tensor | None) -> Tensor | None:
        """The parameter, whose rows of keys and values get the gradients of all their copies."""
        own = my_slice(self.rows, self.axes.storage, split_sizes(self.rows, group_size(self.axes.storage)))
        if self.copies is None or parameter is None or own.stop <= self.queries:
            return parameter
        return SumCopies.apply(parameter, max(self.queries - own.start, 0), self.copies)


class CubeEmbedding(nn.Module):
    """Y = E[ids]: a leaving linear on one-hot rows, which nobody builds, as every rank has the ids.

    ids: [tokens], the same on every rank. Y: outer, [tokens / (i j), dim / l]; without `scatter`
    [tokens / i, dim / l], the same on all of j. `axes` are a leaving linear's: enter is l, leave is j.
    Per rank: weight [V_ji, dim / l]: the vocabulary over j, and of those entries a part over i, both as
    evenly as can be.

    Raises ValueError if there are fewer embeddings than ranks of j times i, or l does not divide dim; in
    forward, for tokens that do not split and (on the CPU) an id outside the vocabulary.
    Source: Bian et al. 2021, arXiv:2105.14450, section 3.
    """

    def __init__(self, num_embeddings: int, dim: int, axes: Axes) -> None:
        super().__init__()
        self.own = own_words(num_embeddings, axes.leave, axes.storage, f"num_embeddings={num_embeddings}")
        even_sizes(dim, axes.enter, f"dim={dim}")
        self.num_embeddings, self.dim, self.axes = num_embeddings, dim, axes
        keep_own(self, self.layouts(), nn.Embedding(num_embeddings, dim))

    def layouts(self) -> dict[str, Layout]:
        """Which block of the whole table this rank holds."""
        rows, columns = slice(self.own.start, self.own.stop), my_slice(self.dim, self.axes.enter)
        return {"weight": stored((self.num_embeddings, self.dim), [rows], [True], self.axes.storage, columns)}

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [tokens], int64 or int32, the same on every rank."""
        check_ids(ids, self.num_embeddings, "ids")
        even_sizes(len(ids), self.axes.storage, f"a first dimension of {len(ids)} tokens")
        ids = ids[my_slice(len(ids), self.axes.storage)]  # [tokens / i]
        if self.axes.scatter:
            check_leaving(len(ids), self.axes)
        local, elsewhere = locate(ids, self.own)
        y = F.embedding(local, gather_stored(self.weight, self.axes, len(self.own)))  # [tokens / i, dim / l]
        y = y.masked_fill(elsewhere[:, None], 0)
        return leave_region(y, None, self.axes.leave, self.axes.scatter)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings} embeddings of {self.dim} over {describe(self.axes.leave)}"
