"""What the 3D linear costs beyond the collectives and matrix products it consists of: forward and backward.

    python benchmarks/overhead.py               # 4 and 8 ranks
    python benchmarks/overhead.py --markdown    # also puts the table into the project's README

`schemes.cube.CubeLinear` and the bare sequence of its calls, without autograd, modules or checks, take turns
on the same ranks with the same tensors; results are compared first. A ratio is the median of all rounds'.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from report import aligned, machine, markdown, put_into

import tpcourse as tp
from tpcourse.comm import even_sizes, group_of, my_slice
from tpcourse.schemes.cube import Axes, CubeLinear

MESHES = {4: {"i": 1, "j": 2, "l": 2}, 8: {"i": 2, "j": 2, "l": 2}}
SHAPES = {"small": (256, 256, 256), "moderate": (2048, 1024, 1024), "large": (4096, 2048, 1024)}  # n, k, m
HEAD = ["ranks", "mesh", "tokens x inputs x outputs", "CubeLinear (ms)", "bare calls (ms)", "ratio"]
ROOT = Path(__file__).parents[1]


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(group.size() * x.size(0), x.size(1))
    dist.all_gather_single(out, x, group=group)
    return out


def scatter(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    out = x.new_empty(x.size(0) // group.size(), x.size(1))
    return out, dist.reduce_scatter_single(out, x, group=group, async_op=True)


def bare(x: Tensor, w: Tensor, dy: Tensor, i: dist.ProcessGroup, j: dist.ProcessGroup,
         l: dist.ProcessGroup) -> list[Tensor]:
    """Y, dX and dW: three gathers, three reduce-scatters and three products; what is gathered is kept."""
    x, w = gather(x, j), w if i.size() == 1 else gather(w, i)
    y, summing = scatter(x @ w.T, l)
    summing.wait()
    dy = gather(dy, l)
    dx, summing = scatter(dy @ w, j)
    dw = dy.T @ x
    if i.size() > 1:
        dw, storing = scatter(dw, i)
        storing.wait()
    summing.wait()
    return [y, dx, dw]


def whole(layer: CubeLinear, x: Tensor, dy: Tensor) -> list[Tensor]:
    x.grad = layer.weight.grad = None
    y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad]


def compare(mesh: DeviceMesh, shape: tuple[int, int, int], rounds: int) -> tuple[float, float, float]:
    """Medians of the rounds: seconds of the layer, of the bare calls, and their ratio."""
    n, k, m = shape
    axes = Axes(mesh["i"], mesh["j"], mesh["l"], scatter=True, keep=True)
    i, j, l = (group_of(mesh[name]) for name in "ijl")
    layer = CubeLinear(k, m, axes, [my_slice(m, mesh["j"])], bias=False)
    x = torch.randn(n // (i.size() * j.size()), k // l.size(), requires_grad=True)
    dy = torch.randn(n // (i.size() * l.size()), even_sizes(m, mesh["j"], "m")[0])
    ways = [lambda: whole(layer, x, dy), lambda: bare(x.detach(), layer.weight.detach(), dy, i, j, l)]
    for own, other in zip(*(way() for way in ways)):
        if (own - other).abs().max() > 1e-4 * own.abs().max():
            raise ValueError("the layer and the bare calls do not agree")
    seconds = [[timed(way) for way in (ways if turn % 2 else ways[::-1])][:: 1 if turn % 2 else -1]
               for turn in range(rounds)]
    own, other = zip(*seconds)
    ratio = statistics.median(a / b for a, b in seconds)
    return statistics.median(own), statistics.median(other), ratio


def timed(way) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    way()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def main() -> None:
    """Measure, print, and with `--markdown` put the table into README.md."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    rows, notes = [], [machine()]
    for ranks, mesh in MESHES.items():
        with tp.World(mesh=mesh) as world:
            for shape in SHAPES.values():
                own, other, ratio = world.run(compare, shape, options.rounds, timeout=300, record=False)[0]
                sizes = " x ".join(map(str, mesh.values()))
                rows.append([str(ranks), sizes, " x ".join(map(str, shape)), f"{1e3 * own:.1f}",
                             f"{1e3 * other:.1f}", f"x{ratio:.2f}"])
    print(aligned([HEAD, *rows]), notes[0], sep="\n\n")
    if options.markdown:
        put_into(ROOT / "README.md", "overhead", markdown([HEAD, *rows], notes))


if __name__ == "__main__":
    main()
