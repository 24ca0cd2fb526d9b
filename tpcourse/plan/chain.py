"""The fastest way through a stage's layers within a budget of memory: dynamic programming over fronts.

From part to part the residual stream may change its layout. Seconds and bytes add up, so what matters of all
ways to a layout is their front; it grows, part by part, and what cannot lead to the best end is dropped on the
way. What can is said by a bound: with a price on each byte instead of a budget, the best rest of the way is a
shortest path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tpcourse.plan.front import NONE, Front, both, either

ROUNDING = 1e-12  # relative
ALIVE = 100  # ways to one place; of more the most hopeful go on, unless the search is to be exact


@dataclass(frozen=True)
class Mode:
    """One of the ways to run a layer, as what it recomputes: the choices for each layout, by number.

    attention, mlp: [A] fronts, of parts that begin and end in a layout. between: [A, A], seconds from the
    attention's layout to the MLP's.
    """

    attention: list[Front]
    between: np.ndarray
    mlp: list[Front]


@dataclass(frozen=True)
class Chain:
    """`layers` equal layers, each in one of the modes, between what begins and ends a stage.

    start, end: [A] fronts of what stands before the first layer and ends in a layout, and of what stands
    behind the last and begins there. moves: [A, A], seconds from one layout to another before a layer.
    """

    start: list[Front]
    moves: np.ndarray
    modes: Sequence[Mode]
    end: list[Front]
    layers: int


@dataclass(frozen=True)
class Step:
    """A choice on the way: its seconds with those of the move to it, bytes, and the layout it has."""

    seconds: float
    bytes: float
    choice: object
    layout: int
    move: float = 0.0


@dataclass(frozen=True)
class Way:
    """All choices in order: the start, of each layer (attention, MLP), and the end.
