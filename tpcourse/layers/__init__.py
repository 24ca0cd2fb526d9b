"""The parallel layers: local matrix products between two collectives."""

from tpcourse.layers.attention import core_attention, flash_attention
from tpcourse.layers.clip import clip_grad_norm_
from tpcourse.layers.column import ColumnParallelLinear
from tpcourse.layers.dropout import Dropout
from tpcourse.layers.embedding import VocabParallelEmbedding
from tpcourse.layers.head import VocabParallelHead
from tpcourse.layers.layout import Layout, Piece, model_layouts
from tpcourse.layers.linear import entering_linear
from tpcourse.layers.loss import vocab_parallel_cross_entropy
from tpcourse.layers.norm import LayerNorm, RMSNorm
from tpcourse.layers.qkv import QKVParallelLinear
from tpcourse.layers.recompute import recompute
from tpcourse.layers.rotary import apply_rotary
from tpcourse.layers.row import RowParallelLinear

__all__ = ["ColumnParallelLinear", "Dropout", "LayerNorm", "Layout", "Piece", "QKVParallelLinear", "RMSNorm",
           "RowParallelLinear", "VocabParallelEmbedding", "VocabParallelHead", "apply_rotary",
           "clip_grad_norm_", "core_attention", "entering_linear", "flash_attention", "model_layouts",
           "recompute", "vocab_parallel_cross_entropy"]
