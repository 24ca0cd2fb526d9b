"""A small vision transformer: an image is a sequence of patches, its class one of the head's few words."""

import torch
from einops import rearrange
from torch import Tensor, nn

from tpcourse.models.block import Block
from tpcourse.models.start import initialize_
from tpcourse.schemes import Scheme


class ViT(nn.Module):
    """Classifies square images of `image` pixels a side, cut into square patches of `patch` pixels a side.

    The class is read off the mean over patches. It is taken after the head, which is linear: there sequences
    are whole in every scheme. What else a block can be told goes to all of them.

    Raises ValueError if `patch` does not divide `image`, and what the scheme raises for sizes it cannot
    split.
    Source: Dosovitskiy et al. 2020 (arXiv:2010.11929), section 3.1, with the mean in place of a class token.
    """

    def __init__(self, scheme: Scheme, classes: int, image: int, patch: int, dim: int, num_layers: int,
                 num_heads: int, *, channels: int = 1, norm: str = "layer", dropout: float = 0.0,
                 seed: int = 0, **block: object) -> None:
        super().__init__()
        if image % patch:
            raise ValueError(f"image={image} is not divisible by patch={patch}; pad to "
                             f"{image + -image % patch}")
        self.scheme, self.classes = scheme, classes
        self.patch, self.sequence = patch, (image // patch) ** 2
        self.patches = scheme.input_linear(channels * patch**2, dim)
        self.positions = scheme.position_embedding(self.sequence, dim)
        self.dropout = scheme.dropout(dropout, inner=False)
        self.blocks = nn.ModuleList(
            Block(scheme, dim, num_heads, norm=norm, causal=False, dropout=dropout, **block)
            for _ in range(num_layers))
        self.norm = scheme.norm(dim, norm)
        self.head = scheme.head(dim, classes)
        initialize_(self, scheme.group, num_layers, seed)

    def forward(self, images: Tensor) -> Tensor:
        """images: [batch, channels, image, image], the same on every rank. Result: inner logits."""
        cut = rearrange(images, "b c (y p) (x q) -> (b y x) (c p q)", p=self.patch, q=self.patch)
        positions = torch.arange(self.sequence, device=cut.device).repeat(len(images))
        x = self.dropout(self.patches(cut) + self.positions(positions))
        for block in self.blocks:
            x = block(x, self.sequence)
        logits = self.head(self.norm(x))  # [T', classes']
        return rearrange(logits, "(b s) c -> b s c", s=self.sequence).mean(1)

    def loss(self, images: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy in nats per image; target: [batch], classes, the same on every rank."""
        return self.scheme.loss(self(images), target, self.classes)
