"""The MLP: an entering linear, something elementwise, a leaving linear."""

import torch.nn.functional as F
from torch import Tensor, nn

from tpcourse.schemes import Scheme


class MLP(nn.Module):
    """Y = act(X A) B, or with "swiglu" Y = (silu(X G) * X U) B, where G and U are one fused linear.

    X and Y: outer layout, [T, dim] in one process; between the linears the inner layout, [T', hidden'].
    Nothing is sent between the two: what happens there is elementwise, whatever a rank holds.

    Raises ValueError for an activation of another name, and what the scheme raises for sizes it cannot split.
    Source: Shoeybi et al. 2019 (arXiv:1909.08053), equations 1 to 3; SwiGLU: Shazeer 2020
    (arXiv:2002.05202), equation 6.
    """

    def __init__(self, scheme: Scheme, dim: int, hidden: int, activation: str = "gelu",
                 bias: bool = True) -> None:
        super().__init__()
        if activation not in ("gelu", "swiglu"):
            raise ValueError(f"activation={activation!r} is not one of 'gelu', 'swiglu'")
        self.gated = activation == "swiglu"
        blocks = 2 if self.gated else 1  # gate | up
        self.up = scheme.entering_linear(dim, blocks * hidden, bias, stride=blocks)
        self.down = scheme.leaving_linear(hidden, dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: outer layout."""
        y = self.up(x)  # [T', blocks * hidden']
        if self.gated:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up  # [T', hidden']
        else:
            y = F.gelu(y)
        return self.down(y)
