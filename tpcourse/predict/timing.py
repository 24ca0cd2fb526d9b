"""On a rank, with all others at work too: seconds of whatever a step consists of."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpcourse.comm import raw
from tpcourse.measure import time_collective
from tpcourse.predict.kernels import row_bytes, runs

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
KERNEL_BYTES = [2**14, 2**17, 2**20, 2**22, 2**24]
MESSAGE_BYTES = [2**10, 2**14, 2**17, 2**20]
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send")
WINDOW_S, KEPT = 0.02, 4
CALLS, REPEATS = 6, 2


def seconds_a_call(function: Callable[[], object]) -> float:
    """Of a function that runs again and again for a while.

    Of several calls the results are kept, and then go, as forward keeps them for backward: memory that is new
    costs more than memory just used.
    """
    function()
    begun, calls, kept = _now(), 0, []
    while calls == 0 or time.perf_counter() - begun < WINDOW_S:
        kept.append(function())
        calls += 1
        if len(kept) == KEPT:
            kept.clear()
    return (_now() - begun) / calls


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def time_product(mesh: DeviceMesh, shape: tuple[int, int, int, int], e: int) -> list[float]:
    """Seconds of a product (n, k, m, batch): the mean of the three that a linear has, forward and backward."""
    n, k, m, batch = shape
    x, w, dy = (torch.randn(batch, *size, dtype=DTYPES[e]).squeeze(0) for size in ((n, k), (m, k), (n, m)))
    x.requires_grad_(), w.requires_grad_()
    multiply = F.linear if batch == 1 else lambda x, w: x @ w.mT
    dist.barrier()
    return [seconds_a_call(lambda: torch.autograd.grad(multiply(x, w), (x, w), dy)) / 3]


def time_kernel(mesh: DeviceMesh, kind: str, e: int) -> list[float]:
    """Seconds of a kernel and, if it has one, of that in backward, for each of KERNEL_BYTES."""
    found = []
    for rows in kernel_rows(kind, e):
        for function in runs(kind, rows, DTYPES[e], _groups(mesh, 1)):
            dist.barrier()
            found.append(seconds_a_call(function))
    return found


def kernel_rows(kind: str, e: int) -> list[int]:
    """How many rows touch about KERNEL_BYTES."""
    return [max(1, round(nbytes / row_bytes(kind, e))) for nbytes in KERNEL_BYTES]


def time_messages(mesh: DeviceMesh, op: str, size: int) -> list[float]:
    """Seconds of a message, for each of MESSAGE_BYTES, in all groups of `size` ranks at once.

    In a step ranks compute before they send, none is done at the same time as the others, and where they share
    a core one waits for it: so they compute here, too, and what that takes by itself is not counted.
    """
    group, w = _groups(mesh, size), torch.randn(256, 256)

    def compute() -> None:
        w @ w @ w @ w

    seconds, alone = [], []
    for nbytes in MESSAGE_BYTES:
        send, count = sender(op, nbytes, group)
        dist.barrier()
        alone.append(seconds_a_call(compute))
        together = statistics.median(_in_turn(compute, send) for _ in range(REPEATS))
        seconds.append((together, count))
    return [(together - min(alone)) / count for together, count in seconds]


def _in_turn(compute: Callable[[], object], send: Callable[[], object]) -> float:
    """Seconds of the two, one after the other, again and again. Each rank has its own; of pairs one may be late."""
    dist.barrier()
    begun = _now()
    for _ in range(CALLS):
        compute()
        send()
    return (_now() - begun) / CALLS


def sender(op: str, nbytes: int, group: DeviceMesh) -> tuple[Callable[[], object], int]:
    """What sends messages of so many bytes, as the ledger counts them, and how many.

    A broadcast or reduce has each rank for its root, all of them under way at once, as in SUMMA.
    """
    size, x = group.size(), torch.zeros(nbytes // 4)
    shares = x[:len(x) // size * size]

    def rooted() -> None:
        start = {"broadcast": dist.broadcast, "reduce": dist.reduce}[op]
        where = "group_src" if op == "broadcast" else "group_dst"
        works = [start(x.clone(), group=group.get_group(), async_op=True, **{where: root}) for root in range(size)]
        for work in works:
            work.wait()

    return {
        "all_reduce": lambda: raw.all_reduce(x, group),
        "all_gather": lambda: raw.all_gather(x[:len(x) // size], group, 0),
        "reduce_scatter": lambda: raw.reduce_scatter(shares, group, 0),
        "all_to_all": lambda: raw.all_to_all(shares, group, 0, 0),
        "send": lambda: raw.ring_shift(x, group, 1),
    }.get(op, rooted), size if op in ("broadcast", "reduce") else 1


def time_overlap(mesh: DeviceMesh, e: int) -> list[float]:
    """What a product and a message under way together save, as a share of the shorter one's seconds.

    The product takes about as long as the message.
    """
    x, w = torch.zeros(2**18), torch.randn(512, 512, dtype=DTYPES[e])
    message = time_collective(lambda: dist.all_reduce(x), REPEATS)
    count = max(1, round(message / time_collective(lambda: w @ w, REPEATS)))

    def product() -> None:
        for _ in range(count):
            w @ w

    def both() -> None:
        work = dist.all_reduce(x, async_op=True)
        product()
        work.wait()

    alone, together = time_collective(product, REPEATS), time_collective(both, REPEATS)
    return [(alone + message - together) / min(alone, message)]


def memory(mesh: DeviceMesh) -> list[float]:
    """Bytes that a rank has: its GPU's, or its share of the machine's."""
    if torch.cuda.is_initialized():
        return [torch.cuda.get_device_properties().total_memory]
    return [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / mesh.size()]


@functools.cache
def _groups(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """This rank's group, of so many neighbours; made once, as each has threads of its own."""
    shape = mesh.size() // size, size
    return init_device_mesh(mesh.device_type, shape, mesh_dim_names=("groups", "ranks"))["ranks"]
