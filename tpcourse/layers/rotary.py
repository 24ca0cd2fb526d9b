"""Rotary positions: queries and keys are turned by angles in proportion to their place."""

import torch
from torch import Tensor


def apply_rotary(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Turns each pair (x_i, x_{i + d/2}) of a token at position m by the angle m base^(-2 i / d).

    The product of a turned query and a turned key depends on how far apart they are, not on where.
    x: [..., sequence, head_dim = d]; positions: [sequence]. Result: the shape and dtype of x, computed in
    float32 at least. Kept for backward: a cosine and a sine for each position and pair.

    Raises ValueError if head_dim is odd or there is not one position for each token.
    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2; pairs as in Megatron-LM.
    """
    sequence, head_dim = x.shape[-2:]
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} does not split into pairs; make it {head_dim + 1}")
    if positions.shape != (sequence,):
        raise ValueError(f"positions have shape {tuple(positions.shape)} for {sequence} tokens; "
                         f"pass ({sequence},)")
    dtype = torch.promote_types(x.dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, dtype=dtype, device=x.device) / head_dim  # [d / 2]
    angles = positions.to(dtype)[:, None] * base**-exponents  # [sequence, d / 2]
    cos, sin = angles.cos(), angles.sin()
    a, b = x.to(dtype).chunk(2, -1)  # each [..., sequence, d / 2]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)
