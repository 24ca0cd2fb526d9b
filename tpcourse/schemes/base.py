"""What a model asks of a scheme: the modules that meet other ranks, and how tokens are dealt."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpcourse.comm import Group, Placement, RandomStates


class Scheme(Protocol):
    """One way to cut a model over the ranks of `group`. The model, written once, asks for its parts here.

    Activations are [tokens, features], tokens = batch * sequence, batch-major. A scheme lays them out in two
    ways: outer, that of the residual stream: norms, embeddings, dropout of a block's results; and inner,
    between an entering and a leaving linear: heads, the MLP's hidden units, the logits and their targets. In
    the inner layout sequences are whole. T and h are the tokens and features that a rank holds in the outer
    layout, T' and h' in the inner one; in one process they are all.

    The parts draw their numbers as torch's own do, whole, in one order: after the same torch.manual_seed
    the ranks together hold what `Dense` holds in one process.
    """

    group: Group | None  # all ranks that hold a part of the model; None: one process
    random: RandomStates  # where dropout draws from
    outer: Placement  # which block of an outer activation each rank of `group` holds
    batch_ranks: int  # over how many ranks the inner layout splits tokens: they must divide the batch

    def entering_linear(self, in_features: int, out_features: int, bias: bool = True,
                        stride: int | Sequence[int] = 1) -> nn.Module:
        """Outer to inner. `stride`: how many blocks, or of which sizes, lie side by side in the output."""

    def leaving_linear(self, in_features: int, out_features: int, bias: bool = True) -> nn.Module:
        """Inner to outer."""

    def qkv_linear(self, in_features: int, head_dim: int, num_heads: int, num_kv_heads: int,
                   bias: bool = True) -> nn.Module:
        """Outer to inner: the queries, keys and values of this rank's heads, q | k | v, in one tensor."""

    def local_heads(self, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
        """How many query heads and how many key-value heads a rank holds in the inner layout."""

    def embedding(self, num_embeddings: int, dim: int) -> nn.Module:
        """The vocabulary's table: ids of all tokens [tokens], the same on every rank, to the outer layout."""

    def position_embedding(self, num_positions: int, dim: int) -> nn.Module:
        """A small table: positions of all tokens [tokens] to the outer layout."""

    def input_linear(self, in_features: int, out_features: int) -> nn.Module:
        """A linear on data: [tokens, in_features], the same on every rank, to the outer layout."""

    def norm(self, dim: int, kind: str) -> nn.Module:
        """`kind` "layer" or "rms"; outer to outer."""

    def dropout(self, p: float, inner: bool) -> nn.Module:
        """Dropout of inner or of outer activations."""

    def head(self, dim: int, vocab_size: int, embedding: nn.Module | None = None) -> nn.Module:
        """Outer to inner logits. With `embedding`, one of this scheme, its table is the head's weight."""

    def loss(self, logits: Tensor, target: Tensor, vocab_size: int) -> Tensor:
        """Mean cross-entropy, the same on every rank. target: of all tokens, -100 where none counts."""

    def gather_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Inner logits to [tokens, vocab_size] on every rank, for sampling; no gradient."""


def placement_on(mesh: DeviceMesh, tokens: Sequence[str], features: Sequence[str]) -> Placement:
    """Of tokens cut over some of the mesh's dimensions and features over others.

    Raises ValueError unless the ranks ascend along the mesh: any group counts its ranks in ascending order.
    """
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(f"the mesh has its ranks in the order {ranks}; make one of {sorted(ranks)}, the last "
                         "dimension varying fastest, as init_device_mesh does")
    return Placement.on(dict(zip(mesh.mesh_dim_names, mesh.shape)), tokens, features)
