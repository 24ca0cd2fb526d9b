"""The fastest way through a stage's layers within a budget of memory: dynamic programming over fronts.

A layer begins in one layout of the residual stream and ends in another. Seconds and bytes add up from layer
to layer, so what matters of all ways to a layout is their front; it grows, layer by layer, and what cannot
lead to the best end is dropped on the way. What can is said by a bound: with a price on each byte instead of
a budget, the best rest of the way is a shortest path.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tpcourse.plan.front import Front, both, either

ROUNDING = 1e-12  # relative


@dataclass(frozen=True)
class Chain:
    """`layers` equal layers. Of A layouts, all by number:

    start, end: what may stand before the first layer and ends in a layout, and behind the last and begins
    there. moves: [A, A], seconds from one layout to another. inside[b][d]: a layer from layout b to d.
    """

    start: list[Front]
    moves: np.ndarray
    inside: list[list[Front]]
    end: list[Front]
    layers: int


@dataclass(frozen=True)
class Way:
    """Seconds, bytes, and what was chosen: at the start, of each layer, at the end."""

    seconds: float
    bytes: float
    start: object
    layers: tuple
    end: object


class Bound:
    """The least of weight * seconds + price * bytes that is still to come, before every layer.

    before[k][a]: k layers to go, in layout a; moved[k][b]: the same, the next layer beginning in layout b.
    `value`: of all the way. With weight 0 and price 1 it is the least memory.
    """

    def __init__(self, chain: Chain, price: float, weight: float = 1.0) -> None:
        self.chain, self.price, self.weight = chain, price, weight
        self.inside = np.array([[self._least(front) for front in row] for row in chain.inside])
        self.before, self.moved = [np.array([self._least(front) for front in chain.end])], [None]
        for _ in range(chain.layers):
            self.moved.append((self.inside + self.before[-1]).min(1))
            self.before.append((weight * chain.moves + self.moved[-1]).min(1))
        self.start = np.array([self._least(front) for front in chain.start])
        self.value = float((self.start + self.before[-1]).min())

    def way(self) -> Way:
        """The way that is best at this price; there must be one."""
        chain, here = self.chain, int((self.start + self.before[-1]).argmin())
        taken = [self._pick(chain.start[here])]
        for k in range(chain.layers, 0, -1):
            begins = int((self.weight * chain.moves[here] + self.moved[k]).argmin())
            ends = int((self.inside[begins] + self.before[k - 1]).argmin())
            seconds, nbytes, chosen = self._pick(chain.inside[begins][ends])
            taken.append((seconds + chain.moves[here, begins], nbytes, chosen))
            here = ends
        taken.append(self._pick(chain.end[here]))
        seconds, nbytes, (start, *layers, end) = zip(*taken)
        return Way(sum(seconds), sum(nbytes), start, tuple(layers), end)

    def _sums(self, front: Front) -> np.ndarray:
        return self.weight * front.seconds + self.price * front.bytes

    def _least(self, front: Front) -> float:
        return float(self._sums(front).min()) if len(front) else np.inf

    def _pick(self, front: Front) -> tuple[float, float, object]:
        i = int(self._sums(front).argmin())
        return front.seconds[i], front.bytes[i], front.ways[i]


def emptiest(chain: Chain) -> Way | None:
    """The way that needs least memory; None if there is none at all."""
    bound = Bound(chain, price=1, weight=0)
    return bound.way() if bound.value < np.inf else None


def fastest(chain: Chain, budget: float) -> Way | None:
    """The way that takes least of all that need at most `budget` bytes; None if there is none."""
    least = emptiest(chain)
    if least is None or least.bytes > budget:
        return None
    quick = Bound(chain, price=0).way()
    if quick.bytes <= budget:
        return quick
    bound, known = _priced(chain, budget, quick, least)
    return _walk(chain, budget, bound, known)


def _priced(chain: Chain, budget: float, full: Way, fits: Way) -> tuple[Bound, Way]:
    """The price of a byte at which the bound is sharpest, and the fastest way that fits at such a price.

    `full` is too full, and `fits` fits: the price makes both equal, until no other way is better at it.
    """
    while True:
        price = (fits.seconds - full.seconds) / (full.bytes - fits.bytes)
        bound = Bound(chain, price)
        if bound.value >= (fits.seconds + price * fits.bytes) * (1 - ROUNDING):
            return bound, fits
        way = bound.way()
        full, fits = (full, way) if way.bytes <= budget else (way, fits)


def _walk(chain: Chain, budget: float, bound: Bound, known: Way) -> Way:
    """From layer to layer with all fronts, less what the bound says cannot beat the way that is known."""
    limit = (known.seconds + bound.price * budget) * (1 + ROUNDING)

    def hopeful(front: Front, rest: float) -> Front:
        return front.only(front.seconds + bound.price * front.bytes + rest <= limit)

    layouts, fronts = range(len(chain.end)), chain.start
    for k in range(chain.layers, 0, -1):
        moved = [either([hopeful(fronts[a].later(chain.moves[a, b]), bound.moved[k][b]) for a in layouts])
                 for b in layouts]
        fronts = [either([hopeful(both(moved[b], chain.inside[b][d]), bound.before[k - 1][d])
                          for b in layouts]) for d in layouts]
    whole = either([both(front, end) for front, end in zip(fronts, chain.end)])
    whole = whole.only(whole.bytes <= budget)
    seconds, nbytes, (way, end) = whole.seconds[-1], whole.bytes[-1], whole.ways[-1]
    layers = []
    for _ in range(chain.layers):
        way, layer = way
        layers.append(layer)
    return Way(seconds, nbytes, way, tuple(reversed(layers)), end)
