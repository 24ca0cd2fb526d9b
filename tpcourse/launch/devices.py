"""Which devices and which back end ranks use, and what can be had on this machine."""

import math
import os

import torch

MOST_RANKS = 256
_announced = False


def mesh_shape(mesh: dict[str, int] | None, ranks: int | None) -> dict[str, int]:
    """The mesh asked for as {dimension: size}; ``ranks=4`` is short for {"tp": 4}.

    Raises ValueError or TypeError, saying what is possible, for anything else.
    """
    if (mesh is None) == (ranks is None):
        raise ValueError('say how many ranks, in one way: ranks=4, or mesh={"tp": 4}')
    mesh = {"tp": ranks} if mesh is None else mesh
    if not isinstance(mesh, dict) or not mesh:
        raise TypeError(f'mesh must name its dimensions, as in mesh={{"dp": 2, "tp": 2}}, not {mesh!r}')
    for name, size in mesh.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"a mesh dimension is named by a word such as 'tp', not {name!r}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh dimension {name!r} needs a whole number of ranks from 1 to {MOST_RANKS}, not {size!r}")
    count = math.prod(mesh.values())
    if count > MOST_RANKS:
        raise ValueError(f"{count:,} ranks asked for; each is a process on this machine, and at most {MOST_RANKS} can be "
                         "started (2 to 8 is usual)")
    return dict(mesh)


def choose(count: int, backend: str | None, device: str | None) -> tuple[str, str]:
    """The back end and device type for ``count`` ranks.

    NCCL where there are at least as many GPUs as ranks, otherwise gloo on the CPU; ``backend``, ``device`` or the
    environment variable TPCOURSE_BACKEND force it. Raises ValueError when the wish cannot be met here.
    """
    gpus = torch.cuda.device_count()
    backend = backend or os.environ.get("TPCOURSE_BACKEND") or None
    if backend is None:
        backend = "nccl" if gpus >= count and device != "cpu" else "gloo"
    device = device or ("cuda" if backend == "nccl" else "cpu")
    if backend not in ("nccl", "gloo") or device not in ("cuda", "cpu"):
        raise ValueError(f"backend={backend!r}, device={device!r}: the back end is 'nccl' or 'gloo', the device 'cuda' or 'cpu'")
    if backend == "nccl" and (gpus < count or device == "cpu"):
        raise ValueError(f"backend='nccl' needs one GPU for each of the {count} ranks and this machine has {gpus}; "
                         f"use backend='gloo'" + (f" or at most {gpus} ranks" if gpus else ", which runs on the CPU"))
    if device == "cuda" and not gpus:
        raise ValueError("device='cuda' needs a GPU and this machine has none; use device='cpu'")
    return backend, device


def announce(backend: str, device: str) -> None:
    """Say once per session where ranks run."""
    global _announced
    if not _announced:
        _announced = True
        where = "one GPU each, over NCCL" if backend == "nccl" else f"the {'CPU' if device == 'cpu' else 'GPUs'}, over gloo"
        print(f"tpcourse: ranks run on {where} (TPCOURSE_BACKEND=gloo or nccl forces the choice)")
