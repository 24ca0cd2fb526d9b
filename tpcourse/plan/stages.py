"""The stages of a pipeline as chains: every choice of every part, with its seconds and bytes of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tpcourse.comm.placement import Placement
from tpcourse.models.block import RECOMPUTE
from tpcourse.plan.chain import Chain, Mode
from tpcourse.plan.cost import Piece, Prices, in_flight
from tpcourse.plan.front import NONE, Front, either, front
from tpcourse.plan.options import Degrees, schemes_for
from tpcourse.predict.volume import Formulas


@dataclass(frozen=True)
class Ends:
    """What a pipeline may begin and end with, and the number of the layout between its stages."""

    embedding: list[Formulas]
    head: list[Formulas]
    home: int


class Stages:
    """The stages of a model at certain degrees.

    All is counted for a whole step: seconds of all micro-batches and of the update, which is linear in a
    rank's parameters; bytes of parameters, gradients and optimizer, and of the activations under way.
    """

    def __init__(self, prices: Prices, degrees: Degrees, global_batch: int) -> None:
        self.prices, self.degrees, self.global_batch = prices, degrees, global_batch
        self.count = degrees.micro_batches(global_batch)
        self.schemes = schemes_for(prices.model, degrees.ranks, degrees.micro_batch)
        self.layers, self.last = prices.model.num_layers // degrees.stages, degrees.stages - 1
        once, twice = (prices.update(size, degrees.ranks, degrees.replicas).total for size in (2**30, 2**31))
        self.per_byte, self.always = (twice - once) / 2**30, 2 * once - twice
        self._modes: dict[int, list[Mode]] = {}

    @cached_property
    def least(self) -> float:
        """Seconds that no plan at these degrees goes below: the fastest scheme of each part, and no moves."""
        if not self.schemes:
            return np.inf
        embedding, attention, mlp, head = (self.points(name, self.schemes, 1)[:, 0].min()
                                           for name in ("embedding", "attention", "mlp", "head"))
        layers = self.layers * (attention + mlp)
        ends = [embedding, head] if self.last else [embedding + head]
        return self.step([layers + end for end in ends] + [layers] * (self.last - 1)) + self.always

    def step(self, works: list[float]) -> float:
        """Seconds of a step in which the stages work so long: see `Cost.seconds`."""
        slowest = max(works)
        return slowest + (sum(works) - slowest) / self.count if slowest < np.inf else np.inf

    def kept(self, number: int) -> int:
        """Micro-batches of which a stage keeps activations."""
        return in_flight(number, self.last + 1, self.count)

    def points(self, name: str, schemes: list[Formulas], kept: int, recompute: str = "none") -> np.ndarray:
        """Seconds and bytes of a part in each scheme, [schemes, 2], with `kept` micro-batches' activations."""
        pieces = [self.prices.part(name, scheme, self.degrees.micro_batch, recompute, self.last > 0)
                  for scheme in schemes]
        return np.array([self._point(piece, kept) for piece in pieces])

    def _point(self, piece: Piece, kept: int) -> tuple[float, float]:
        return (self.count * piece.total + self.per_byte * piece.held.parameters,
                piece.state + kept * piece.held.activations)

    @cached_property
    def layouts(self) -> list[Placement]:
        """Of the residual stream, each once."""
        return list(dict.fromkeys(scheme.outer for scheme in self.schemes))

    @cached_property
    def moves(self) -> list[np.ndarray]:
        """Seconds from layout to layout, [A, A]: once, and with a recomputation."""
        return [np.array([[self.count * self.prices.move(a, b, self.degrees.micro_batch, again).total
                           for b in self.layouts] for a in self.layouts]) for again in (False, True)]

    @property
    def ends(self) -> Iterator[Ends]:
        """All that there are; a tied head has the embedding's scheme."""
        for home, layout in enumerate(self.layouts):
            schemes = [scheme for scheme in self.schemes if scheme.outer == layout]
            if self.prices.model.tied:
                yield from (Ends([scheme], [scheme], home) for scheme in schemes)
            else:
                yield Ends(schemes, self.schemes, home)

    def chain(self, number: int, ends: Ends) -> Chain:
        """Stage `number`, counted from 0."""
        kept = self.kept(number)
        between = [front([(0.0, 0.0)], [None]) if home == ends.home else NONE for home in range(len(self.layouts))]
        begin = self._part("embedding", ends.embedding, kept) if number == 0 else between
        heads = self._part("head", ends.head, kept) if number == self.last else between
        finish = [either([head.later(move) for head, move in zip(heads, moves) if len(head)])
                  for moves in self.moves[0]]
        return Chain(begin, self.moves[0], self._of_layers(kept), finish, self.layers)

    def unmoved(self, number: int) -> Chain:
        """Stage `number` if no move took any time: all schemes of a part are then one front."""
        def part(name: str, recompute: str = "none") -> list[Front]:
            return [front(self.points(name, self.schemes, self.kept(number), recompute), self.schemes)]

        nothing, never = [front([(0.0, 0.0)], [None])], np.zeros((1, 1))
        modes = [Mode(part("attention", recompute), never, part("mlp", recompute)) for recompute in RECOMPUTE]
        return Chain(part("embedding") if number == 0 else nothing, never, modes,
                     part("head") if number == self.last else nothing, self.layers)

    def always_of(self, number: int, ends: Ends) -> float:
        """Seconds of a stage that nothing in it changes: a message more for the gradients, and its neighbours."""
        around = self.degrees.ranks * self.degrees.replicas, self.last + 1
        sends = 0 if self.last == 0 else 1 if number in (0, self.last) else 2
        boundary = self.prices.boundary(self.layouts[ends.home], around, self.degrees.micro_batch, sends)
        return self.always + self.count * boundary.total

    def _of_layers(self, kept: int) -> list[Mode]:
        if kept not in self._modes:
            self._modes[kept] = [
                Mode(self._part("attention", self.schemes, kept, recompute), self.moves[recompute == "full"],
                     self._part("mlp", self.schemes, kept, recompute)) for recompute in RECOMPUTE]
        return self._modes[kept]

    def _part(self, name: str, schemes: list[Formulas], kept: int, recompute: str = "none") -> list[Front]:
        """For each layout the front of the schemes that have it."""
        points = self.points(name, schemes, kept, recompute)
        if name in ("embedding", "head"):
            points[:, 0] += [self.prices.tie(scheme, self.last > 0).total for scheme in schemes]
        found = []
        for layout in self.layouts:
            here = [i for i, scheme in enumerate(schemes) if scheme.outer == layout]
            found.append(front(points[here], [(schemes[i], recompute) for i in here]))
        return found
