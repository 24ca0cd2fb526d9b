"""Queries, keys and values of attention from one matrix product: every rank computes those of its heads."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from tpcourse.comm import Group, describe, even_sizes, group_of, group_rank, group_size, my_slice
from tpcourse.layers.layout import Layout, keep_own, split_along
from tpcourse.layers.linear import entering_linear


class QKVParallelLinear(nn.Module):
    """[Q | K | V] = X [A_q | A_k | A_v] + b, each split by heads: rank r computes Q, K and V of its heads.

    X: [..., in_features], the same on every rank; with `sequence_parallel` [tokens / P, ..., in_features],
    this rank's tokens, and the layer gathers them. Result, of all tokens:
    [..., (num_heads / P + 2 kv_here) head_dim], this rank's queries, then its keys, then its values.
    kv_here = num_kv_heads / P; where there are fewer KV heads than ranks it is 1, and P / num_kv_heads
    consecutive ranks hold a copy of the same KV head. Copies start equal and stay so: backward sums the
    gradients of a head over them.
    Per rank: weight [(num_heads / P + 2 kv_here) head_dim, in_features] and a bias of as many entries.

    The layer draws the whole weight, [(num_heads + 2 num_kv_heads) head_dim, in_features] with the rows of
    all queries, then keys, then values, as nn.Linear does and keeps its own rows.

    All ranks of the group construct it together. Raises ValueError if P does not divide num_heads,
    num_kv_heads does not divide num_heads, or of num_kv_heads and P neither divides the other.
    Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), section 3; grouped queries: Ainslie et al.
    2023, arXiv:2305.13245, section 2.2.
    """

    def __init__(self, in_features: int, head_dim: int, num_heads: int, num_kv_heads: int, group: Group,
                 bias: bool = True, *, sequence_parallel: bool = False,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        _check(num_heads, num_kv_heads, group)
        self.in_features, self.head_dim, self.group = in_features, head_dim, group
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.sequence_parallel = sequence_parallel
        self.copies = _ranks_of_my_kv_head(group, max(1, group_size(group) // num_kv_heads))
        keep_own(self, self.layouts(), nn.Linear(in_features, self.out_features, bias, dtype=dtype))

    @property
    def out_features(self) -> int:
        """The rows of the whole weight."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def layouts(self) -> dict[str, Layout]:
        """Which rows of the whole weight and entries of the whole bias this rank holds."""
        queries, *kv = _my_heads(self.num_heads, self.num_kv_heads, self.group)
        spans = [slice(heads.start * self.head_dim, heads.stop * self.head_dim) for heads in (queries, *kv)]
        first = self.copies is None or group_rank(self.copies) == 0
        return {"weight": split_along(0, (self.out_features, self.in_features), spans, [True, first, first]),
                "bias": split_along(0, (self.out_features,), spans, [True, first, first])}

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features], the same on every rank, or with `sequence_parallel` this rank's tokens."""
        weight, bias = self._shared(self.weight), self._shared(self.bias)
        return entering_linear(x, weight, bias, self.group, self.sequence_parallel)

    def _shared(self, parameter: Tensor | None) -> Tensor | None:
        """The parameter, whose rows of keys and values get the gradients of all their copies."""
        if self.copies is None or parameter is None:
            return parameter
        queries = self.num_heads // group_size(self.group) * self.head_dim
        return _SumCopies.apply(parameter, queries, self.copies)

    def extra_repr(self) -> str:
        return (f"{self.in_features} features to {self.num_heads} heads and {self.num_kv_heads} KV heads of "
                f"{self.head_dim}, bias={self.bias is not None}, over {describe(self.group)}")


class _SumCopies(torch.autograd.Function):
    """The parameter itself; backward adds up the gradients of its rows from `start` on over the group."""

    @staticmethod
    def forward(ctx, parameter, start, group):
        ctx.start, ctx.group = start, group
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad[ctx.start:], group=group_of(ctx.group))
        return grad, None, None


def _my_heads(num_heads: int, num_kv_heads: int, group: Group) -> list[slice]:
    """This rank's heads among all queries, keys and values, counted one after the other."""
    if num_kv_heads >= group_size(group):
        kv = my_slice(num_kv_heads, group)
    else:
        head = group_rank(group) * num_kv_heads // group_size(group)
        kv = slice(head, head + 1)
    starts = num_heads, num_heads + num_kv_heads
    keys, values = (slice(start + kv.start, start + kv.stop) for start in starts)
    return [my_slice(num_heads, group), keys, values]


def _ranks_of_my_kv_head(group: Group, count: int) -> Group | None:
    """The `count` consecutive ranks, this one among them, that hold the same KV head; None for one alone."""
    if count == 1:
        return None
    parent, first = group_of(group), group_rank(group) // count * count
    options = [parent._get_backend(device).options for device in parent._device_types]
    timeouts = [option._timeout for option in options if option is not None]  # a fake group has none
    copies = dist.new_group(dist.get_process_group_ranks(parent)[first: first + count],
                            timeout=min(timeouts, default=None), use_local_synchronization=True,
                            group_desc="kv_copies")
    if not isinstance(group, DeviceMesh):
        return copies
    mesh = DeviceMesh.from_group(copies, group.device_type, mesh_dim_names=("kv_copies",))
    return mesh  # which, unlike a process group, can be deep-copied


def _check(num_heads: int, num_kv_heads: int, group: Group) -> None:
    even_sizes(num_heads, group, f"num_heads={num_heads}")
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} cannot share num_kv_heads={num_kv_heads} evenly; use KV "
                         f"heads whose number divides {num_heads}")
    if num_kv_heads % group_size(group) and group_size(group) % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} neither divides nor is divided by {describe(group)}; "
                         "use ranks or KV heads of which one number divides the other")
