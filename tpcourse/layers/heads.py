"""Heads dealt to ranks: which are this rank's, who holds copies of them, and how the copies stay equal."""

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from tpcourse.comm import Group, describe, even_sizes, group_of, group_rank, group_size, my_slice


def check_heads(num_heads: int, num_kv_heads: int, group: Group) -> None:
    """Raises ValueError unless P divides num_heads, num_kv_heads divides num_heads, and of num_kv_heads and P
    one divides the other."""
    even_sizes(num_heads, group, f"num_heads={num_heads}")
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} cannot share num_kv_heads={num_kv_heads} evenly; use KV "
                         f"heads whose number divides {num_heads}")
    if num_kv_heads % group_size(group) and group_size(group) % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} neither divides nor is divided by {describe(group)}; "
                         "use ranks or KV heads of which one number divides the other")


def my_heads(num_heads: int, num_kv_heads: int, group: Group) -> list[slice]:
    """This rank's heads among all queries, keys and values, counted one after the other."""
    if num_kv_heads >= group_size(group):
        kv = my_slice(num_kv_heads, group)
    else:
        head = group_rank(group) * num_kv_heads // group_size(group)
        kv = slice(head, head + 1)
    starts = num_heads, num_heads + num_kv_heads
    keys, values = (slice(start + kv.start, start + kv.stop) for start in starts)
    return [my_slice(num_heads, group), keys, values]


class KVCopies:
    """The ranks that hold copies of one KV head, for the layers of a model: their group is made once.

    A new group is a call that all its ranks must make, at the same point, and on GPUs takes memory.
    """

    def __init__(self, group: Group) -> None:
        self.group, self._made = group, {}

    def of(self, num_kv_heads: int) -> Group | None:
        """The ranks of `group` that hold this rank's KV head; None if no other does."""
        count = max(1, group_size(self.group) // num_kv_heads)
        if count not in self._made:
            self._made[count] = _consecutive(self.group, count)
        return self._made[count]


def _consecutive(group: Group, count: int) -> Group | None:
    """The `count` consecutive ranks of the group with this one among them; None for one alone."""
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


class SumCopies(torch.autograd.Function):
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
