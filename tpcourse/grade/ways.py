"""Ways through layers, found by definition, by fronts, and by the mistakes that people make.

A way is (time, memory) or (time, memory, choices), a choice for a layer (time, memory, name, layout); whole
numbers, so that sums are exact.
"""

from collections.abc import Callable, Iterable
from functools import partial

from tpcourse.plan import front as fronts

Way = tuple  # time, memory and, but for pairs, the names chosen so far
Layer = list[tuple[int, int, int, int]]
Moves = list[list[int]]
Found = list[Way]  # the way found, or nothing
ALL = float("inf")


def walk(layers: list[Layer], moves: Moves, budget: float, keep: Callable = list, start: int = -1) -> list[Way]:
    """All ways within the budget, of which behind every layer `keep` chooses: (time, memory, names, layout).

    start: the layout that they begin in; -1 for any.
    """
    ways = [(0, 0, (), start)]
    for layer in layers:
        ways = keep(
            [
                (time + more + (moves[at][layout] if at >= 0 else 0), memory + added, (*names, name), layout)
                for time, memory, names, at in ways
                for more, added, name, layout in layer
                if memory + added <= budget
            ]
        )
    return ways


def brute_force(layers: list[Layer], moves: Moves, budget: float) -> Found:
    """The fastest of all ways within the budget."""
    return _first(walk(layers, moves, budget))


def by_fronts(layers: list[Layer], moves: Moves, budget: float) -> Found:
    """The same by the fronts of `tpcourse.plan`, one for each layout."""
    layouts = range(len(moves))
    found = [fronts.front([(0, 0)], [()]) for _ in layouts]
    for layer in layers:
        arriving = [fronts.either([found[a].later(moves[a][b]) for a in layouts]) for b in layouts]
        own = [[choice for choice in layer if choice[3] == b] for b in layouts]
        found = [
            fronts.both(front, fronts.front([one[:2] for one in here], [one[2] for one in here]))
            for front, here in zip(arriving, own)
        ]
    whole = fronts.either(found)
    whole = whole.only(whole.bytes <= budget)
    return [(int(whole.seconds[-1]), int(whole.bytes[-1]), _flat(whole.ways[-1]))] if len(whole) else []


def _flat(pairs: tuple) -> tuple:
    """(((), a), b) as (a, b)."""
    return (*_flat(pairs[0]), pairs[1]) if pairs else ()


def short_sighted(layers: list[Layer], moves: Moves, budget: float) -> dict[str, list[Found]]:
    """What comes of looking at one layer, one way to each layout, or one choice; quick for many layers, too."""
    within = partial(walk, layers, moves, budget)
    names = [choice[2] for choice in layers[0]]
    same = [[[choice for choice in layer if choice[2] == name] for layer in layers] for name in names]
    return {
        "greedy": [_first(within(lambda ways: sorted(ways)[:1]))],
        "fastest": [_first(within(_fastest_of_each))],
        "everywhere": [_first(way for only in same for way in walk(only, moves, budget))],
    }


def mistaken(layers: list[Layer], moves: Moves, budget: float) -> dict[str, list[Found]]:
    """By mistake, what comes of it; brute force, for few layers."""
    still = [[0] * len(moves) for _ in moves]
    fastest = [[min(layer)] for layer in layers]

    emptiest = _first(by_memory(walk(layers, moves, budget))[:1])
    share = [[choice for choice in layer if choice[1] <= budget / len(layers)] for layer in layers]
    return {
        "none": [[]],
        "no moves": [brute_force(layers, still, budget)],
        "no budget": [brute_force(layers, moves, ALL)],
        **short_sighted(layers, moves, budget),
        "one front": [_first(walk(layers, moves, budget, unbeaten))],
        "layer for layer": [brute_force(fastest, moves, ALL)],
        "turned moves": [brute_force(layers, [list(row) for row in zip(*moves)], budget)],
        "start": [_first(walk(layers, moves, budget, start=0))],
        "share": [brute_force(share, moves, ALL)],
        "emptiest": [emptiest],
        "over": [] if emptiest else [_first(by_memory(walk(layers, moves, ALL))[:1])],
    }


def _first(ways: Iterable[Way]) -> Found:
    return [way[:3] for way in sorted(ways)[:1]]


def _fastest_of_each(ways: list[Way]) -> list[Way]:
    return list({way[3]: way for way in sorted(ways, reverse=True)}.values())


def by_memory(ways: Iterable[Way]) -> list[Way]:
    """The emptiest first, and of equally full ones the fastest."""
    return sorted(ways, key=lambda way: (way[1], way[0]))


def unbeaten(ways: list[Way]) -> list[Way]:
    """Their front by definition: each against each, and of equal ones the first."""
    kept = {}
    for way in by_memory(ways):
        if not any(b[0] <= way[0] and b[1] <= way[1] and b[:2] != way[:2] for b in ways):
            kept.setdefault(way[:2], way)
    return list(kept.values())


def told_apart(ways: list[Way]) -> bool:
    """Whether no two that are unbeaten are equal but for their choices."""
    points = [way[:2] for way in ways]
    return all(points.count(way[:2]) == 1 for way in unbeaten(ways))


def extended(way: Way, choice: Way) -> Way:
    """A way with one choice more, (time, memory, name)."""
    return way[0] + choice[0], way[1] + choice[1], (*way[2], choice[2])
