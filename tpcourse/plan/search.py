"""The search: at given degrees, the fastest way through every stage."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from tpcourse.comm.placement import Placement
from tpcourse.models.block import RECOMPUTE
from tpcourse.plan.chain import Bound, Chain, Mode, Search
from tpcourse.plan.cost import Piece, Prices, in_flight
from tpcourse.plan.front import NONE, Front, either, front
from tpcourse.plan.layout import LayerPlan, Plan
from tpcourse.plan.options import Degrees, schemes_for
from tpcourse.predict.volume import Formulas


class Stages:
    """The stages of a model at certain degrees: each is a chain, of which the best way is the plan.

    All is counted for a whole step: seconds of all micro-batches and of the update, which is linear in a
    rank's parameters; bytes of parameters, gradients and optimizer, and of the activations under way.
    """

    def __init__(self, prices: Prices, degrees: Degrees, global_batch: int) -> None:
        self.prices, self.degrees, self.global_batch = prices, degrees, global_batch
        self.count = degrees.micro_batches(global_batch)
        self.schemes = schemes_for(prices.model, degrees.ranks, degrees.micro_batch)
        self.layers = prices.model.num_layers // degrees.stages
        self._known: dict[int, list[Mode]] = {}
        once, twice = (prices.update(size, degrees.ranks, degrees.replicas).total for size in (2**30, 2**31))
        self.per_byte, self.always = (twice - once) / 2**30, 2 * once - twice

    @cached_property
    def least(self) -> float:
        """Seconds that no plan at these degrees goes below: the fastest scheme of each part, and no moves."""
        if not self.schemes:
            return np.inf
        embedding, attention, mlp, head = (self._points(name, self.schemes, 1)[:, 0].min()
                                           for name in ("embedding", "attention", "mlp", "head"))
        layers, last = self.layers * (attention + mlp), self.degrees.stages - 1
        ends = [embedding, head] if last else [embedding + head]
        return self._step([layers + end for end in ends] + [layers] * (last - 1)) + self.always

    def best(self, budget: float, within: float = 0.0, limit: float = np.inf) -> tuple[float, Plan] | None:
        """Seconds of a step by the fastest plan within the budget of every rank, and the plan.

        Or one that takes at most the share `within` longer. None if all take `limit` seconds or more.
        """
        best = None
        for quickest, start, end, home in sorted(self._ends(), key=lambda ends: ends[0]):
            if quickest >= limit * (1 - within):
                break
            found = self._pipeline(start, end, home, budget, within, limit)
            if found and found[0] < limit:
                best, limit = found, found[0]
        return best

    @cached_property
    def layouts(self) -> list[Placement]:
        """Of the residual stream, each once."""
        return list(dict.fromkeys(scheme.outer for scheme in self.schemes))

    @cached_property
    def moves(self) -> list[np.ndarray]:
        """Seconds from layout to layout, [A, A]: once, and with a recomputation."""
        return [np.array([[self._move(a, b, again) for b in self.layouts] for a in self.layouts])
                for again in (False, True)]

    def _move(self, a: Placement, b: Placement, again: bool) -> float:
        return self.count * self.prices.move(a, b, self.degrees.micro_batch, again).total

    def _points(self, name: str, schemes: list[Formulas], kept: int, recompute: str = "none") -> np.ndarray:
        """Seconds and bytes of a part in each of the schemes, its activations those of `kept` micro-batches."""
        return np.array([self._point(self.prices.part(name, scheme, self.degrees.micro_batch, recompute), kept)
                         for scheme in schemes])

    def _point(self, piece: Piece, kept: int) -> tuple[float, float]:
        return (self.count * piece.total + self.per_byte * piece.held.parameters,
                piece.state + kept * piece.held.activations)

    def _part(self, name: str, schemes: list[Formulas], kept: int, recompute: str = "none") -> list[Front]:
        """For each layout the front of the schemes that have it."""
        points = self._points(name, schemes, kept, recompute)
        if name in ("embedding", "head"):
            points[:, 0] += [self.prices.tie(scheme).total for scheme in schemes]
        found = []
        for layout in self.layouts:
            here = [i for i, scheme in enumerate(schemes) if scheme.outer == layout]
            found.append(front(points[here], [(schemes[i], recompute) for i in here]))
        return found

    def _modes(self, kept: int) -> list[Mode]:
        if kept not in self._known:
            self._known[kept] = [self._mode(kept, recompute) for recompute in RECOMPUTE]
        return self._known[kept]

    def _mode(self, kept: int, recompute: str) -> Mode:
        return Mode(self._part("attention", self.schemes, kept, recompute),
                    self.moves[recompute == "full"], self._part("mlp", self.schemes, kept, recompute))

    def _ends(self) -> Iterator[tuple[float, list[Formulas], list[Formulas], int]]:
        """Schemes for the embedding and for the head, the layout between stages, and seconds without a budget."""
        for home, layout in enumerate(self.layouts):
            schemes = [scheme for scheme in self.schemes if scheme.outer == layout]
            tied = self.prices.model.tied  # then the head has no choice
            for start, end in [([one], [one]) for one in schemes] if tied else [(schemes, self.schemes)]:
                last = self.degrees.stages - 1
                values = {number: Bound(self._chain(number, start, end, home), price=0).value
                          + self.always + self._boundary(number, home) for number in {0, min(1, last), last}}
                yield self._step([values[number if number in (0, last) else 1] for number in range(last + 1)]), start, end, home

    def _step(self, works: list[float]) -> float:
        """Seconds of a step in which stages work so long: see `Cost.seconds`."""
        return max(works) + (sum(works) - max(works)) / self.count

    def _pipeline(self, start: list[Formulas], end: list[Formulas], home: int, budget: float,
                  within: float, limit: float) -> tuple[float, Plan] | None:
        """The plan of all stages, each the fastest within the budget: so is then the whole."""
        numbers, degrees = range(self.degrees.stages), self.degrees
        searches = [Search(self._chain(number, start, end, home), budget) for number in numbers]
        always = [self.always + self._boundary(number, home) for number in numbers]
        if any(search.value == np.inf for search in searches) or self._step([search.value + more for search, more in zip(searches, always)]) >= limit * (1 - within):
            return None
        ways = [search.way(within) for search in searches]
        layers = tuple(LayerPlan(attention, mlp, recompute) for way in ways
                       for (attention, recompute), (mlp, _) in way.layers)
        seconds = self._step([way.seconds + more for way, more in zip(ways, always)])
        return seconds, Plan(self.prices.model, self.global_batch, degrees.micro_batch, degrees.replicas,
                             degrees.stages, ways[0].start[0], layers, ways[-1].end[0])

    def _chain(self, number: int, start: list[Formulas], end: list[Formulas], home: int) -> Chain:
        last = self.degrees.stages - 1
        kept = in_flight(number, self.degrees.stages, self.count)
        begin = self._part("embedding", start, kept) if number == 0 else self._at(home)
        heads = self._part("head", end, kept) if number == last else self._at(home)
        finish = [either([head.later(self.moves[0][a, b]) for b, head in enumerate(heads) if len(head)])
                  for a in range(len(self.layouts))]
        return Chain(begin, self.moves[0], self._modes(kept), finish, self.layers)

    def _at(self, home: int) -> list[Front]:
        return [front([(0.0, 0.0)], [None]) if layout == home else NONE for layout in range(len(self.layouts))]

    def _boundary(self, number: int, home: int) -> float:
        last, degrees = self.degrees.stages - 1, self.degrees
        around = degrees.ranks * degrees.replicas, degrees.stages
        sends = (0 if last == 0 else 1 if number in (0, last) else 2)
        return self.count * self.prices.boundary(self.layouts[home], around, degrees.micro_batch, sends).total
