"""A vocabulary dealt to ranks: which entries are this rank's, and where an id lies among them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tpcourse.comm import Group, describe, group_rank, group_size, split_sizes
from tpcourse.layers.layout import Layout, split_along


def own_entries(n: int, group: Group, what: str) -> range:
    """The entries that this rank holds, of n dealt as evenly as can be: the first n % P ranks hold one more.

    Raises ValueError, starting with `what`, if there are fewer entries than ranks.
    """
    size, rank = group_size(group), group_rank(group)
    if n < size:
        raise ValueError(f"{what} is less than {describe(group)}, and each needs an entry; pad to "
                         f"{size} or use at most {max(n, 1)} ranks")
    sizes = split_sizes(n, size)
    return range(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def dealt(shape: Sequence[int], own: range) -> Layout:
    """The rows of this rank's entries, of a table with one row an entry."""
    return split_along(0, shape, [slice(own.start, own.stop)])


def locate(ids: Tensor, own: range) -> tuple[Tensor, Tensor]:
    """Where each id lies among this rank's entries, and a mask of those that another rank holds.

    ids: [...]. Result: [...] twice; where the mask is true the place reads 0, so that it can be looked up.
    """
    local = ids.long() - own.start
    elsewhere = (local < 0) | (local >= len(own))
    return local.masked_fill(elsewhere, 0), elsewhere


def check_ids(ids: Tensor, n: int, name: str, ignored: int | None = None) -> None:
    """Raises ValueError if an id is neither in 0 .. n - 1 nor `ignored`, TypeError if they are no integers.

    Values are looked at on the CPU only: on a GPU that would make every call wait for the device.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must hold int64 or int32 ids, not {ids.dtype}")
    if not ids.is_cpu:
        return
    wrong = (ids < 0) | (ids >= n)
    if ignored is not None:
        wrong &= ids != ignored
    if wrong.any():
        also = "" if ignored is None else f", or {ignored} to ignore"
        raise ValueError(f"{name} holds the id {ids[wrong][0].item()}, outside the vocabulary of {n}; pass "
                         f"ids from 0 to {n - 1}{also}")
