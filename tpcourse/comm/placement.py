"""Which block of an activation each rank holds, and what ranks send when it is to be another one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import cycle, product

import numpy as np

Block = tuple[slice, slice]  # of tokens, of features


@dataclass(frozen=True)
class Placement:
    """Rank r of a group holds part `tokens[r]` of the tokens and part `features[r]` of the features.

    An activation is [tokens, features], cut into equal parts both ways; ranks of the same two parts hold
    copies. Two placements are equal if every rank holds the same in both.
    """

    tokens: tuple[int, ...]
    features: tuple[int, ...]

    @classmethod
    def on(cls, mesh: Mapping[str, int], tokens: Sequence[str] = (),
           features: Sequence[str] = ()) -> "Placement":
        """Tokens cut over some dimensions of a mesh, features over others, of each list the first the coarsest.

        `mesh`: names and sizes, the last varying fastest over the ranks.
        """
        places = [dict(zip(mesh, place)) for place in product(*map(range, mesh.values()))]
        return cls(*(tuple(_part(place, names, mesh) for place in places) for names in (tokens, features)))

    @cached_property
    def parts(self) -> tuple[int, int]:
        """How many parts there are of the tokens, and of the features."""
        return max(self.tokens) + 1, max(self.features) + 1

    def block(self, rank: int, n: int, h: int) -> Block:
        """Which block of [n, h] a rank holds.

        Raises ValueError if n or h does not split into equal parts.
        """
        (cut_n, cut_h), wholes = self.parts, {"tokens": n, "features": h}
        for (what, whole), parts in zip(wholes.items(), (cut_n, cut_h)):
            if whole % parts:
                raise ValueError(f"{whole} {what} do not split into {parts} equal parts; make it "
                                 f"{whole + -whole % parts}")
        return _span(self.tokens[rank], n // cut_n), _span(self.features[rank], h // cut_h)

    def holders(self) -> dict[tuple[int, int], list[int]]:
        """The ranks that hold each two parts."""
        found = {}
        for rank, parts in enumerate(zip(self.tokens, self.features)):
            found.setdefault(parts, []).append(rank)
        return found


def to_send(source: Placement, target: Placement, n: int, h: int) -> list[list[list[Block]]]:
    """What goes from rank to rank of an activation [n, h], that each may hold `target`: blocks[from][to].

    A rank sends itself nothing. Ranks that hold copies of what others lack take turns in sending it.
    Raises ValueError if the placements are of different numbers of ranks, or n or h does not split.
    """
    ranks = _same_ranks(source, target)
    blocks = [[[] for _ in range(ranks)] for _ in range(ranks)]
    wanted = [target.block(to, n, h) for to in range(ranks)]
    for holders in source.holders().values():
        block, turns = source.block(holders[0], n, h), cycle(holders)
        for to in range(ranks):
            both = overlap(wanted[to], block)
            if both and to not in holders:
                blocks[next(turns)][to].append(both)
    return blocks


def overlap(a: Block, b: Block) -> Block | None:
    """What lies in both blocks; None if nothing does."""
    both = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b))
    return both if all(span.start < span.stop for span in both) else None


@cache
def share_sent(source: Placement, target: Placement) -> tuple[float, ...]:
    """The share of all numbers of an activation that each rank sends: what `to_send` sends of [n, h], over n h.

    Raises ValueError as `to_send` does.
    """
    n, h = (a * b for a, b in zip(source.parts, target.parts))
    ranks, held = np.arange(_same_ranks(source, target)), list(source.holders().values())
    have, want = _edges(source, [holders[0] for holders in held], n, h)[:, None], _edges(target, ranks, n, h)
    sides = np.minimum(have[..., 1], want[..., 1]) - np.maximum(have[..., 0], want[..., 0])
    common, sent = sides.clip(0).prod(-1), np.zeros(len(ranks))  # [blocks, ranks]
    for numbers, holders in zip(common, held):
        numbers[holders] = 0
        lacking = numbers[numbers > 0]
        np.add.at(sent, np.resize(holders, len(lacking)), lacking)
    return tuple(sent / (n * h))


def _edges(placement: Placement, ranks: Iterable[int], n: int, h: int) -> np.ndarray:
    """Where the blocks of these ranks begin and end, [ranks, 2, 2]: tokens, features."""
    return np.array([[(span.start, span.stop) for span in placement.block(rank, n, h)] for rank in ranks])


def _same_ranks(source: Placement, target: Placement) -> int:
    ranks = len(source.tokens)
    if len(target.tokens) != ranks:
        raise ValueError(f"placements on {ranks} and {len(target.tokens)} ranks; an activation moves within "
                         "one group")
    return ranks


def _part(place: Mapping[str, int], names: Sequence[str], mesh: Mapping[str, int]) -> int:
    number = 0
    for name in names:
        number = number * mesh[name] + place[name]
    return number


def _span(part: int, size: int) -> slice:
    return slice(part * size, (part + 1) * size)