"""

    seconds: float
    bytes: float
    start: object
    layers: tuple
    end: object


class Bound:
    """The least of weight * seconds + price * bytes that is still to come, at every place of a chain.

    With k layers to go: before[k][a] in layout a; moved[k][b] the next attention being in b; after[k][r][b]
    behind that attention in mode r. `value`: of all the way. With weight 0 and price 1: the least memory.
    """

    def __init__(self, chain: Chain, price: float, weight: float = 1.0) -> None:
        self.chain, self.price, self.weight = chain, price, weight
        self.attention, self.mlp = (np.array([[self.least(front) for front in getattr(mode, part)]
                                              for mode in chain.modes]) for part in ("attention", "mlp"))
        self.between = weight * np.array([mode.between for mode in chain.modes])  # [modes, A, A]
        self.before = [np.array([self.least(front) for front in chain.end])]
        self.after, self.moved = [None], [None]
        for _ in range(chain.layers):
            self.after.append((self.between + (self.mlp + self.before[-1])[:, None, :]).min(2))
            self.moved.append((self.attention + self.after[-1]).min(0))
            self.before.append((weight * chain.moves + self.moved[-1]).min(1))
        self.start = np.array([self.least(front) for front in chain.start])
        self.value = float((self.start + self.before[-1]).min())

    def steps(self) -> list[Step]:
        """The way that is best at this price, choice by choice; there must be one."""
        here = int((self.start + self.before[-1]).argmin())
        taken = [self._step(self.chain.start[here], here, 0.0)]
        for k in range(self.chain.layers, 0, -1):
            b = int((self.weight * self.chain.moves[here] + self.moved[k]).argmin())
            r = int((self.attention[:, b] + self.after[k][:, b]).argmin())
            d = int((self.between[r, b] + self.mlp[r] + self.before[k - 1]).argmin())
            mode = self.chain.modes[r]
            taken += [self._step(mode.attention[b], b, self.chain.moves[here, b]),
                      self._step(mode.mlp[d], d, mode.between[b, d])]
            here = d
        return [*taken, self._step(self.chain.end[here], here, 0.0)]

    def sums(self, front: Front) -> np.ndarray:
        """Of each way of a front, weighed and priced."""
        return self.weight * front.seconds + self.price * front.bytes

    def least(self, front: Front) -> float:
        """The least of them; infinite if there is none."""
        return float(self.sums(front).min()) if len(front) else np.inf

    def _step(self, front: Front, layout: int, move: float) -> Step:
        i = int(self.sums(front).argmin())
        return Step(front.seconds[i] + move, front.bytes[i], front.ways[i], layout, move)


def way(steps: Sequence[Step]) -> Way:
    """The choices of a way in one."""
    start, *inner, end = (step.choice for step in steps)
    return Way(sum(step.seconds for step in steps), sum(step.bytes for step in steps), start,
               tuple(zip(inner[::2], inner[1::2])), end)


class Search:
    """The fastest way that needs at most `budget` bytes. `value`: seconds that it does not go below.

    The value is infinite if no way fits. It is the fastest way's own, or the bound at the price of a byte at
    which that is sharpest: where a way that is too full and one that fits are both best.
    """

    def __init__(self, chain: Chain, budget: float) -> None:
        self.chain, self.budget, self.bound, self.value = chain, budget, None, np.inf
        least = Bound(chain, price=1, weight=0)
        if least.value > budget:
            return
        quick = Bound(chain, price=0)
        self.full, self.fits = quick.steps(), least.steps()
        if way(self.full).bytes <= budget:
            self.fits, self.value = self.full, quick.value
        else:
            self._relax()

    def way(self, within: float) -> Way:
        """The way itself; there must be one. With a tolerance, one of which it saves less than the share `within`.

        Then at most ALIVE ways go on from each place: the tolerance holds for all but rare, larger searches.
        """
        known = way(self.fits)
        if self.bound is None:
            return known
        known = _spliced(self.chain, self.budget, self.full, self.fits) or known
        walk = _Walk(self.bound, self.budget, known.seconds * (1 - within), ALIVE if within else None)
        return min(walk.best() or known, known, key=lambda way: way.seconds)

    def _relax(self) -> None:
        while True:
            full, fits = way(self.full), way(self.fits)
            price = (fits.seconds - full.seconds) / (full.bytes - fits.bytes)
            self.bound = Bound(self.chain, price)
            if self.bound.value >= (fits.seconds + price * fits.bytes) * (1 - ROUNDING):
                break
            steps = self.bound.steps()
            if way(steps).bytes <= self.budget:
                self.fits = steps
            else:
                self.full = steps
        self.value = self.bound.value - price * self.budget


def _spliced(chain: Chain, budget: float, one: list[Step], other: list[Step]) -> Way | None:
    """The fastest way within the budget that begins as one of two and, from some layer on, is the other."""
    found = []
    for first, second in ((one, other), (other, one)):
        for k in range(1, 2 * chain.layers, 2):
            turn = chain.moves[first[k - 1].layout, second[k].layout] - second[k].move
            whole = way([*first[:k], *second[k:]])
            found += [replace(whole, seconds=whole.seconds + turn)] if whole.bytes <= budget else []
    return min(found, key=lambda whole: whole.seconds, default=None)


class _Walk:
    """From part to part with all fronts, less what by the bound takes more than `limit` seconds in the end.

    With more than `alive` ways to one place, the most hopeful go on.
    """

    def __init__(self, bound: Bound, budget: float, limit: float, alive: int | None) -> None:
        self.bound, self.chain, self.budget, self.alive = bound, bound.chain, budget, alive
        self.most = (limit + bound.price * budget) * (1 + ROUNDING)

    def best(self) -> Way | None:
        """The fastest way within the budget; None if it takes more than the limit."""
        front, choices = self.whole(), []
        if not len(front):
            return None
        start, end = front.ways[-1]
        for _ in range(2 * self.chain.layers):
            start, choice = start
            choices.insert(0, choice)
        return Way(front.seconds[-1], front.bytes[-1], start, tuple(zip(choices[::2], choices[1::2])), end)

    def whole(self) -> Front:
        """All ways to the end within the budget; what they are is pairs in pairs."""
        fronts = self.chain.start
        for k in range(self.chain.layers, 0, -1):
            before, ends = self.bound.before[k - 1], []
            moved = self.moves(fronts, self.chain.moves, self.bound.moved[k])
            for r, mode in enumerate(self.chain.modes):
                behind = self.parts(moved, mode.attention, self.bound.after[k][r])
                behind = self.moves(behind, mode.between, self.bound.mlp[r] + before)
                ends.append(self.parts(behind, mode.mlp, before))
            fronts = [self.hopeful(either(fronts), rest) for fronts, rest in zip(zip(*ends), before)]
        whole = either(self.parts(fronts, self.chain.end, np.zeros(len(fronts))))
        return whole.only(whole.bytes <= self.budget)

    def moves(self, fronts: list[Front], seconds: np.ndarray, rest: np.ndarray) -> list[Front]:
        """Those of each layout, from all others; `rest`: what is then still to come."""
        alive = np.array([self.bound.least(front) for front in fronts])[:, None] + seconds + rest <= self.most
        return [self.hopeful(either([fronts[a].later(seconds[a, b]) for a in np.flatnonzero(alive[:, b])]), left)
                for b, left in enumerate(rest)]

    def parts(self, fronts: list[Front], choices: list[Front], rest: np.ndarray) -> list[Front]:
        """Those of each layout with one more part."""
        return [self.hopeful(both(front, choice), left) if len(front) and self.bound.least(front)
                + self.bound.least(choice) + left <= self.most else NONE
                for front, choice, left in zip(fronts, choices, rest)]

    def hopeful(self, front: Front, rest: float) -> Front:
        """Those that may be the best."""
        sums = self.bound.sums(front) + rest
        keep = sums <= self.most
        if self.alive and np.count_nonzero(keep) > self.alive:
            keep = sums <= np.partition(sums, self.alive)[self.alive]
        return front.only(keep)
