"""An embedding over a split vocabulary: every rank looks up the ids it holds, and the sum has them all."""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcourse.comm import Group, describe, reduce_from_region, reduce_scatter
from tpcourse.layers.layout import Layout, keep_own
from tpcourse.layers.linear import check_tokens
from tpcourse.layers.vocabulary import check_ids, dealt, locate, own_entries


class VocabParallelEmbedding(nn.Module):
    """Y = E[ids] with E split by rows: each id is looked up on the rank that holds it, the others add zeros.

    ids: [...], the same on every rank. Y: [..., embedding_dim] on every rank, for use that is the same on all
    of them; with `sequence_parallel` [tokens / P, ..., embedding_dim], this rank's tokens of it.
    Per rank: weight [V_r, embedding_dim], where V_1 + ... + V_P = num_embeddings and sizes differ by at most
    one. `padding_idx` counts in the whole vocabulary: its row starts as zeros and gets no gradient.

    The layer draws the whole table as nn.Embedding does and keeps its own rows: after the same
    torch.manual_seed on every rank, the P ranks together hold exactly what nn.Embedding holds in one process.

    Raises ValueError if there are fewer embeddings than ranks, if padding_idx is not one of them, for
    max_norm and scale_grad_by_freq, if `sequence_parallel` finds tokens that P does not divide, and for an id
    outside the vocabulary (on the CPU; on a GPU its row of Y is zeros, as looking at values there would make
    every call wait for the device).
    Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, group: Group, padding_idx: int | None = None,
                 max_norm: float | None = None, scale_grad_by_freq: bool = False, *,
                 sequence_parallel: bool = False, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.own = own_entries(num_embeddings, group, f"num_embeddings={num_embeddings}")
        _refuse(max_norm, scale_grad_by_freq)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx={padding_idx} is not one of num_embeddings={num_embeddings}; "
                             f"count in the whole vocabulary, 0 to {num_embeddings - 1}, or back from -1")
        self.num_embeddings, self.embedding_dim, self.group = num_embeddings, embedding_dim, group
        self.sequence_parallel = sequence_parallel
        self._keep_own_rows(nn.Embedding(num_embeddings, embedding_dim, padding_idx, dtype=dtype))

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, group: Group, *,
                       sequence_parallel: bool = False) -> Self:
        """This rank's part of a table that every rank holds whole; the weight is a copy."""
        with torch.device("meta"):  # draws no random numbers and takes no memory
            layer = cls(embedding.num_embeddings, embedding.embedding_dim, group, embedding.padding_idx,
                        embedding.max_norm, embedding.scale_grad_by_freq, sequence_parallel=sequence_parallel)
        layer._keep_own_rows(embedding)
        return layer

    def _keep_own_rows(self, whole: nn.Embedding) -> None:
        self.padding_idx = whole.padding_idx  # nn.Embedding has counted a negative one from the start
        self.own_padding_idx = self.own.index(self.padding_idx) if self.padding_idx in self.own else None
        keep_own(self, self.layouts(), whole)

    def layouts(self) -> dict[str, Layout]:
        """Which rows of the whole table this rank holds."""
        return {"weight": dealt((self.num_embeddings, self.embedding_dim), self.own)}

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [...], int64 or int32, the same on every rank."""
        check_ids(ids, self.num_embeddings, "ids")
        if self.sequence_parallel:
            check_tokens((*ids.shape, self.embedding_dim), self.group)
        local, elsewhere = locate(ids, self.own)
        y = F.embedding(local, self.weight, self.own_padding_idx)  # [..., dim], wrong for other ranks' ids
        y = y.masked_fill(elsewhere.unsqueeze(-1), 0)
        if self.sequence_parallel:
            return reduce_scatter(y, self.group, 0)  # [tokens / P, ..., dim]
        return reduce_from_region(y, self.group)

    def extra_repr(self) -> str:
        return (f"{self.num_embeddings} embeddings of {self.embedding_dim}, padding_idx={self.padding_idx}, "
                f"over {describe(self.group)}")


def _refuse(max_norm: float | None, scale_grad_by_freq: bool) -> None:
    if max_norm is not None:
        raise ValueError(f"max_norm={max_norm} rewrites the rows that are looked up, and here other ranks' "
                         "ids look up row 0; clip the rows of `weight` after the optimizer's step instead")
    if scale_grad_by_freq:
        raise ValueError("scale_grad_by_freq=True counts how often a row is looked up, and here other ranks' "
                         "ids look up row 0; divide the rows of `weight.grad` by the ids' counts instead")
