"""The same program under torchrun: `spawn` runs the function on the ranks that torchrun has started."""

import math
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tpcourse.launch import devices, wire


def is_launcher() -> bool:
    """Whether torchrun (torch.distributed.elastic) started this process as one of its ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def run_here(function, args: tuple, mesh: dict[str, int], backend: str | None, device: str | None, threads: int) -> list:
    """Run ``function(mesh, *args)`` on this rank; returns every rank's result, in rank order.

    Raises ValueError when the mesh does not have as many ranks as torchrun started.
    """
    count, started = math.prod(mesh.values()), int(os.environ["WORLD_SIZE"])
    if count != started:
        raise ValueError(f"mesh={mesh} has {count} ranks and torchrun started {started}; use --nproc-per-node {count}")
    backend, device = devices.choose(int(os.environ.get("LOCAL_WORLD_SIZE", started)), backend, device)
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))
    if not dist.is_initialized():
        dist.init_process_group(backend)
    value = function(init_device_mesh(device, tuple(mesh.values()), mesh_dim_names=tuple(mesh)), *args)
    values = [None] * count
    dist.all_gather_object(values, wire.pack_result(value))
    return [wire.unpack(packed) for packed in values]
