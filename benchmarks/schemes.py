"""What forward and backward of a transformer block take in every scheme: time, messages, bytes, memory.

    python benchmarks/schemes.py                # 4 and 8 ranks, some minutes
    python benchmarks/schemes.py --quick        # 4 ranks, small shapes, about half a minute
    python benchmarks/schemes.py --markdown     # all of it, and the table goes into README.md

The block is that of `tpcourse.models`, the same code in every scheme. All start with the same weights, in
float32, and get the same input and the same gradient of the output, each rank its part. Outputs and every
gradient are first compared with those of one process, and the run ends where they differ. Then the schemes
take turns on the same ranks, one thread each, so that whatever else the machine does hits all alike.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from report import aligned, machine, markdown, put_into

import tpcourse as tp
from tpcourse.layers import model_layouts
from tpcourse.measure import ledger, saved_activations
from tpcourse.models import Block
from tpcourse.schemes import Dense, OneD, Scheme, ThreeD, TwoD

ROOT = Path(__file__).parents[1]
LIMIT_S = 600  # of one number of ranks
TOLERANCE = 1e-5  # of the greatest entry: sums of float32 in another order


@dataclass(frozen=True)
class Size:
    """Shapes of the block, and how often it is timed."""

    batch: int
    sequence: int
    dim: int
    heads: int
    rounds: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.sequence} tokens, {self.dim} features, {self.heads} heads"


SMALL, LARGE = Size(8, 16, 64, 8, rounds=11), Size(8, 128, 512, 8, rounds=11)
GRIDS = {4: (2, 2), 8: (2, 2, 2)}  # of TwoD: with depth it is 2.5D
CUBES = {4: (1, 2, 2), 8: (2, 2, 2)}  # of ThreeD
FIRST = "1D"  # whom the others' time is compared with


def over_one_dimension(mesh: DeviceMesh, sequence_parallel: bool) -> Scheme:
    return OneD(mesh["a"], sequence_parallel)


def schemes(ranks: int) -> dict[str, tuple[tuple[int, ...], Callable[[DeviceMesh], Scheme]]]:
    """By name the mesh's shape, and what makes the scheme on it."""
    return {
        FIRST: ((ranks,), partial(over_one_dimension, sequence_parallel=False)),
        "1D, sequence parallel": ((ranks,), partial(over_one_dimension, sequence_parallel=True)),
        "2D" if len(GRIDS[ranks]) == 2 else "2.5D": (GRIDS[ranks], TwoD),
        "3D, all-reduce": (CUBES[ranks], partial(ThreeD, leave="all_reduce")),
        "3D, reduce-scatter, kept": (CUBES[ranks], ThreeD),
        "3D, reduce-scatter, gathered again": (CUBES[ranks], partial(ThreeD, keep_gathered=False)),
        "3D as fully sharded": ((ranks, 1, 1), partial(ThreeD, keep_gathered=False)),
    }


# On a rank.

def outer(scheme: Scheme, whole: Tensor) -> Tensor:
    """This rank's part of [tokens, dim] in the outer layout, by a linear that changes nothing."""
    dim = whole.size(1)
    layer = scheme.input_linear(dim, dim)
    same = {"weight": torch.eye(dim), "bias": torch.zeros(dim)}
    with torch.no_grad():
        for name, layout in model_layouts(layer, scheme.group).items():
            layer.get_parameter(name).copy_(layout.take(same[name]))
        return layer(whole).clone()


class Step:
    """One scheme's block on this rank with its part of the input and of the gradient that comes back."""

    def __init__(self, scheme: Scheme, size: Size) -> None:
        random = torch.Generator().manual_seed(1)
        x, upstream = torch.randn(2, size.batch * size.sequence, size.dim, generator=random)
        torch.manual_seed(0)
        self.block, self.sequence = Block(scheme, size.dim, size.heads), size.sequence
        self.x, self.upstream = outer(scheme, x).requires_grad_(), outer(scheme, upstream)

    def forget(self) -> None:
        for tensor in (self.x, *self.block.parameters()):
            tensor.grad = None

    def run(self) -> Tensor:
        y = self.block(self.x, self.sequence)
        y.backward(self.upstream)
        return y.detach()

    def results(self) -> dict[str, Tensor]:
        """Output and gradients of one step."""
        found = {"output": self.run(), "input": self.x.grad}
        return found | {name: p.grad for name, p in self.block.named_parameters()}


