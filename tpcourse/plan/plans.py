"""The best plans of a model on a machine, ranked, and why not otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np

from tpcourse.measure.table import aligned
from tpcourse.plan.cost import Cost, cost, prices
from tpcourse.plan.layout import Plan
from tpcourse.plan.neighbours import Rejected, rejected
from tpcourse.plan.options import all_degrees
from tpcourse.plan.search import best_first, emptiest_plan, fastest_plan, least_seconds
from tpcourse.plan.stages import Stages
from tpcourse.plan.words import amount, time_text, too_much
from tpcourse.predict.model import Transformer

if TYPE_CHECKING:
    from tpcourse.predict.machine import Machine


@dataclass(frozen=True)
class Plans:
    """What `plan` found: plans and what they cost, the fastest first, and what was rejected beside the first.

    `memory`: bytes that a rank may hold. `tried`: degrees, of which all others cannot be among these.
    """

    plans: tuple[Plan, ...]
    costs: tuple[Cost, ...]
    memory: float
    rejected: tuple[Rejected, ...]
    tried: int
    known: int

    @property
    def best(self) -> Plan:
        """The fastest."""
        return self.plans[0]

    @property
    def cost(self) -> Cost:
        """What it costs."""
        return self.costs[0]

    def __repr__(self) -> str:
        header = ("replicas", "stages", "ranks", "micro-batch", "a step", "sent by a rank", "held by a rank", "")
        lines = [(plan.replicas, plan.stages, plan.ranks, plan.micro_batch, time_text(cost.total),
                  amount(cost.sent), amount(cost.memory), "" if cost is self.cost else
                  f"{100 * (cost.total / self.cost.total - 1):.1f} % slower")
                 for plan, cost in zip(self.plans, self.costs)]
        reasons = aligned(("instead", "rejected:"), [(one.change, one.reason) for one in self.rejected])
        return "\n\n".join([aligned(header, lines),
                            f"The first, with {amount(self.memory)} on a rank:\n{self.best}",
                            reasons])


def plan(model: Transformer, machine: Machine, memory: float | None = None, *, global_batch: int, e: int = 2,
         stages: int | None = None, count: int = 5, within: float = 1e-3) -> Plans:
    """The fastest ways to train a model on all GPUs of a machine, of all ways that fit into memory.

    For each part of each layer, and for embedding and head, a scheme with its mesh; for each layer what is
    recomputed; and the degrees of data, pipeline and tensor parallelism with the micro-batch. Counted are the
    bytes of changing layout between parts. `global_batch` sequences a step, numbers of `e` bytes; `memory`
    bytes on a rank (all that the machine has). At most `stages` of a pipeline (any number): `tpcourse.train` runs
    plans of one. One plan for each three degrees, the `count` fastest.

    A plan that would save less than the share `within` may be passed over (see `Search.way`); with 0 none is faster
    than the first. Raises ValueError, with what is lacking, if no plan fits, and for numbers that make no sense.
    """
    memory = machine.memory if memory is None else memory
    stages = model.num_layers if stages is None else stages
    _check(memory=memory, global_batch=global_batch, stages=stages, count=count)
    if not 0 <= within < 0.5 or e not in (2, 4, 8):
        raise ValueError(f"within={within} must be at least 0 and below 0.5, and e={e} one of 2, 4 and 8 bytes")
    all_stages = [Stages(prices(model, machine, e), degrees, global_batch)
                  for degrees in all_degrees(model, machine.gpus, global_batch) if degrees.stages <= stages]
    found, tried = _fastest(all_stages, memory, count, within)
    if not found:
        raise ValueError(_nothing_fits(all_stages, memory, machine))
    plans = tuple(plan for _, plan in sorted(found.values(), key=lambda one: one[0])[:count])
    costs = tuple(cost(plan, machine, e=e) for plan in plans)
    beside = tuple(rejected(plans[0], machine, memory, e, stages))
    return Plans(plans, costs, memory, beside, tried, len(all_stages))


def _check(**numbers: float) -> None:
    for name, number in numbers.items():
        if not isinstance(number, Real) or not number > 0:
            raise ValueError(f"{name}={number!r} must be a number above 0")


def _fastest(stages: Iterable[Stages], memory: float, count: int,
             within: float) -> tuple[dict[tuple, tuple[float, Plan]], int]:
    """By replicas, stages and ranks, seconds and plan; until no others can be among the `count` fastest."""
    found, tried = {}, 0
    for least, one in best_first(stages, lambda one: one.least, lambda one: least_seconds(one, memory)):
        limit = _last(found, count)
        if least >= limit * (1 - within):
            break
        tried += 1
        key = astuple(one.degrees)[:3]
        best = fastest_plan(one, memory, within, min(limit, found[key][0] if key in found else np.inf))
        found |= {key: best} if best else {}
    return found, tried


def _last(found: dict[tuple, tuple[float, Plan]], count: int) -> float:
    """Seconds of the slowest that would be in the table; infinite while there is room."""
    seconds = sorted(seconds for seconds, _ in found.values())
    return seconds[count - 1] if len(seconds) >= count else np.inf


def _nothing_fits(stages: list[Stages], memory: float, machine: Machine) -> str:
    known = [one for one in stages if one.schemes]
    if not known:
        return (f"nothing splits evenly over {machine.gpus} GPUs: no degrees divide layers, heads, sizes and "
                "batch; change the batch or the number of GPUs")
    fewest = min((one.degrees.replicas, one.degrees.micro_batch) for one in known)
    leasts = [(cost(emptiest_plan(one), machine, e=one.prices.e), one.degrees) for one in known
              if (one.degrees.replicas, one.degrees.micro_batch) == fewest]
    least, degrees = min(leasts, key=lambda one: one[0].memory)
    return (f"on a rank {too_much(least.memory, memory)}, even with {degrees}: most is {least.mostly}; "
            f"take more GPUs or memory, a smaller batch or a smaller model")
