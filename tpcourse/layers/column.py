"""Column parallelism: every rank holds some columns of A and computes those columns of Y = X A."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from tpcourse.comm import Group, describe, gather_from_region
from tpcourse.layers.layout import Layout, block_sizes, block_spans, check_shared, keep_own, split_along
from tpcourse.layers.linear import entering_linear


class ColumnParallelLinear(nn.Module):
    """Y = X A + b with A = [A_1 ... A_P] split by columns: rank r computes Y_r = X A_r + b_r.

    X: [..., in_features], the same on every rank; with `sequence_parallel` [tokens / P, ..., in_features],
    this rank's tokens, and the layer gathers them. Y: [..., out_features / P], of all tokens, or with
    `gather_output` [..., out_features] on every rank, for use that is the same on all of them. With
    `skip_bias_add` the layer returns (Y without b, b_r), for whoever adds it in a later kernel.
    Per rank: weight [out_features / P, in_features] (torch stores A transposed), bias [out_features / P].

    `stride` says that A is several matrices side by side, such as Q | K | V: so many of equal width, or these
    widths. Each is split by itself, so that rank r computes its columns of every one, one after the other.
    `weight` is a parameter to share instead of an own one, [out_features / P, in_features].

    The layer draws the whole weight as nn.Linear does and keeps its own rows: after the same
    torch.manual_seed on every rank, the P ranks together hold exactly what nn.Linear holds in one process.

    Raises ValueError if P does not divide out_features, or each block of `stride`; if the blocks do not add
    up to out_features; if `weight` has another shape; and for `gather_output` with blocks or skip_bias_add.
    Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3; with sequence parallelism:
    Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """

    def __init__(self, in_features: int, out_features: int, group: Group, bias: bool = True,
                 gather_output: bool = False, *, skip_bias_add: bool = False, sequence_parallel: bool = False,
                 stride: int | Sequence[int] = 1, weight: nn.Parameter | None = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.blocks = block_sizes(out_features, stride, group)
        if gather_output and (skip_bias_add or len(self.blocks) > 1):
            raise ValueError(f"gather_output=True joins the ranks' columns, so it fits neither the blocks of "
                             f"stride={stride} nor a bias kept back, skip_bias_add={skip_bias_add}; drop one")
        self.in_features, self.out_features, self.group = in_features, out_features, group
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.sequence_parallel = sequence_parallel
        keep_own(self, self.layouts(), nn.Linear(in_features, out_features, bias, dtype=dtype))
        if weight is not None:
            self.weight = check_shared(weight, self.weight, describe(group))

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: Group, gather_output: bool = False, *,
                    skip_bias_add: bool = False, sequence_parallel: bool = False,
                    stride: int | Sequence[int] = 1) -> Self:
        """This rank's part of a layer that every rank holds whole; the parameters are copies."""
        bias = linear.bias is not None
        with torch.device("meta"):  # draws no random numbers and takes no memory
            layer = cls(linear.in_features, linear.out_features, group, bias, gather_output, stride=stride,
                        skip_bias_add=skip_bias_add, sequence_parallel=sequence_parallel)
        keep_own(layer, layer.layouts(), linear)
        return layer

    def layouts(self) -> dict[str, Layout]:
        """Which rows of the whole weight and entries of the whole bias this rank holds."""
        spans = block_spans(self.blocks, self.group)
        return {"weight": split_along(0, (self.out_features, self.in_features), spans),
                "bias": split_along(0, (self.out_features,), spans)}

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """x: [..., in_features], the same on every rank, or with `sequence_parallel` this rank's tokens."""
        bias = None if self.skip_bias_add else self.bias
        y = entering_linear(x, self.weight, bias, self.group, self.sequence_parallel)  # [..., out / P]
        if self.gather_output:
            y = gather_from_region(y, self.group, -1)  # [..., out]
        return (y, self.bias) if self.skip_bias_add else y

    def extra_repr(self) -> str:
        return (f"{self.in_features} to {self.out_features} features, bias={self.bias is not None}, "
                f"gather_output={self.gather_output}, over {describe(self.group)}")
