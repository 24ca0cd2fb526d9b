"""How a model starts: numbers that depend on the seed and the place in the whole, not on who holds them."""

import torch
from torch import nn

from tpcourse.comm import Group
from tpcourse.layers import model_layouts

LEAVES = ("proj.weight", "down.weight")  # what adds to the residual stream


@torch.no_grad()
def initialize_(model: nn.Module, group: Group | None, layers: int, seed: int = 0,
                std: float = 0.02) -> None:
    """GPT-2's start, in place: matrices from N(0, std^2), biases zero.

    Matrices that add to the residual stream are divided by sqrt(2 layers).

    Each matrix is drawn whole, in float32, on every rank, which keeps its part: any number of ranks and any
    dtype starts alike.
    Source: Radford et al. 2019 ("Language Models are Unsupervised Multitask Learners"), section 2.3.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters())
    for name, layout in model_layouts(model, group).items():
        if parameters[name].is_meta:
            continue  # it has no numbers, and drawing those of a large model takes minutes
        if len(layout.shape) > 1:
            scale = std / (2 * layers) ** 0.5 if name.endswith(LEAVES) else std
            whole = torch.empty(layout.shape, dtype=torch.float32, device="cpu")
            parameters[name].copy_(layout.take(whole.normal_(0, scale, generator=generator)))
        elif name.endswith("bias"):
            parameters[name].zero_()
