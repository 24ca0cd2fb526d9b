"""What a dispatched torch operator says about communication: the operation, its group, how many bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

# Operator -> (operation, the argument that holds the message). "x *n": the argument is one of n equal pieces.
_OPERATORS = {
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors"),
    "c10d::allgather_": ("all_gather", "output_tensors"),
    "c10d::_allgather_base_": ("all_gather", "output_tensor"),
    "c10d::allgather_coalesced_": ("all_gather", "output_lists"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "c10d::alltoall_": ("all_to_all", "input_tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "c10d::reduce_": ("reduce", "tensors"),
    "c10d::gather_": ("gather", "input_tensors *n"),
    "c10d::scatter_": ("scatter", "output_tensors *n"),
    "c10d::send": ("send", "tensors"),
    "c10d::recv_": ("recv", "tensors"),
    "c10d::recv_any_source_": ("recv", "tensors"),
    "c10d::barrier": ("barrier", ""),
    "c10d::monitored_barrier_": ("barrier", ""),
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "inputs"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "input *n"),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", "input *n"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "inputs *n"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
    "_c10d_functional::broadcast_": ("broadcast", "input"),
    "_c10d_functional::isend": ("send", "tensor"),
    "_c10d_functional::irecv": ("recv", "tensor"),
    "_dtensor::shard_dim_alltoall": ("all_to_all", "input"),
}
_SILENT = {  # no bytes of their own: waiting, bookkeeping, shells around an operator that is listed
    "_dtensor::mesh_get_process_group",
    "c10d::check_for_nan",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
    "_c10d_functional_autograd::all_gather_into_tensor",
    "_c10d_functional_autograd::all_to_all_single",
    "_c10d_functional_autograd::reduce_scatter_tensor",
}
_BATCH = "_c10d_functional::batch_p2p_ops"


@dataclass(frozen=True)
class Call:
    """One operation as this rank entered it; see `wire.wire_bytes` for the sizes and `from_root`."""

    op: str
    group: dist.ProcessGroup
    message_bytes: int
    kept_bytes: int | None = None
    from_root: int = 0


@functools.cache
def communicates(func: torch._ops.OpOverload) -> bool:
    """Whether this operator sends or receives."""
    return func._schema.name in _OPERATORS or func._schema.name == _BATCH


def decode(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Iterator[Call]:
    """The operations in one call of `func` (several only for a batch of sends and receives)."""
    given = dict(zip(_argument_names(func), args)) | kwargs
    group = _group(given)
    if func._schema.name == _BATCH:
        for kind, tensor in zip(given["op_list"], given["tensors"]):
            yield Call("send" if kind == "isend" else "recv", group, _nbytes(tensor))
        return
    op, source = _OPERATORS[func._schema.name]
    name, _, pieces = source.partition(" ")
    size = _nbytes(given.get(name)) * (group.size() if pieces else 1)
    root = given.get("root_rank", given.get("src", 0))
    yield Call(op, group, size, _kept(op, given, group.rank()), (group.rank() - root) % group.size())


@functools.cache
def _argument_names(func: torch._ops.OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


def _group(given: dict) -> dist.ProcessGroup:
    boxed = given["process_group"] if "process_group" in given else given["group_name"]
    if isinstance(boxed, dist.ProcessGroup):
        return boxed
    if isinstance(boxed, str):
        return dist.distributed_c10d._resolve_process_group(boxed)
    return dist.ProcessGroup.unbox(boxed)


def _nbytes(tensors: object) -> int:
    """Bytes of the elements of a tensor, or of all in (nested) lists of them; nothing is 0."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_nbytes, tensors or ()))


def _kept(op: str, given: dict, rank: int) -> int | None:
    """What an all_to_all addresses to its own rank, where the call says so."""
    if op == "all_to_all" and "input_tensors" in given:
        return _nbytes(given["input_tensors"][rank])
    if op == "all_to_all" and given.get("input_split_sizes"):
        rows = given["input"]
        return given["input_split_sizes"][rank] * _nbytes(rows) // max(len(rows), 1)
    return None
