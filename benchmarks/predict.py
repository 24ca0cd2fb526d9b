"""Predicted against measured: seconds of forward and backward of a GPT, over schemes, meshes and shapes.

    python benchmarks/predict.py                # 1, 2 and 4 ranks, 60 combinations, some minutes
    python benchmarks/predict.py --quick        # 2 ranks, one shape
    python benchmarks/predict.py --markdown     # all of it, and the table goes into benchmarks/README.md

For each number of ranks the machine is calibrated, then every combination's real model runs on as many ranks,
in float32. The prediction knows the calibration and the sizes, and nothing of what was measured then.
"""

import argparse
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from report import aligned, machine, markdown, put_into

import tpcourse as tp
from tpcourse import predict
from tpcourse.models.block import RECOMPUTE
from tpcourse.plan.layout import name
from tpcourse.plan.real import scheme_of
from tpcourse.predict.volume import Formulas

README = Path(__file__).parent / "README.md"
LIMIT_S = 120  # of one combination
E = 4  # bytes a number


@dataclass(frozen=True)
class Shape:
    """A model, and how many sequences it gets."""

    name: str
    model: predict.Transformer
    batch: int


LLAMA = {"num_kv_heads": 4, "norm": "rms", "activation": "swiglu", "positions": "rotary", "tied": False,
         "bias": False}
SHAPES = [  # vocabulary, context, width, layers, heads
    Shape("128 wide, 8 x 64", predict.Transformer(512, 64, 128, 3, 8), 8),
    Shape("256 wide, 8 x 128", predict.Transformer(1024, 128, 256, 2, 8), 8),
    Shape("512 wide, 4 x 128", predict.Transformer(2048, 128, 512, 2, 8), 4),
    Shape("256 wide, Llama's parts, 16 x 32", predict.Transformer(1024, 32, 256, 3, 8, hidden=512, **LLAMA), 16),
]
SCHEMES = {
    1: [predict.OneD(1)],
    2: [predict.OneD(2), predict.OneD(2, True), predict.ThreeD(1, 2, 1), predict.ThreeD(2, 1, 1),
        predict.ThreeD(1, 1, 2), predict.ThreeD(1, 2, 1, "all_reduce")],
    4: [predict.OneD(4), predict.OneD(4, True), predict.TwoD(2), predict.ThreeD(2, 2, 1),
        predict.ThreeD(1, 2, 2), predict.ThreeD(4, 1, 1), predict.ThreeD(1, 2, 2, "all_reduce"),
        predict.ThreeD(2, 1, 2, keep_gathered=False)],
}


@dataclass(frozen=True)
class Case:
    """One combination."""

    shape: Shape
    scheme: Formulas
    recompute: str

    def predicted(self, calibration: predict.Calibration) -> float:
        parts = predict.step_time(self.shape.model, self.scheme, calibration, self.shape.batch, e=E,
                                  recompute=self.recompute)
        return sum(time.total for time in parts.values())


def cases(ranks: int, shapes: list[Shape]) -> list[Case]:
    """Every scheme with every shape; what is recomputed goes round."""
    return [Case(shape, scheme, RECOMPUTE[(a + b) % len(RECOMPUTE)])
            for a, shape in enumerate(shapes) for b, scheme in enumerate(SCHEMES[ranks])]


def steps(mesh: DeviceMesh, case: Case, rounds: int) -> list[float]:
    """On a rank: seconds of each step, after two that do not count; a barrier goes before each."""
    sizes = case.scheme.mesh
    own = init_device_mesh(mesh.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = case.shape.model.build(scheme_of(case.scheme, own), case.recompute)
    ids = torch.randint(case.shape.model.vocab_size, (case.shape.batch, case.shape.model.context),
                        generator=torch.Generator().manual_seed(0))
    seconds = []
    for _ in range(rounds + 2):
        model.zero_grad()
        dist.barrier()
        begun = now()
        model.loss(ids, ids).backward()
        seconds.append(now() - begun)
    return seconds[2:]


def now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True)
class Outcome:
    """Seconds of a combination's step."""

    ranks: int
    case: Case
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted / self.measured - 1

    @property
    def row(self) -> list[str]:
        return [str(self.ranks), name(self.case.scheme), self.case.shape.name, self.case.recompute,
                f"{self.predicted * 1e3:,.1f} ms", f"{self.measured * 1e3:,.1f} ms", f"{self.error:+.0%}"]


def measure(ranks: int, shapes: list[Shape], rounds: int) -> list[Outcome]:
    """A step takes what its slowest rank takes; of the rounds the median counts."""
    calibration, outcomes = tp.calibrate(ranks), []
    for case in cases(ranks, shapes):
        seconds = tp.spawn(steps, case, rounds, ranks=ranks, record=False, timeout=LIMIT_S)
        measured = statistics.median(map(max, zip(*seconds)))
        outcomes.append(Outcome(ranks, case, case.predicted(calibration), measured))
        print(*outcomes[-1].row, sep="  ", file=sys.stderr)
    return outcomes


def summary(outcomes: list[Outcome]) -> list[str]:
    """Of all absolute errors the median and what nine of ten do not exceed; and of each number of ranks."""
    lines = []
    for ranks in [None, *sorted({outcome.ranks for outcome in outcomes})]:
        errors = sorted(abs(outcome.error) for outcome in outcomes if ranks in (None, outcome.ranks))
        of = f"{len(errors)} combinations" if ranks is None else f"{len(errors)} on {ranks} ranks"
        lines.append(f"{of}: median error {statistics.median(errors):.1%}, "
                     f"90th percentile {errors[math.ceil(0.9 * len(errors)) - 1]:.1%}")
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="2 ranks, one shape")
    parser.add_argument("--markdown", action="store_true", help="put the table into benchmarks/README.md")
    options = parser.parse_args(argv)
    where, outcomes = machine(), []
    for ranks in [2] if options.quick else options.ranks:
        outcomes += measure(ranks, SHAPES[:1] if options.quick else SHAPES, options.rounds)
    rows = [["ranks", "scheme", "shape", "recomputed", "predicted", "measured", "error"],
            *(outcome.row for outcome in outcomes)]
    notes = [where + f", {os.getloadavg()[0]:.1f} at the end", *summary(outcomes)]
    print("\n".join([aligned(rows), "", *notes]))
    if options.markdown:
        put_into(README, "predict", markdown(rows, notes))


if __name__ == "__main__":
    main()
