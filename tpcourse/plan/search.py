"""The search at given degrees: the fastest way through every stage, for all ends that the pipeline may have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import groupby
from typing import TypeVar

import numpy as np

from tpcourse.models.block import RECOMPUTE
from tpcourse.plan.chain import Bound, Search
from tpcourse.plan.layout import LayerPlan, Plan
from tpcourse.plan.stages import Ends, Stages
from tpcourse.predict.volume import Formulas

Item = TypeVar("Item")


def fastest_plan(stages: Stages, budget: float, within: float = 0.0,
                 limit: float = np.inf) -> tuple[float, Plan] | None:
    """Seconds of a step by the fastest plan with at most `budget` bytes on every rank, and the plan.

    Or one of which the fastest saves less than the share `within`: see `Search.way`. None if all take `limit`
    seconds or more.
    """
    best, pipelines = None, [Pipeline(stages, ends, budget) for ends in stages.ends]
    for least, pipeline in best_first(pipelines, Pipeline.unlimited, Pipeline.relaxed):
        if least >= limit * (1 - within):
            break
        found = pipeline.plan(within)
        if found[0] < limit:
            best, limit = found, found[0]
    return best


def best_first(items: Iterable[Item], *bounds: Callable[[Item], float]) -> Iterator[tuple[float, Item]]:
    """Items in the order of their last bound, with it; the bounds grow, and each is asked for as late as can be."""
    heap = [(bounds[0](item), 0, number, item) for number, item in enumerate(items)]
    heapify(heap)
    while heap:
        value, asked, number, item = heappop(heap)
        if asked == len(bounds) - 1:
            yield value, item
        else:
            heappush(heap, (max(value, bounds[asked + 1](item)), asked + 1, number, item))


def least_seconds(stages: Stages, budget: float) -> float:
    """Seconds of a step that no plan within the budget goes below, moves apart; infinite if none fits."""
    return stages.step([Search(stages.unmoved(number), budget).value + stages.always
                        for number in range(stages.last + 1)])


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
    if stages.prices.model.tied:
        embedding = head = _tied(stages)
    else:
        embedding, head = emptiest("embedding", 0)[1], emptiest("head", stages.last)[1]
    return _plan(stages, embedding, layers, head)


def _tied(stages: Stages) -> Formulas:
    """The scheme with which the fuller of first and last stage is emptiest."""
    embedding, head = (stages.points(name, stages.schemes, stages.kept(number))[:, 1]
                       for name, number in (("embedding", 0), ("head", stages.last)))
    own = [stages.layers * min(sum(stages.points(part, stages.schemes, stages.kept(number), mode)[:, 1].min()
                                   for part in ("attention", "mlp")) for mode in RECOMPUTE)
           for number in (0, stages.last)]
    fullest = np.maximum(own[0] + embedding, own[1] + head) if stages.last else embedding + head
    return stages.schemes[int(fullest.argmin())]


class Pipeline:
    """All stages with certain ends; if each is the fastest within the budget, so is the whole."""

    def __init__(self, stages: Stages, ends: Ends, budget: float) -> None:
        self.stages, self.ends, self.budget = stages, ends, budget
        self.always = [stages.always_of(number, ends) for number in range(stages.last + 1)]

    def unlimited(self) -> float:
        """Seconds of a step with all memory; the stages between the first and the last then take equally long."""
        last = self.stages.last
        works = {number: Bound(self.stages.chain(number, self.ends), price=0).value + self.always[number]
                 for number in {0, min(1, last), last}}
        return self.stages.step([works[number if number in works else 1] for number in range(last + 1)])

    @cached_property
    def searches(self) -> list[Search]:
        """Of all stages."""
        return [Search(self.stages.chain(number, self.ends), self.budget) for number in range(self.stages.last + 1)]

    def relaxed(self) -> float:
        """Seconds of a step that this does not go below within the budget."""
        return self.stages.step([search.value + more for search, more in zip(self.searches, self.always)])

    def plan(self, within: float) -> tuple[float, Plan]:
        """Seconds and the plan; there must be one."""
        ways = [search.way(within) for search in self.searches]
        layers = [layer for way in ways for layer in _tidy(
            [LayerPlan(attention, mlp, recompute) for (attention, recompute), (mlp, _) in way.layers])]
        seconds = self.stages.step([way.seconds + more for way, more in zip(ways, self.always)])
        return seconds, _plan(self.stages, ways[0].start[0], layers, ways[-1].end[0])


def _tidy(layers: Iterable[LayerPlan]) -> list[LayerPlan]:
    """A stage's layers, equal ones beside each other where order costs nothing: between the same layouts."""
    tidy = []
    for _, alike in groupby(layers, key=lambda layer: (layer.attention.outer, layer.mlp.outer)):
        alike = list(alike)
        tidy += sorted(alike, key=alike.index)
    return tidy


def _plan(stages: Stages, embedding: Formulas, layers: Sequence[LayerPlan], head: Formulas) -> Plan:
    degrees = stages.degrees
    return Plan(stages.prices.model, stages.global_batch, degrees.micro_batch, degrees.replicas, degrees.stages,
                embedding, tuple(layers), head)
