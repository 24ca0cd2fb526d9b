"""Who talks: a process group or one mesh dimension; and which part of a tensor each of its ranks holds."""

from collections.abc import Sequence

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

Group = ProcessGroup | DeviceMesh


def group_of(group: Group) -> ProcessGroup:
    """The process group behind `group`: a ProcessGroup, or a mesh of one dimension such as `mesh["tp"]`.

    Raises ValueError for a mesh of several dimensions, TypeError for anything else (also what torch gives in
    place of a group that this rank is not in).
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names
            raise ValueError(f"a collective runs along one mesh dimension, not {group.ndim}: {names}; "
                             + (f"take one, e.g. mesh[{names[-1]!r}]" if names else "name them and take one"))
        return group.get_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be one mesh dimension, such as mesh['tp'], or a ProcessGroup that holds "
                        f"this rank, not {group!r}")
    return group


def group_size(group: Group) -> int:
    """How many ranks the group has: P."""
    return group_of(group).size()


def group_rank(group: Group) -> int:
    """This rank's number within the group: r, from 0 to P - 1."""
    return group_of(group).rank()


def describe(group: Group) -> str:
    """The group as error messages name it: "the 4 ranks of mesh dimension 'tp'"."""
    names = group.mesh_dim_names if isinstance(group, DeviceMesh) else None
    return f"the {group_size(group)} ranks of " + (f"mesh dimension {names[0]!r}" if names else "the group")


def split_sizes(n: int, parts: int) -> list[int]:
    """n entries dealt to `parts` ranks as evenly as can be: the first n % parts ranks hold one more.

    >>> split_sizes(10, 4)
    [3, 3, 2, 2]
    """
    return [n // parts + (r < n % parts) for r in range(parts)]


def even_sizes(n: int, group: Group, what: str, also: str = "") -> list[int]:
    """n entries dealt to the ranks of the group equally: [n / P] * P.

    Raises ValueError if P does not divide n. Its text starts with `what`, the number that does not fit (such
    as "out_features=10"), and ends with the ways out, to which `also` adds one.
    """
    size = group_size(group)
    if n % size:
        fewer = [d for d in range(1, size) if n % d == 0][-1:]
        more = [d for d in range(size + 1, min(n, 4 * size) + 1) if n % d == 0][:1]
        raise ValueError(f"{what} is not divisible by {describe(group)}; pad to {n + -n % size} or use "
                         f"{' or '.join(map(str, fewer + more))} ranks{also}")
    return [n // size] * size


def shard_sizes(n: int, group: Group, sizes: Sequence[int] | None, what: str) -> list[int]:
    """How many of n entries each rank holds: `sizes`, checked; equal shares if there are none.

    Raises ValueError if P does not divide n and no sizes are given, or they do not add up to n.
    """
    if sizes is None:
        return even_sizes(n, group, what, also=f", or pass sizes={split_sizes(n, group_size(group))}")
    if sum(check_sizes(sizes, group)) != n:
        raise ValueError(f"{what} does not split into sizes={list(sizes)}, which add up to {sum(sizes)}; "
                         f"pass sizes that add up to {n}, such as {split_sizes(n, group_size(group))}")
    return list(sizes)


def my_slice(n: int, group: Group, sizes: Sequence[int] | None = None) -> slice:
    """Which of n entries this rank holds, in equal shares or in those of `sizes`: full[my_slice(n, group)].

    Raises ValueError if P does not divide n and no sizes are given, or they do not add up to n.
    """
    sizes, rank = shard_sizes(n, group, sizes, f"a dimension of size {n}"), group_rank(group)
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def check_sizes(sizes: Sequence[int], group: Group) -> list[int]:
    """`sizes` as a list, if each rank of the group has one, zero or more; else ValueError."""
    if len(sizes) != group_size(group) or min(sizes) < 0:
        raise ValueError(f"sizes={list(sizes)} are {len(sizes)} sizes for {describe(group)}; pass one for "
                         f"each rank, zero or more, such as split_sizes(n, {group_size(group)})")
    return list(sizes)


def check_rank(rank: int, group: Group, other: bool = False) -> int:
    """`rank`, if the group has it, and if, with `other`, it is not this rank itself; else ValueError."""
    last = group_size(group) - 1
    if not 0 <= rank <= last:
        raise ValueError(f"rank {rank} is not one of {describe(group)}; count within the group, 0 to {last}")
    if other and rank == group_rank(group):
        raise ValueError(f"rank {rank} of {describe(group)} cannot send to or receive from itself; "
                         "name another")
    return rank
