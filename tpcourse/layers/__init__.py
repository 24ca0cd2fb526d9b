"""The parallel layers: local matrix products between two collectives."""

from tpcourse.layers.attention import core_attention, flash_attention
from tpcourse.layers.column import ColumnParallelLinear
from tpcourse.layers.dropout import Dropout
from tpcourse.layers.embedding import VocabParallelEmbedding
from tpcourse.layers.loss import vocab_parallel_cross_entropy
from tpcourse.layers.norm import LayerNorm, RMSNorm
from tpcourse.layers.recompute import recompute
from tpcourse.layers.rotary import apply_rotary
from tpcourse.layers.row import RowParallelLinear

__all__ = ["ColumnParallelLinear", "Dropout", "LayerNorm", "RMSNorm", "RowParallelLinear",
           "VocabParallelEmbedding", "apply_rotary", "core_attention", "flash_attention", "recompute",
           "vocab_parallel_cross_entropy"]
