"""What measuring costs: a training step and one all-reduce, bare and inside the ledger and saved_activations.

Run: python benchmarks/measure.py. Two ranks on this machine; the variants take turns in one run, and each
figure is a median, so that the ratios hold where the seconds do not.
"""

import contextlib
import statistics
import time

import torch
import torch.distributed as dist

import tpcourse as tp
from tpcourse.measure import ledger, saved_activations

ROUNDS = 100
VARIANTS = {"bare": contextlib.nullcontext, "ledger": ledger, "saved_activations": saved_activations}


def step(mesh, width):
    """Forward and backward of an MLP of eight layers on 64 tokens, with one all-reduce each way."""
    from tpcourse.comm import copy_to_region, reduce_from_region

    layers = [torch.nn.Linear(width, width) for _ in range(8)]
    x = torch.ones(64, width, requires_grad=True)

    def run():
        y = copy_to_region(x, mesh["tp"])
        for layer in layers:
            y = torch.nn.functional.gelu(layer(y))
        reduce_from_region(y, mesh["tp"]).sum().backward()

    return run


def one_all_reduce(mesh, numbers):
    x = torch.zeros(numbers)
    return lambda: dist.all_reduce(x)


def no_communication(mesh, width):
    layer, x = torch.nn.Linear(width, width), torch.ones(64, width, requires_grad=True)
    return lambda: layer(x).sum().backward()


def measure(mesh, make, size):
    """Median seconds of each variant, which take turns, each as often first as last."""
    run = make(mesh, size)
    seconds = {name: [] for name in VARIANTS}
    for turn in range(ROUNDS + 5):
        for i in range(len(VARIANTS)):
            name = list(VARIANTS)[(turn + i) % len(VARIANTS)]
            dist.barrier()
            start = time.perf_counter()
            with VARIANTS[name]():
                run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[5:]) for name, times in seconds.items()}


def main() -> None:
    cases = {
        "MLP step, width 32": (step, 32),
        "MLP step, width 256": (step, 256),
        "linear layer, width 32, alone": (no_communication, 32),
        "all_reduce of 4 bytes": (one_all_reduce, 1),
        "all_reduce of 4 MB": (one_all_reduce, 2**20),
    }
    print(f"{'2 ranks, medians of ' + str(ROUNDS):32}{'bare':>12}{'ledger':>10}{'saved_activations':>20}")
    with tp.World(mesh={"tp": 2}) as world:
        for name, (make, size) in cases.items():
            t = world.run(measure, make, size, record=False, timeout=300)[0]
            print(f"{name:32}{t['bare'] * 1e3:9.3f} ms{t['ledger'] / t['bare']:9.2f}x", end="")
            print(f"{t['saved_activations'] / t['bare']:19.2f}x", flush=True)


if __name__ == "__main__":
    main()
