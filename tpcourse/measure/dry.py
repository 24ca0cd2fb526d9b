"""Dry runs: the real code of one rank among thousands, on meta tensors, which have shapes and no numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .activations import SavedActivations, saved_activations
from .ledger import ledger
from .table import Table


@dataclass(frozen=True)
class DryRun:
    """What one rank would do: its messages, the activations it keeps, and what the function returned."""

    book: Table
    activations: SavedActivations
    value: object


def dry_run(function: Callable, *args: object, mesh: dict[str, int], rank: int = 0) -> DryRun:
    """Run `function(mesh, *args)` as rank `rank` of a mesh of any size; nothing is computed or sent.

    The default device is meta, and collectives return at once, so every tensor has its shape and dtype and
    no numbers. Ledger and saved activations are those of a real run, which makes this the proof of a
    formula, for models that no laptop could hold. What looks at values (`item`, a check of ids) cannot run
    dry, and autocast does nothing on meta: cast the model instead.

    mesh: dimension names and sizes, the last varying fastest, e.g. {"dp": 512, "tp": 8}.
    Raises ValueError for an empty mesh or if it has no such rank, RuntimeError where this process is a rank
    already.
    """
    size = math.prod(mesh.values())
    if not mesh or min(mesh.values()) < 1:
        raise ValueError(f"mesh={mesh} must have a dimension, and each at least one rank")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not one of the {size} ranks of mesh={mesh}; count from 0 to "
                         f"{size - 1}")
    if dist.is_initialized():
        raise RuntimeError("this process is a rank of a real process group; start dry runs from a notebook "
                           "or script, outside of its ranks")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # private: only dry runs depend on it

    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=rank, world_size=size)
    # Which of the two is the default: without one torch warns, with the time of day, when the group ends.
    dist.group.WORLD._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    try:
        with torch.device("meta"):
            device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
            with ledger(device_mesh) as book, saved_activations() as activations:
                value = function(device_mesh, *args)
    finally:
        dist.destroy_process_group()
    return DryRun(book, activations, value)
