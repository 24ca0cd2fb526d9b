"""The models, written once: what is cut over ranks, and how, they ask of a scheme."""

from tpcourse.models.attention import Attention
from tpcourse.models.block import Block
from tpcourse.models.gpt import GPT, generate
from tpcourse.models.mlp import MLP
from tpcourse.models.start import initialize_
from tpcourse.models.vit import ViT

__all__ = ["GPT", "MLP", "Attention", "Block", "ViT", "generate", "initialize_"]
