"""Row parallelism: every rank holds some rows of A and some features of X, and its product is a part of Y."""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcourse.comm import Group, copy_to_region, describe, even_sizes, my_slice, scatter_to_region
from tpcourse.layers.layout import Layout, keep_own, replicated, split_along
from tpcourse.layers.linear import check_tokens, leave_region


class RowParallelLinear(nn.Module):
    """Y = X_1 A_1 + ... + X_P A_P + b with A split by rows and X by features: rank r computes X_r A_r.

    X: [..., in_features / P], this rank's features, as a ColumnParallelLinear leaves them; without
    `input_is_parallel` [..., in_features], the same on every rank. Y: [..., out_features] on every rank, for
    use that is the same on all of them; with `sequence_parallel` [tokens / P, ..., out_features], this rank's
    tokens of it. The bias is added once, after the sum; with `skip_bias_add` the layer returns
    (Y without b, b), for whoever adds it in a later kernel.
    Per rank: weight [out_features, in_features / P] (torch stores A transposed), bias [out_features], whole.

    The layer draws the whole weight as nn.Linear does and keeps its own columns: after the same
    torch.manual_seed on every rank, the P ranks together hold exactly what nn.Linear holds in one process.

    Raises ValueError if P does not divide in_features, X has other features than those, or
    `sequence_parallel` finds tokens that P does not divide.
    Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3; with sequence parallelism:
    Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """

    def __init__(self, in_features: int, out_features: int, group: Group, bias: bool = True,
                 input_is_parallel: bool = True, skip_bias_add: bool = False, *,
                 sequence_parallel: bool = False, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        even_sizes(in_features, group, f"in_features={in_features}")
        self.in_features, self.out_features, self.group = in_features, out_features, group
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.sequence_parallel = sequence_parallel
        keep_own(self, self.layouts(), nn.Linear(in_features, out_features, bias, dtype=dtype))

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: Group, input_is_parallel: bool = True,
                    skip_bias_add: bool = False, *, sequence_parallel: bool = False) -> Self:
        """This rank's part of a layer that every rank holds whole; the parameters are copies."""
        bias = linear.bias is not None
        with torch.device("meta"):  # draws no random numbers and takes no memory
            layer = cls(linear.in_features, linear.out_features, group, bias, input_is_parallel,
                        skip_bias_add, sequence_parallel=sequence_parallel)
        keep_own(layer, layer.layouts(), linear)
        return layer

    def layouts(self) -> dict[str, Layout]:
        """Which columns of the whole weight this rank holds, and that the bias is whole."""
        columns = my_slice(self.in_features, self.group)
        return {"weight": split_along(1, (self.out_features, self.in_features), [columns]),
                "bias": replicated((self.out_features,), self.group)}

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """x: [..., in_features / P], or without `input_is_parallel` [..., in_features]."""
        self._check(x)
        if not self.input_is_parallel:
            x = scatter_to_region(x, self.group, -1)  # [..., in / P]
        y = F.linear(x, self.weight)  # [..., out], a part of the sum
        if not self.skip_bias_add:
            return leave_region(y, self.bias, self.group, self.sequence_parallel)
        bias = self.bias
        if self.sequence_parallel and bias is not None:
            bias = copy_to_region(bias, self.group)  # the tokens of other ranks give db too
        return leave_region(y, None, self.group, self.sequence_parallel), bias

    def _check(self, x: Tensor) -> None:
        expected = self.weight.size(1) if self.input_is_parallel else self.in_features
        if x.size(-1) != expected:
            raise ValueError(f"x has {x.size(-1)} features, not {expected}, for in_features="
                             f"{self.in_features} over {describe(self.group)} and input_is_parallel="
                             f"{self.input_is_parallel}; pass this rank's features with "
                             "input_is_parallel=True, or all with False")
        if self.sequence_parallel:
            check_tokens(x.shape, self.group)

    def extra_repr(self) -> str:
        return (f"{self.in_features} to {self.out_features} features, bias={self.bias is not None}, "
                f"input_is_parallel={self.input_is_parallel}, over {describe(self.group)}")
