"""Column parallelism: every rank holds some columns of A and computes those columns of Y = X A."""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcourse.comm import Group, copy_to_region, describe, even_sizes, gather_from_region, my_slice


class ColumnParallelLinear(nn.Module):
    """Y = X A + b with A = [A_1 ... A_P] split by columns: rank r computes Y_r = X A_r + b_r.

    X: [..., in_features], the same on every rank. Y: [..., out_features / P], or with `gather_output`
    [..., out_features] on every rank, for use that is the same on all of them.
    Per rank: weight [out_features / P, in_features] (torch stores A transposed), bias [out_features / P].

    The layer draws the whole weight as nn.Linear does and keeps its own rows: after the same
    torch.manual_seed on every rank, the P ranks together hold exactly what nn.Linear holds in one process.

    Raises ValueError if P does not divide out_features.
    Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3.
    """

    def __init__(self, in_features: int, out_features: int, group: Group, bias: bool = True,
                 gather_output: bool = False, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        even_sizes(out_features, group, f"out_features={out_features}")
        self.in_features, self.out_features = in_features, out_features
        self.group, self.gather_output = group, gather_output
        self._keep_own_rows(nn.Linear(in_features, out_features, bias, dtype=dtype))

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: Group, gather_output: bool = False) -> Self:
        """This rank's part of a layer that every rank holds whole; the parameters are copies."""
        bias = linear.bias is not None
        with torch.device("meta"):  # draws no random numbers and takes no memory
            layer = cls(linear.in_features, linear.out_features, group, bias, gather_output)
        layer._keep_own_rows(linear)
        for own, whole in zip(layer.parameters(), linear.parameters()):
            own.requires_grad_(whole.requires_grad)  # what is frozen stays frozen
        return layer

    def _keep_own_rows(self, whole: nn.Linear) -> None:
        rows = my_slice(self.out_features, self.group)
        self.weight = nn.Parameter(whole.weight.detach()[rows].clone())  # [out / P, in]
        bias = None if whole.bias is None else nn.Parameter(whole.bias.detach()[rows].clone())  # [out / P]
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features], the same on every rank."""
        x = copy_to_region(x, self.group)  # backward: all-reduce, as every rank's columns contribute to dX
        y = F.linear(x, self.weight, self.bias)  # [..., out / P]
        return gather_from_region(y, self.group, -1) if self.gather_output else y

    def extra_repr(self) -> str:
        return (f"{self.in_features} to {self.out_features} features, bias={self.bias is not None}, "
                f"gather_output={self.gather_output}, over {describe(self.group)}")
