"""A simulator of collectives: what each rank holds before and after every step, in symbols that cannot lie.

Rank 2's contribution to chunk `b` of a message is the term b2, and a sum is the tuple of its terms. A
schedule only says which rank sends which chunk to whom in a step; what everyone then holds follows. Ranks
that have passed on a partial sum are shown without it, though in memory its stale bytes may remain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

Term = tuple[int, int]  # chunk, rank whose data it is
Cell = tuple[Term, ...]  # a sum of terms; () is nothing
Holds = tuple[tuple[Cell, ...], ...]  # [rank][slot]


@dataclass(frozen=True)
class Move:
    """In one step, `source` sends what it holds in `slot` to `target`, which adds it to its `to_slot`."""

    source: int
    target: int
    slot: int
    to_slot: int
    keep: bool  # whether the source goes on holding it


@dataclass(frozen=True)
class Frame:
    """What every rank holds at one moment, and the moves that lead from it to the next frame."""

    caption: str
    holds: Holds
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Simulation:
    """A collective on some ranks as a list of frames, from before the first step to after the last."""

    name: str
    ranks: int
    frames: tuple[Frame, ...]

    def sent(self) -> list[Fraction]:
        """What each rank sends, in messages; a message is all the slots of one rank, filled or not."""
        slots = len(self.frames[0].holds[0])
        moves = [move for frame in self.frames for move in frame.moves]
        return [Fraction(sum(move.source == rank for move in moves), slots) for rank in range(self.ranks)]


def simulate(name: str, ranks: int) -> Simulation:
    """Run one collective, `name` from `COLLECTIVES`, on `ranks` ranks.

    Raises:
        ValueError: a name that is not there, fewer than 1 or more than 26 ranks.
    """
    if name not in COLLECTIVES:
        raise ValueError(f"no collective {name!r}; there are {', '.join(COLLECTIVES)}")
    if not 1 <= ranks <= 26:
        raise ValueError(f"ranks={ranks}, but chunks are named by letters, so 1 to 26 ranks can be drawn")
    start, schedule = COLLECTIVES[name]
    steps = [step for step in schedule(ranks) if step]
    holds, frames = start(ranks), []
    for index, step in enumerate(steps):
        half = ": reduce-scatter done" if name == "all_reduce" and index == ranks - 1 else ""
        frames.append(Frame(f"after step {index}{half}" if index else "before", holds, tuple(step)))
        holds = apply(holds, step)
    last = f"after step {len(steps)}, the last" if steps else "before and after"
    return Simulation(name, ranks, (*frames, Frame(last, holds, ())))


def apply(holds: Holds, moves: list[Move]) -> Holds:
    """What everyone holds after all `moves` happened at once."""
    after = [list(slots) for slots in holds]
    for move in moves:
        if not move.keep:
            after[move.source][move.slot] = ()
    for move in moves:
        sent = holds[move.source][move.slot]
        after[move.target][move.to_slot] = tuple(sorted(after[move.target][move.to_slot] + sent))
    return tuple(map(tuple, after))


def copy(source: int, target: int, slot: int) -> Move:
    return Move(source, target, slot, slot, keep=True)


def give(source: int, target: int, slot: int, to_slot: int | None = None) -> Move:
    return Move(source, target, slot, slot if to_slot is None else to_slot, keep=False)


# What the ranks hold before: rank r's chunk c is the term (c, r).

def _everyone_all(n: int) -> Holds:
    return tuple(tuple(((c, r),) for c in range(n)) for r in range(n))


def _everyone_own(n: int) -> Holds:
    return tuple(tuple(((c, r),) if c == r else () for c in range(n)) for r in range(n))


def _rank0_all(n: int) -> Holds:
    return tuple(tuple(((c, 0),) if r == 0 else () for c in range(n)) for r in range(n))


def _rank0_one(n: int) -> Holds:
    return tuple(((((0, 0),) if r == 0 else ()),) for r in range(n))


def _everyone_one(n: int) -> Holds:
    return tuple((((0, r),),) for r in range(n))


# Who sends which chunk to whom, step by step.

def _broadcast(n: int) -> list[list[Move]]:
    """A chain: while rank 1 passes the first chunk on, rank 0 sends it the second."""
    return [[copy(r, r + 1, t - r) for r in range(n - 1) if 0 <= t - r < n] for t in range(2 * n - 2)]


def _reduce(n: int) -> list[list[Move]]:
    """The chain backward: sums travel from the last rank to rank 0."""
    hops = [(r, n - 1 - r) for r in range(1, n)]
    return [[give(r, r - 1, t - hop) for r, hop in hops if 0 <= t - hop < n] for t in range(2 * n - 2)]


def _scatter(n: int) -> list[list[Move]]:
    return [[give(0, r, r)] for r in range(1, n)]


def _gather(n: int) -> list[list[Move]]:
    return [[give(r, 0, r)] for r in range(1, n)]


def _ring_all_gather(n: int) -> list[list[Move]]:
    """Everyone passes on what it received last; at first, its own chunk."""
    return [[copy(r, (r + 1) % n, (r - t) % n) for r in range(n)] for t in range(n - 1)]


def _ring_reduce_scatter(n: int) -> list[list[Move]]:
    """Everyone passes on the partial sum it received last; chunk r ends its trip on rank r."""
    return [[give(r, (r + 1) % n, (r - t - 1) % n) for r in range(n)] for t in range(n - 1)]


def _ring_all_reduce(n: int) -> list[list[Move]]:
    return _ring_reduce_scatter(n) + _ring_all_gather(n)


def _all_to_all(n: int) -> list[list[Move]]:
    """Pairwise exchange: in step t rank r swaps chunks with rank r XOR t."""
    return [[give(r, r ^ t, r ^ t, r) for r in range(n) if r ^ t < n] for t in range(1, 2 * n)]


def _send(n: int) -> list[list[Move]]:
    return [[copy(0, 1, 0)]] if n > 1 else []


def _ring_shift(n: int) -> list[list[Move]]:
    return [[give(r, (r + 1) % n, 0) for r in range(n)]] if n > 1 else []


COLLECTIVES: dict[str, tuple[Callable[[int], Holds], Callable[[int], list[list[Move]]]]] = {
    "broadcast": (_rank0_all, _broadcast),
    "reduce": (_everyone_all, _reduce),
    "scatter": (_rank0_all, _scatter),
    "gather": (_everyone_own, _gather),
    "all_gather": (_everyone_own, _ring_all_gather),
    "reduce_scatter": (_everyone_all, _ring_reduce_scatter),
    "all_reduce": (_everyone_all, _ring_all_reduce),
    "all_to_all": (_everyone_all, _all_to_all),
    "send_recv": (_rank0_one, _send),
    "ring_shift": (_everyone_one, _ring_shift),
}
