"""A call of torch.distributed in words: operation, group, shape, dtype, reduce operation, root or peer, and its line."""

import functools
import sys

from tpcourse.launch.places import is_own

SHAPE_CHARACTERS = 160  # of a record's slot


def describe(name: str, given: dict) -> list[str]:
    """The fields of a `record.Call` (without rank, number and turn) from the arguments of a collective."""
    members, group_name, dim = _membership(_group(given))
    if name == "new_group" and given.get("use_local_synchronization"):  # only its members make this call
        members = tuple(sorted(given.get("ranks") or members))
        group_name = f"new_group {members}"
    operation = name.removesuffix("_autograd").replace("_into_tensor", "").replace("_tensor", "").replace("_single", "")
    shape, dtype = _payload(operation, given)
    reduce = given.get("op", given.get("reduceOp", "SUM" if "reduce" in operation else ""))
    return [operation, group_name, _compact(members), dim, shape, dtype, _reduce_name(reduce),
            _peer(operation, given, members), str(given.get("tag") or 0), _where()]


def queue_of(fields: list[str]) -> tuple[str, ...]:
    """Where a call queues up, to be matched in order with other ranks' calls: its group, for a message also its peer and tag."""
    operation, group, *_, peer, tag, _ = fields
    return (group, operation[-4:], peer, tag) if operation in ("send", "isend", "recv", "irecv") else (group,)


def _group(given: dict):
    from torch.distributed import distributed_c10d as c10d

    group = given.get("group")
    if group is None or isinstance(group, c10d.ProcessGroup):
        return group or c10d._get_default_group()
    from torch.distributed import _functional_collectives as functional

    return c10d._resolve_process_group(functional._resolve_group_name(group, ""))


@functools.cache
def _membership(group) -> tuple[tuple[int, ...], str, str]:
    from torch.distributed import distributed_c10d as c10d

    dim = (group.group_desc or "").removeprefix("mesh_") if (group.group_desc or "").startswith("mesh_") else ""
    return tuple(c10d.get_process_group_ranks(group)), group.group_name, dim


def _compact(members: tuple[int, ...]) -> str:
    """Ranks as text; evenly spaced ones, as those of every mesh dimension are, as start:stop:step."""
    step = members[1] - members[0] if len(members) > 1 else 1
    if members == tuple(range(members[0], members[-1] + 1, max(step, 1))):
        return f"{members[0]}:{members[-1] + 1}:{max(step, 1)}"
    return ",".join(map(str, members))


def _payload(operation: str, given: dict) -> tuple[str, str]:
    """Shape and dtype of what must agree between the ranks (for scatter and gather: one rank's part)."""
    if operation == "new_group":
        return str(sorted(given["ranks"])) if given.get("ranks") else "all ranks", ""
    if operation == "all_gather" and len({part.shape for part in given.get("tensor_list", ())}) > 1:
        given = {"tensor": given["tensor_list"]}  # parts of different sizes, as every rank must expect them
    for name in ("input_list", "input_tensor_list", "tensor", "input_tensor", "self", "input"):
        value = given.get(name)
        if value is not None:
            parts = value if isinstance(value, (list, tuple)) else [value]
            shapes = " ".join(str(list(part.shape)) for part in parts)
            return shapes[:SHAPE_CHARACTERS], str(parts[0].dtype).removeprefix("torch.")
    return "", ""


def _reduce_name(reduce) -> str:
    """SUM, MAX ...: of a string, of a constant, or of a ReduceOp that was made from one and perhaps a factor."""
    return str(getattr(reduce, "op", reduce)).rpartition(".")[2].upper()


def _peer(operation: str, given: dict, members: tuple[int, ...]) -> str:
    """The root or peer as a global rank; empty where a call has none, "any" for a receive from anyone."""
    names = {"send": "dst", "isend": "dst", "reduce": "dst", "gather": "dst"}
    if operation not in names and operation not in ("recv", "irecv", "broadcast", "scatter"):
        return ""
    name = names.get(operation, "src")
    inside = given.get("group_" + name)
    if inside is not None:
        return str(members[inside])
    peer = given.get(name)
    if peer is None:
        return "any" if operation in ("recv", "irecv") else "0"
    return str(peer)


def _where() -> str:
    frame = first = sys._getframe(2)
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or first
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
