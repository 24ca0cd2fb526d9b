"""The head over a split vocabulary: every rank computes the logits of the entries it holds."""

import torch
from torch import Tensor, nn

from tpcourse.comm import Group, describe
from tpcourse.layers.layout import Layout, check_shared, keep_own
from tpcourse.layers.linear import entering_linear
from tpcourse.layers.vocabulary import dealt, own_entries


class VocabParallelHead(nn.Module):
    """logits_r = X E_r^T, with E split by rows as VocabParallelEmbedding splits it, unevenly where P does not
    divide: what `vocab_parallel_cross_entropy` takes.

    X: [..., in_features], the same on every rank; with `sequence_parallel` [tokens / P, ..., in_features],
    this rank's tokens, and the head gathers them. logits: [..., V_r], of all tokens.
    Per rank: weight [V_r, in_features], where V_1 + ... + V_P = vocab_size and sizes differ by at most one.
    `weight` is a parameter to share instead of an own one: with VocabParallelEmbedding(...).weight the head
    is tied to the embedding, and the parameter's gradient is the sum of both uses.

    The layer draws the whole weight as nn.Linear does and keeps its own rows, and draws it also where
    `weight` then takes its place: random numbers after it are those after nn.Linear without bias.

    Raises ValueError if there are fewer entries than ranks, or `weight` has another shape.
    Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3; tied heads: Press and Wolf 2016,
    arXiv:1608.05859.
    """

    def __init__(self, in_features: int, vocab_size: int, group: Group, *, weight: nn.Parameter | None = None,
                 sequence_parallel: bool = False, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.own = own_entries(vocab_size, group, f"vocab_size={vocab_size}")
        self.in_features, self.vocab_size, self.group = in_features, vocab_size, group
        self.sequence_parallel = sequence_parallel
        keep_own(self, self.layouts(), nn.Linear(in_features, vocab_size, bias=False, dtype=dtype))
        if weight is not None:
            self.weight = check_shared(weight, self.weight, describe(group))

    def layouts(self) -> dict[str, Layout]:
        """Which rows of the whole weight this rank holds."""
        return {"weight": dealt((self.vocab_size, self.in_features), self.own)}

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features], the same on every rank, or with `sequence_parallel` this rank's tokens."""
        return entering_linear(x, self.weight, None, self.group, self.sequence_parallel)

    def extra_repr(self) -> str:
        return f"{self.in_features} features to {self.vocab_size} logits, over {describe(self.group)}"
