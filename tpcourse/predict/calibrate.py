"""Measures the machine at hand: what real ranks, all at work at once, take for whatever a step consists of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from tpcourse.launch import World
from tpcourse.measure import fit_alpha_beta
from tpcourse.predict import timing
from tpcourse.predict.calibration import Calibration, fit_products
from tpcourse.predict.kernels import row_bytes
from tpcourse.predict.work import KINDS, OPTIMIZER, SUM

# (n, k, m, batch): square products, thin and fat ones, and those of attention's heads.
SHAPES = [(n, n, n, 1) for n in (16, 64, 128, 256, 512)]
SHAPES += [(n, k, m, 1) for n in (64, 512, 2048) for k, m in ((64, 256), (256, 64), (128, 512), (512, 128))]
SHAPES += [(s, d, s, batch) for s in (32, 64, 128) for d, batch in ((16, 32), (32, 8), (64, 8))]
SHAPES += [(s, s, d, batch) for s in (32, 64, 128) for d, batch in ((16, 32), (32, 8), (64, 8))]
PASSES = 3  # far apart, so that what else the machine does meets one of them
TIMEOUT_S = 120  # of one measurement
LEAST_S = 1e-6  # of a message


def calibrate(ranks: int, path: str | Path | None = None, *, e: int = 4) -> Calibration:
    """What this machine takes for products, other kernels and messages, with `ranks` at work at once.

    Numbers of `e` bytes: 2, 4 or 8. Over NCCL where there are as many GPUs as ranks, else over gloo. `path`:
    where to save it as JSON. It takes up to a minute, and shows how far it is.

    Raises ValueError for an `e` that is none of these, and as `World` does for the ranks.
    """
    if e not in timing.DTYPES:
        raise ValueError(f"e={e} bytes a number is not one of {', '.join(map(str, timing.DTYPES))}")
    jobs, found = _jobs(ranks, e), {}
    with World(ranks=ranks) as world:
        for job in tqdm(PASSES * jobs, desc=f"calibrating {ranks} ranks"):
            found.setdefault(job, []).append(world.run(*job, record=False, timeout=TIMEOUT_S))
    calibration = _calibration(ranks, e, {job: np.median(np.mean(outs, 1), 0) for job, outs in found.items()})
    if path is not None:
        calibration.save(path)
    return calibration


def _jobs(ranks: int, e: int) -> list[tuple]:
    """What to measure: functions of `timing`, with their arguments."""
    jobs = [(timing.time_product, shape, e) for shape in SHAPES]
    jobs += [(timing.time_kernel, kind, e) for kind in (*KINDS, SUM, OPTIMIZER)]
    sizes = [size for size in range(2, ranks + 1) if ranks % size == 0]  # of the groups that meshes have
    jobs += [(timing.time_messages, op, size) for size in sizes for op in timing.OPS]
    return [*jobs, (timing.memory,), *([(timing.time_overlap, e)] if ranks > 1 else [])]


def _calibration(ranks: int, e: int, found: dict[tuple, np.ndarray]) -> Calibration:
    """One machine of what each job found: the mean over ranks, as all wait for all, and of passes the median."""
    kernels, messages = [], []
    for (job, *args), seconds in found.items():
        if job is timing.time_kernel:
            kernels += _curves(args[0], e, seconds)
        if job is timing.time_messages:
            messages.append((*args, *fit_line(seconds)))
    products = [found[timing.time_product, shape, e].item() for shape in SHAPES]
    overlap = found.get((timing.time_overlap, e), np.zeros(1)).clip(0, 1).item()
    return Calibration(ranks, e, found[timing.memory,].item(), overlap, fit_products(SHAPES, products, e),
                       tuple(kernels), tuple(messages))


def _curves(kind: str, e: int, seconds: np.ndarray) -> list[tuple[str, tuple[tuple[float, float], ...]]]:
    """Bytes and seconds of a kernel and, if it has one, of that in backward, which touches twice as many."""
    sizes = row_bytes(kind, e) * np.array(timing.kernel_rows(kind, e))
    return [(kind + phase * " backward", tuple(zip(((1 + phase) * sizes).tolist(), own.tolist())))
            for phase, own in enumerate(seconds.reshape(len(sizes), -1).T)]


def fit_line(seconds: Sequence[float]) -> tuple[float, float]:
    """alpha and beta of messages of MESSAGE_BYTES, neither negative: what noise turns below zero is next to it."""
    seconds = np.maximum(seconds, LEAST_S)
    alpha, beta = fit_alpha_beta(timing.MESSAGE_BYTES, seconds)
    return (max(alpha, 0.0), beta) if beta > 0 else (float(np.median(seconds)), 0.0)
