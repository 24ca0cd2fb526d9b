"""The search at given degrees: the fastest way through every stage, for all ends that the pipeline may have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpcourse.models.block import RECOMPUTE
from tpcourse.plan.chain import Bound, Search
from tpcourse.plan.layout import LayerPlan, Plan
from tpcourse.plan.stages import Ends, Stages
from tpcourse.predict.volume import Formulas


def fastest_plan(stages: Stages, budget: float, within: float = 0.0,
                 limit: float = np.inf) -> tuple[float, Plan] | None:
    """Seconds of a step by the fastest plan with at most `budget` bytes on every rank, and the plan.

    Or one that takes at most the share `within` longer. None if all take `limit` seconds or more.
    """
    best = None
    for quickest, ends in sorted(((_unlimited(stages, ends), ends) for ends in stages.ends), key=lambda one: one[0]):
        if quickest >= limit * (1 - within):
            break
        found = _pipeline(stages, ends, budget, within, limit)
        if found and found[0] < limit:
            best, limit = found, found[0]
    return best


def emptiest_plan(stages: Stages) -> Plan:
    """The plan that needs least memory: of each part the emptiest scheme, for moves need none."""
    def emptiest(name: str, number: int, recompute: str = "none") -> tuple[float, Formulas]:
        sizes = stages.points(name, stages.schemes, stages.kept(number), recompute)[:, 1]
        return min(zip(sizes, stages.schemes), key=lambda one: one[0])

    def layer(number: int) -> LayerPlan:
        found = [[emptiest(part, number, mode) for part in ("attention", "mlp")] for mode in RECOMPUTE]
        (_, attention), (_, mlp) = least = min(found, key=lambda parts: parts[0][0] + parts[1][0])
        return LayerPlan(attention, mlp, RECOMPUTE[found.index(least)])

    layers = [one for number in range(stages.last + 1) for one in stages.layers * [layer(number)]]
    head = emptiest("head", stages.last)[1]
    return _plan(stages, head if stages.prices.model.tied else emptiest("embedding", 0)[1], layers, head)


def _unlimited(stages: Stages, ends: Ends) -> float:
    """Seconds of a step with all memory; the stages between the first and the last then take equally long."""
    first, middle, last = (Bound(stages.chain(number, ends), price=0).value + stages.always_of(number, ends)
                           for number in (0, min(1, stages.last), stages.last))
    return stages.step([first] + (stages.last - 1) * [middle] + [last] * (stages.last > 0))


def _pipeline(stages: Stages, ends: Ends, budget: float, within: float, limit: float) -> tuple[float, Plan] | None:
    """The plan of all stages, each the fastest within the budget: so is then the whole."""
    numbers = range(stages.last + 1)
    always = [stages.always_of(number, ends) for number in numbers]
    searches = [Search(stages.chain(number, ends), budget) for number in numbers]
    values = [search.value + more for search, more in zip(searches, always)]
    if max(values) == np.inf or stages.step(values) >= limit * (1 - within):
        return None
    ways = [search.way(within) for search in searches]
    layers = [LayerPlan(attention, mlp, recompute) for way in ways for (attention, recompute), (mlp, _) in way.layers]
    seconds = stages.step([way.seconds + more for way, more in zip(ways, always)])
    return seconds, _plan(stages, ways[0].start[0], layers, ways[-1].end[0])


def _plan(stages: Stages, embedding: Formulas, layers: Sequence[LayerPlan], head: Formulas) -> Plan:
    degrees = stages.degrees
    return Plan(stages.prices.model, stages.global_batch, degrees.micro_batch, degrees.replicas, degrees.stages,
                embedding, tuple(layers), head)
