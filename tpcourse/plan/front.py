"""Fronts: of many ways to do something, those that no other one beats in both seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Front:
    """Ways to do something, the emptiest first, each faster than all before it.

    seconds, bytes: [ways]; `ways`: what each one is.
    """

    seconds: np.ndarray
    bytes: np.ndarray
    ways: list

    def __len__(self) -> int:
        return len(self.ways)

    def later(self, seconds: float) -> Front:
        """The same, each taking so much longer."""
        return Front(self.seconds + seconds, self.bytes, self.ways)

    def only(self, keep: np.ndarray) -> Front:
        """Those of which `keep`, [ways], is true."""
        return Front(self.seconds[keep], self.bytes[keep], [way for way, kept in zip(self.ways, keep) if kept])


def unbeaten(seconds: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Which of these ways, as indices, belong to their front."""
    order = np.lexsort((seconds, nbytes))
    fastest = np.minimum.accumulate(seconds[order])
    return order[np.r_[True, fastest[1:] < fastest[:-1]][: len(order)]]


def front(points: Sequence[tuple[float, float]], ways: Sequence) -> Front:
    """The front of ways that take these (seconds, bytes)."""
    seconds, nbytes = np.array(points, dtype=float).reshape(-1, 2).T
    kept = unbeaten(seconds, nbytes)
    return Front(seconds[kept], nbytes[kept], [ways[i] for i in kept])


NONE = front([], [])


def either(fronts: Sequence[Front]) -> Front:
    """One front of several, or of none."""
    fronts = [front for front in fronts if len(front)] or [NONE]
    if len(fronts) == 1:
        return fronts[0]
    seconds = np.concatenate([f.seconds for f in fronts])
    nbytes = np.concatenate([f.bytes for f in fronts])
    kept = unbeaten(seconds, nbytes)
    ways = [way for f in fronts for way in f.ways]
    return Front(seconds[kept], nbytes[kept], [ways[i] for i in kept])


def both(one: Front, other: Front) -> Front:
    """One thing, then the other, each in any of its ways: a way of both is the pair."""
    if not len(one) or not len(other):
        return NONE
    seconds = (one.seconds[:, None] + other.seconds).ravel()
    nbytes = (one.bytes[:, None] + other.bytes).ravel()
    kept = unbeaten(seconds, nbytes)
    pairs = [divmod(int(i), len(other)) for i in kept]
    return Front(seconds[kept], nbytes[kept], [(one.ways[a], other.ways[b]) for a, b in pairs])
