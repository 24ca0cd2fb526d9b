"""Seconds: time a collective, fit time = alpha + beta * bytes, and the bus bandwidth that tools report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from .wire import OPERATIONS


def time_collective(fn: Callable[[], object], repeats: int = 20) -> float:
    """Median seconds of `fn()` over `repeats` calls, each timed on the slowest rank; the same on every rank.

    Every rank of the world calls this with an `fn` that enters one collective and waits for it. Two calls
    first warm up; a barrier and a device synchronisation go before each timed one, so that no rank is charged
    for another's late arrival.

    Raises ValueError for `repeats` below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: a median needs at least 1")
    seconds = [_time_once(fn) for _ in range(2 + repeats)][2:]
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(np.median(slowest.cpu()))


def _time_once(fn: Callable[[], object]) -> float:
    dist.barrier()
    _synchronize()
    start = time.perf_counter()
    fn()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def fit_alpha_beta(nbytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency alpha (s) and beta (s per byte) of the line time = alpha + beta * bytes.

    Least squares of the *relative* error, (alpha + beta b - t) / t: sizes go over powers of two, and
    unweighted the largest message alone would set both numbers.

    Raises ValueError unless there are at least two different sizes, one time for each, all times positive.
    """
    b, t = np.asarray(nbytes, dtype=float), np.asarray(seconds, dtype=float)
    if b.shape != t.shape:
        raise ValueError(f"{b.size} sizes and {t.size} times; give one time for each size")
    if np.unique(b).size < 2 or not (t > 0).all():
        raise ValueError(f"a line needs two different sizes and positive times; got {list(b)} and {list(t)}")
    alpha, beta = np.linalg.lstsq(np.stack([1 / t, b / t], axis=1), np.ones_like(t), rcond=None)[0]
    return float(alpha), float(beta)


def bus_bandwidth(op: str, message_bytes: float, seconds: float, group_size: int) -> float:
    """Bytes per second on the busiest link, comparable across operations and numbers of ranks.

    S / t times 2 (n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter, all_to_all, gather and
    scatter, 1 for broadcast, reduce, send and recv; S as in `wire.wire_bytes`. Source: nccl-tests,
    doc/PERFORMANCE.md.

    Raises ValueError for an operation that moves no bytes or does not exist.
    """
    if op not in OPERATIONS or op == "barrier":
        raise ValueError(f"no bus bandwidth for {op!r}; there is one for {', '.join(OPERATIONS[:-1])}")
    share = (group_size - 1) / group_size
    factor = {"all_reduce": 2 * share, "broadcast": 1, "reduce": 1, "send": 1, "recv": 1}.get(op, share)
    return factor * message_bytes / seconds
