"""Two-dimensional tensor parallelism by SUMMA (Optimus), and its 2.5D form with depth (Tesseract)."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpcourse.comm import RandomStates, gather_from_region, group_size, split_sizes
from tpcourse.layers import Dropout
from tpcourse.layers.heads import KVCopies
from tpcourse.layers.layout import block_sizes, block_spans
from tpcourse.layers.loss import loss_of_split_tokens
from tpcourse.layers.split_entrance import SplitEmbedding, SplitInput
from tpcourse.layers.split_norm import SplitLayerNorm, SplitRMSNorm
from tpcourse.schemes.base import placement_on
from tpcourse.schemes.summa import Grid
from tpcourse.schemes.two_d_layers import GridEmbedding, GridHead, GridLinear, GridQKV

NORMS = {"layer": SplitLayerNorm, "rms": SplitRMSNorm}


class TwoD:
    """Tokens over the rows, features over the columns of a mesh q x q; in 2.5D, a mesh q x q x d, tokens also
    over its depth, at which weights are repeated.

    The mesh's dimensions are rows, columns and depth, whatever their names. Outer and inner layouts are one:
    [tokens / (q d), h / q]. A weight's block is 1 / q^2 of it, an activation's 1 / (q^2 d). Every linear is
    three of SUMMA's products, one forward and two backward. `seed` is that of dropout.

    Sequences are whole on a rank: q d must divide the batch. Raises ValueError if the mesh is no such grid;
    when a layer is made, if q does not divide what is split; in forward, if q d does not divide the tokens.
    Source: Xu et al. 2021 (arXiv:2104.05343), section 3; depth: Wang et al. 2021 (arXiv:2105.14500),
    section 3.
    """

    def __init__(self, mesh: DeviceMesh, seed: int = 0) -> None:
        self.grid = Grid.of(mesh)
        rows, columns, *depth = mesh.mesh_dim_names
        self.group, self.outer = self.grid.ranks, placement_on(mesh, [rows, *depth], [columns])
        self.random, self._copies = RandomStates(seed, self.group), KVCopies(self.grid.columns)
        self.batch_ranks = group_size(self.grid.tokens)

    def entering_linear(self, in_features: int, out_features: int, bias: bool = True,
                        stride: int | Sequence[int] = 1) -> nn.Module:
        spans = block_spans(block_sizes(out_features, stride, self.grid.columns), self.grid.columns)
        return GridLinear(in_features, out_features, self.grid, spans, bias)

    def leaving_linear(self, in_features: int, out_features: int, bias: bool = True) -> nn.Module:
        return self.entering_linear(in_features, out_features, bias)

    def qkv_linear(self, in_features: int, head_dim: int, num_heads: int, num_kv_heads: int,
                   bias: bool = True) -> nn.Module:
        return GridQKV(in_features, head_dim, num_heads, num_kv_heads, self.grid, self._copies, bias)

    def local_heads(self, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
        size = group_size(self.grid.columns)
        return num_heads // size, max(num_kv_heads // size, 1)  # fewer than columns: each holds a copy of one

    def embedding(self, num_embeddings: int, dim: int) -> nn.Module:
        return GridEmbedding(num_embeddings, dim, self.grid)

    def position_embedding(self, num_positions: int, dim: int) -> nn.Module:
        return SplitEmbedding(num_positions, dim, self.grid.columns, self.grid.tokens)

    def input_linear(self, in_features: int, out_features: int) -> nn.Module:
        return SplitInput(in_features, out_features, self.grid.columns, self.grid.tokens)

    def norm(self, dim: int, kind: str) -> nn.Module:
        return NORMS[kind](dim, self.grid.columns, self.grid.tokens)

    def dropout(self, p: float, inner: bool) -> nn.Module:
        return Dropout(p, self.random, sharded=True)

    def head(self, dim: int, vocab_size: int, embedding: nn.Module | None = None) -> nn.Module:
        return GridHead(dim, vocab_size, self.grid, None if embedding is None else embedding.weight)

    def loss(self, logits: Tensor, target: Tensor, vocab_size: int) -> Tensor:
        return loss_of_split_tokens(logits, target, self.grid.columns, self.grid.tokens, vocab_size)

    def gather_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        sizes = split_sizes(vocab_size, group_size(self.grid.columns))
        tokens = gather_from_region(logits.detach(), self.grid.columns, -1, sizes)
        return gather_from_region(tokens, self.grid.tokens, 0)
