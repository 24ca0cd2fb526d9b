"""The search: for all degrees, the fastest way through every stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tpcourse.comm.placement import Placement
from tpcourse.models.block import RECOMPUTE
from tpcourse.plan.chain import Bound, Chain, Way, fastest
from tpcourse.plan.cost import Piece, Prices, in_flight
from tpcourse.plan.front import Front, both, either, front
from tpcourse.plan.layout import LayerPlan, Plan
from tpcourse.plan.options import Degrees, schemes_for
from tpcourse.predict.volume import Formulas

NO_WAY = front([], [])


class Stages:
    """The stages of a model at certain degrees: each is a chain, of which the best way is the plan.

    All is counted for a whole step: seconds of all micro-batches and of the update, which is linear in a
    rank's parameters; bytes of parameters, gradients and optimizer, and of the activations under way.
    """

    def __init__(self, prices: Prices, degrees: Degrees, global_batch: int) -> None:
        self.prices, self.degrees, self.global_batch = prices, degrees, global_batch
        self.count = degrees.micro_batches(global_batch)
        self.schemes = schemes_for(prices.model, degrees.ranks, degrees.micro_batch)
        self.layouts = list(dict.fromkeys(scheme.outer for scheme in self.schemes))
        once, twice = (prices.update(size, degrees.ranks, degrees.replicas).total for size in (2**30, 2**31))
        self.per_byte, self.always = (twice - once) / 2**30, 2 * once - twice
        self.moves, self.moves_again = (np.array([[self._move(a, b, again) for b in self.layouts]
                                                  for a in self.layouts]) for again in (False, True))
        self._inside: dict[int, list[list[Front]]] = {}

    def best(self, budget: float) -> tuple[float, Plan] | None:
        """Seconds of a step by the fastest plan within the budget of every rank, and the plan; None if none."""
        found = [plan for start, end, home in self._ends() if (plan := self._pipeline(start, end, home, budget))]
        return min(found, key=lambda plan: plan[0], default=None)

    def _move(self, a: Placement, b: Placement, again: bool) -> float:
        return self.count * self.prices.move(a, b, self.degrees.micro_batch, again).total

    def _point(self, piece: Piece, kept: int, once: float = 0.0) -> tuple[float, float]:
        """Seconds and bytes of a step with this piece; of its activations those of `kept` micro-batches."""
        return (self.count * piece.total + self.per_byte * piece.held.parameters + once,
                piece.state + kept * piece.held.activations)

    def _part(self, name: str, schemes: list[Formulas], kept: int, recompute: str = "none") -> list[Front]:
        """For each layout the front of the schemes that have it."""
        fronts = []
        for layout in self.layouts:
            ways = [scheme for scheme in schemes if scheme.outer == layout]
            pieces = [self.prices.part(name, scheme, self.degrees.micro_batch, recompute) for scheme in ways]
            ties = [self.prices.tie(scheme).total if name in ("embedding", "head") else 0 for scheme in ways]
            fronts.append(front([self._point(piece, kept, tie) for piece, tie in zip(pieces, ties)], ways))
        return fronts

    def inside(self, kept: int) -> list[list[Front]]:
        """From layout to layout all ways through a layer: attention, a move, the MLP, and what is recomputed."""
        if kept not in self._inside:
            parts = {recompute: [self._part(name, self.schemes, kept, recompute) for name in ("attention", "mlp")]
                     for recompute in RECOMPUTE}
            self._inside[kept] = [[either([
                _layers(attention[b], mlp[d].later((self.moves_again if r == "full" else self.moves)[b, d]), r)
                for r, (attention, mlp) in parts.items()])
                for d in range(len(self.layouts))] for b in range(len(self.layouts))]
        return self._inside[kept]

    def _ends(self) -> Iterator[tuple[list[Formulas], list[Formulas], int]]:
        """Schemes for the embedding and for the head, and the layout between stages: a tied head has no choice."""
        for home, layout in enumerate(self.layouts):
            schemes = [scheme for scheme in self.schemes if scheme.outer == layout]
            if self.prices.model.tied:
                yield from (([scheme], [scheme], home) for scheme in schemes)
            else:
                yield schemes, self.schemes, home

    def _pipeline(self, start: list[Formulas], end: list[Formulas], home: int,
                  budget: float) -> tuple[float, Plan] | None:
        """The plan of all stages, each the fastest within the budget: so is then the whole."""
        ways = []
        for number in range(self.degrees.stages):
            way = self._stage(number, start, end, home, budget)
            if way is None:
                return None
            ways.append(way)
        works = [way.seconds for way in ways]
        seconds = max(works) + (sum(works) - max(works)) / self.count
        layers = tuple(layer for way in ways for layer in way.layers)
        degrees = self.degrees
        return seconds, Plan(self.prices.model, self.global_batch, degrees.micro_batch, degrees.replicas,
                             degrees.stages, ways[0].start, layers, ways[-1].end)

    def _stage(self, number: int, start: list[Formulas], end: list[Formulas], home: int,
               budget: float) -> Way | None:
        last = self.degrees.stages - 1
        kept = in_flight(number, self.degrees.stages, self.count)
        begin = self._part("embedding", start, kept) if number == 0 else self._at(home)
        heads = self._part("head", end, kept) if number == last else self._at(home)
        finish = [either([head.later(self.moves[a, b]) for b, head in enumerate(heads)])
                  for a in range(len(self.layouts))]
        chain = Chain(begin, self.moves, self.inside(kept), finish, self.prices.model.num_layers // (last + 1))
        way = fastest(chain, budget)
        return way and replace(way, seconds=way.seconds + self.always + self._boundary(number, home))

    def _at(self, home: int) -> list[Front]:
        return [front([(0.0, 0.0)], [None]) if layout == home else NO_WAY for layout in range(len(self.layouts))]

    def _boundary(self, number: int, home: int) -> float:
        last, degrees = self.degrees.stages - 1, self.degrees
        around = degrees.ranks * degrees.replicas, degrees.stages
        sends = (0 if last == 0 else 1 if number in (0, last) else 2)
        return self.count * self.prices.boundary(self.layouts[home], around, degrees.micro_batch, sends).total


def _layers(attention: Front, mlp: Front, recompute: str) -> Front:
    found = both(attention, mlp)
    return Front(found.seconds, found.bytes, [LayerPlan(*pair, recompute) for pair in found.ways])