def check(name: str, scheme: Scheme, step: Step, expected: dict[str, Tensor]) -> None:
    """Raises ValueError if a scheme does not compute what one process does."""
    layouts = model_layouts(step.block, scheme.group)
    for what, found in step.results().items():
        want = layouts[what].take(expected[what]) if what in layouts else outer(scheme, expected[what])
        difference = ((found - want).abs().max() / expected[what].abs().max()).item()
        if not difference < TOLERANCE:
            raise ValueError(f"{name}: {what} differs from one process' by {difference:.0e} of its greatest")


def costs(step: Step) -> tuple[int, float, int, int]:
    """Of a step on this rank: calls, bytes sent, bytes kept for backward, bytes of parameters."""
    step.forget()
    with ledger() as book, saved_activations() as kept:
        step.run()
    parameters = sum(p.numel() * p.element_size() for p in step.block.parameters())
    return book.total("calls"), book.total("wire_bytes"), kept.bytes, parameters


def compare(mesh: DeviceMesh, size: Size) -> dict[str, tuple]:
    """For each scheme the seconds of every round, and the `costs` of a step on this rank."""
    expected, steps, sent = Step(Dense(), size).results(), {}, {}
    for name, (shape, make) in schemes(mesh.size()).items():
        names = ("a", "b", "c")[: len(shape)]
        scheme = make(init_device_mesh(mesh.device_type, shape, mesh_dim_names=names))
        steps[name] = Step(scheme, size)
        check(name, scheme, steps[name], expected)
        sent[name] = costs(steps[name])
    seconds = take_turns(steps, size.rounds)
    return {name: (seconds[name], *sent[name]) for name in steps}


def take_turns(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round; in each another scheme begins, and the first round does not count."""
    seconds, names = {name: [] for name in steps}, list(steps)
    for turn in range(rounds + 1):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            steps[name].forget()
            dist.barrier()
            begun = time.perf_counter()
            steps[name].run()
            seconds[name].append(time.perf_counter() - begun)
    return {name: times[1:] for name, times in seconds.items()}


# The table.

def rows_of(ranks: int, outcomes: list[dict]) -> list[list[str]]:
    """A row for each scheme; a round takes what its slowest rank takes, the rest is rank 0's."""
    rounds = {name: [max(times) for times in zip(*(outcome[name][0] for outcome in outcomes))]
              for name in outcomes[0]}
    rows = []
    for name, (_, calls, sent, kept, parameters) in outcomes[0].items():
        ratio = statistics.median(own / first for own, first in zip(rounds[name], rounds[FIRST]))
        shape = " x ".join(map(str, schemes(ranks)[name][0]))
        median = statistics.median(rounds[name]) * 1e3
        rows.append([str(ranks), name, shape, f"{median:,.0f} ms", f"x{ratio:.2f}", str(calls),
                     *(f"{n / 1e3:,.0f} kB" for n in (sent, kept, parameters))])
    return rows


def measure(ranks: list[int], size: Size) -> list[list[str]]:
    rows = [["ranks", "scheme", "mesh", "time", f"to {FIRST}", "calls", "sent", "kept", "parameters"]]
    for count in ranks:
        print(f"{count} ranks, {size}", file=sys.stderr)
        with tp.World(ranks=count) as world:
            rows += rows_of(count, world.run(compare, size, record=False, timeout=LIMIT_S))
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", choices=GRIDS, default=list(GRIDS))
    parser.add_argument("--quick", action="store_true", help="4 ranks, small shapes")
    parser.add_argument("--markdown", action="store_true", help="put the table into README.md")
    options = parser.parse_args(argv)
    size, notes = SMALL if options.quick else LARGE, [machine()]
    rows = measure([4] if options.quick else options.ranks, size)
    notes = [notes[0] + f", {os.getloadavg()[0]:.1f} at the end", f"{size}; median of {size.rounds} rounds",
             "calls and bytes (sent, kept for backward, of parameters) are of one rank and one step"]
    print("\n".join([aligned(rows), "", *notes]))
    if options.markdown:
        put_into(ROOT / "README.md", "schemes", markdown(rows, notes))


if __name__ == "__main__":
    main()
