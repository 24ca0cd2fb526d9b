"""One layer of a transformer: attention and MLP, each with a norm before it and the residual around it."""

from collections.abc import Callable

from torch import Tensor, nn

from tpcourse.layers import core_attention, recompute
from tpcourse.models.attention import Attention
from tpcourse.models.mlp import MLP
from tpcourse.models.move import Move
from tpcourse.schemes import Scheme
from tpcourse.schemes.parts import joint

RECOMPUTE = ("none", "selective", "full")


class Block(nn.Module):
    """X + dropout(attention(norm(X))), and on that the same with the MLP.

    X and the result: outer layout, [T, dim] in one process. `hidden` defaults to 4 dim, Megatron's.
    `mlp_scheme`: the scheme of MLP and second norm, if not that of attention. X is then moved from one outer
    layout to the other between the two, and the result is in the MLP's.
    `recompute`: what backward computes again: "none"; "selective", the core of attention; "full", all of the
    block, for which only its input is kept.

    Raises ValueError for a `recompute` of another name, and what attention, MLP and scheme raise.
    Source: norms before: Radford et al. 2019 ("Language Models are Unsupervised Multitask Learners"), section
    2.3; recomputation: Korthikanti et al. 2022 (arXiv:2205.05198), section 5.
    """

    def __init__(self, scheme: Scheme, dim: int, num_heads: int, num_kv_heads: int | None = None, *,
                 mlp_scheme: Scheme | None = None, hidden: int | None = None, activation: str = "gelu",
                 norm: str = "layer", causal: bool = True, rotary: bool = False, bias: bool = True,
                 dropout: float = 0.0, recompute: str = "none",
                 core: Callable[..., Tensor] = core_attention) -> None:
        super().__init__()
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute={recompute!r} is not one of {', '.join(map(repr, RECOMPUTE))}")
        mlp_scheme = mlp_scheme or scheme
        self.full, self.random = recompute == "full", joint([scheme.random, mlp_scheme.random])
        self.norm1, self.norm2 = scheme.norm(dim, norm), mlp_scheme.norm(dim, norm)
        self.attention = Attention(scheme, dim, num_heads, num_kv_heads, causal=causal, rotary=rotary,
                                   bias=bias, dropout=dropout, core=core,
                                   recompute_core=recompute == "selective")
        self.to_mlp = Move(scheme, mlp_scheme)
        self.mlp = MLP(mlp_scheme, dim, hidden or 4 * dim, activation, bias)
        self.dropout, self.mlp_dropout = (s.dropout(dropout, inner=False) for s in (scheme, mlp_scheme))

    def forward(self, x: Tensor, sequence: int) -> Tensor:
        """x: outer layout of attention; `sequence`: the tokens of one sequence."""
        if self.full and self.training:
            return recompute(self._forward, x, sequence, random=self.random)
        return self._forward(x, sequence)

    def _forward(self, x: Tensor, sequence: int) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), sequence))
        x = self.to_mlp(x)
        return x + self.mlp_dropout(self.mlp(self.norm2(x)))
