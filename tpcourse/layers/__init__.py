"""The parallel layers: local matrix products between two collectives."""

from tpcourse.layers.column import ColumnParallelLinear
from tpcourse.layers.embedding import VocabParallelEmbedding
from tpcourse.layers.loss import vocab_parallel_cross_entropy
from tpcourse.layers.row import RowParallelLinear

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding",
           "vocab_parallel_cross_entropy"]
