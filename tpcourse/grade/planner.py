"""The tasks of lesson 11: the unbeaten of many ways, one part more, and the fastest way through all layers."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tpcourse.grade import ways as known
from tpcourse.grade.case import Case, Mistake
from tpcourse.grade.ways import Found, Layer, Moves, Way, by_memory, extended, told_apart, unbeaten
from tpcourse.plan import front as fronts

Problem = tuple[list[Layer], Moves, int]  # layers, moves, budget

SAYS = {  # what a wrong answer usually means
    "beaten": "beaten ways are left: one that needs no more of either, and less of one, beats another",
    "unsorted": "that is the given order, each faster than all before it: sort first, the emptiest first",
    "half sorted": "of ways equally full the fastest must come first: sort by memory, then by time",
    "half beaten": "as slow and fuller, or as full and slower, is beaten too: keep those that need less of one",
    "twice": "equal ways are kept twice: keep one of them",
    "neither": "two equal ways have beaten each other: keep one of them",
    "turned round": "the fastest comes first: begin with the emptiest",
    "one": "that is one way alone: slower, emptier ones are needed when memory runs short",
    "no front": "those are all sums: keep their front",
    "zip": "each way was put together with one choice: every way goes with every choice",
    "fastest choice": "only the fastest choice was taken: an emptier one is needed when memory runs short",
    "largest": "that is the larger of two memories: all parts are held at once, so theirs add up",
    "order": "the new name stands before the old ones: names stand in the order of the parts",
    "none": (
        "None says that nothing fits, and something does: was memory spent too early? Or is your code not"
        " written yet"
    ),
    "greedy": "that takes the best next step each time: a slower step may lead to a layout that pays later",
    "layer for layer": "that is the fastest choice of each layer for itself: the moves between them count too",
    "fastest": (
        "you kept only the fastest way to each layout; a slower, emptier one is needed when the budget binds"
        " later"
    ),
    "one front": (
        "you kept one front for all layouts: a way that another one beats may be where the next layer is"
        " fast; keep a front for each layout"
    ),
    "no moves": "the moves are missing: a way in layout a reaches b after moves[a][b] more",
    "turned moves": "that is moves[b][a]: the first layout is the one that a way comes from",
    "start": "a move before the first layer: a way may begin in any layout",
    "no budget": "the budget is not kept: all layers together need {memory} that way, and there is {budget}",
    "share": "each layer was held to its share of the budget: it is their sum that must fit",
    "everywhere": "that is the same choice in every layer: mixed, they are faster",
    "emptiest": "that is the emptiest way, not the fastest that fits",
    "over": "that is the emptiest way of all, and even that is over the budget: None says that nothing fits",
}


def front(n: int, rng: torch.Generator) -> list[Case]:
    """``front(ways)``: the unbeaten ones, the emptiest first."""
    return [_ties(n, rng), _named(n, rng), _many(n, rng)]


def _ties(n: int, rng: torch.Generator) -> Case:
    """Pairs within a small square, drawn until every mistake shows."""
    while True:
        points = [tuple(pair) for pair in torch.randint(1, 16, (24, 2), generator=rng).tolist()]
        points += _shuffled(points, rng)[:8]
        right, wrong = unbeaten(points), _wrong_fronts(points)
        shown = all(right not in answers for answers in wrong.values())
        if shown and len(right) > 3 and len(wrong["unsorted"][0]) > 1:
            return _case(
                n, f"{len(points)} pairs, some of them equal", {"ways": points}, right, _mistakes(wrong)
            )


def _wrong_fronts(points: list[Way]) -> dict[str, list[list[Way]]]:
    right = unbeaten(points)
    strictly = [a for a in points if not any(b[0] < a[0] and b[1] < a[1] for b in points)]
    return {
        "one": [[min(points)], right[:1]],
        "beaten": [points, by_memory(points), by_memory(set(points))],
        "unsorted": [_faster_than_before(points)],
        "half sorted": [_faster_than_before(sorted(points, key=lambda point: point[1]))],
        "half beaten": [by_memory(strictly), by_memory(set(strictly))],
        "twice": [by_memory(point for point in points if point in right)],
        "neither": [[point for point in right if points.count(point) == 1]],
        "turned round": [right[::-1]],
    }


def _faster_than_before(points: list[Way]) -> list[Way]:
    return [point for i, point in enumerate(points) if all(point[0] < before[0] for before in points[:i])]


def _named(n: int, rng: torch.Generator) -> Case:
    """Ways with choices, which go with them."""
    ways = []
    while not told_apart(ways) or len(unbeaten(ways)) < 4:
        ways = _ways(rng, 30, parts=2)
    right = unbeaten(ways)
    wrong = {"beaten": [ways, by_memory(ways)], "turned round": [right[::-1]]}
    return _case(n, f"{len(ways)} ways with their choices", {"ways": ways}, right, _mistakes(wrong))


def _many(n: int, rng: torch.Generator, count: int = 20_000) -> Case:
    """So many, most of them unbeaten, that comparing each with each takes too long."""
    times, memory = torch.randint(-1, 20, (2, count), generator=rng).cumsum(1)
    ways = _shuffled(zip((times.max() + 1 - times).tolist(), (memory + count).tolist()), rng)
    seconds, nbytes = torch.tensor(ways, dtype=torch.float64).numpy().T
    right = [ways[i] for i in fronts.unbeaten(seconds, nbytes)]
    slow = "Each with each are 400 million comparisons here: sort first, then go through them once."
    return _case(
        n, f"{count:,} pairs", {"ways": ways}, right, [], slow=slow, praise=f"{len(right):,} are unbeaten"
    )


def grow(n: int, rng: torch.Generator) -> list[Case]:
    """``grow(ways, choices)``: the front of all sums, with their choices."""
    return [_growth(n, rng, count, parts) for count, parts in ((30, 1), (60, 4), (1, 0))]


def _growth(n: int, rng: torch.Generator, count: int, parts: int) -> Case:
    """Drawn until every mistake shows; of nothing and one part more few do."""
    while True:
        ways = unbeaten(_ways(rng, count, parts)) if parts else [(0, 0, ())]
        choices = [(time, memory, name) for time, memory, (name,) in _ways(rng, 8, 1)]
        sums = [extended(way, choice) for way in ways for choice in choices]
        right, wrong = unbeaten(sums), _wrong_growth(ways, choices, sums)
        shown = not parts or all(right not in answers for answers in wrong.values())
        if told_apart(sums) and len(right) > 2 and shown:
            break
    title = f"ways of {parts} parts: {len(ways)}, choices: {len(choices)}"
    praise = f"{len(right)} of {len(sums)} sums are unbeaten"
    return _case(n, title, {"ways": ways, "choices": choices}, right, _mistakes(wrong), praise=praise)


def _wrong_growth(ways: list[Way], choices: list[Way], sums: list[Way]) -> dict[str, list[list[Way]]]:
    def each(put: Callable[[Way, Way], Way]) -> list[Way]:
        return unbeaten([put(way, choice) for way in ways for choice in choices])

    pairs = [extended(way, choice) for way, choice in zip(ways, choices)]
    return {
        "no front": [sums, by_memory(sums)],
        "zip": [pairs, unbeaten(pairs)],
        "fastest choice": [unbeaten([extended(way, min(choices)) for way in ways])],
        "largest": [each(lambda a, b: (a[0] + b[0], max(a[1], b[1]), (*a[2], b[2])))],
        "order": [each(lambda a, b: (a[0] + b[0], a[1] + b[1], (b[2], *a[2])))],
        "turned round": [unbeaten(sums)[::-1]],
        "one": [[min(sums)]],
    }


def plan(n: int, rng: torch.Generator) -> list[Case]:
    """``plan(layers, moves, budget)``: the fastest way within the budget, or None."""
    binding = {"greedy", "fastest", "no moves", "no budget", "share", "everywhere", "emptiest", "start"}
    moving = {"greedy", "one front", "layer for layer", "no moves", "turned moves", "start"}
    return [
        _demanding(n, rng, "the budget binds", binding),
        _demanding(n, rng, "moves decide", moving),
        _demanding(n, rng, "nothing fits", {"no budget"}),
        *(_plan_case(n, _problem(rng, count, 6, 3)) for count in (3, 2, 1)),
        _large(n, rng),
    ]


def _demanding(n: int, rng: torch.Generator, title: str, demanded: set[str]) -> Case:
    """Drawn until each of the mistakes demanded shows, and finds a way that no other mistake finds."""
    while True:
        layers, moves, budget = _problem(rng, 4, 5, 3)
        least, most = _limits(layers)
        budget = {"moves decide": most, "nothing fits": least - 1}.get(title, budget)
        right, wrong = known.brute_force(layers, moves, budget), known.mistaken(layers, moves, budget)
        every = [right, *(answer for answers in wrong.values() for answer in answers)]
        if all(answer and every.count(answer) == 1 for name in demanded for answer in wrong[name]):
            return _plan_case(n, (layers, moves, budget), title)


def _plan_case(n: int, problem: Problem, title: str = "") -> Case:
    """Held against brute force; what people arrive at instead is told apart."""
    layers, moves, budget = problem
    right, wrong = known.brute_force(*problem), known.mistaken(*problem)
    texts = SAYS | {"no budget": SAYS["no budget"].format(memory=wrong["no budget"][0][0][1], budget=budget)}
    title = ", ".join(filter(None, [_sizes(layers, moves), f"budget {budget}", title]))
    said = f"time {right[0][0]}, memory {right[0][1]}" if right else "nothing fits, and None came back"
    return _way_case(n, title, problem, right, _mistakes(wrong, texts), praise=said)


def _large(n: int, rng: torch.Generator) -> Case:
    """Held against `tpcourse.plan`'s fronts: of 18 choices for each of 24 layers nobody tries all."""
    layers, moves, _ = problem = _problem(rng, 24, 18, 3, unit=10**8)
    count = f"{len(layers[0])} choices for each of {len(layers)} layers"
    slow = f"Are those all {count}? Of the ways to each layout keep the front alone, layer by layer."
    wrong = _mistakes({"none": [[]], **known.short_sighted(*problem)})
    right, said = known.by_fronts(*problem), f"the fastest of {len(layers[0]) ** len(layers):.1e} ways"
    return _way_case(n, _sizes(layers, moves), problem, right, wrong, slow=slow, praise=said)


def _sizes(layers: list[Layer], moves: Moves) -> str:
    many = "layers" if len(layers) > 1 else "layer"
    return f"{len(layers)} {many}, {len(layers[0])} choices, {len(moves)} layouts"


def _problem(rng: torch.Generator, count: int, choices: int, layouts: int, unit: int = 100) -> Problem:
    """Choices of which the faster need more, and a budget within which one way is the fastest.

    A name means the same layout in all layers. A choice takes 1 to 7 units, a move up to 3.
    """
    while True:
        layers = [_layer(rng, choices, layouts, unit) for _ in range(count)]
        moves = torch.randint(unit // 2, 3 * unit, (layouts, layouts), generator=rng).fill_diagonal_(0).tolist()
        least, most = _limits(layers)
        budget = least + int((most - least) * (0.3 + 0.4 * torch.rand((), generator=rng)))
        if unit > 100:  # of so many units two ways hardly ever take the same number
            return layers, moves, budget
        times = [way[0] for way in known.walk(layers, moves, budget)]
        if times.count(min(times)) == 1:
            return layers, moves, budget


def _limits(layers: list[Layer]) -> tuple[int, int]:
    """The memory of the emptiest way and of the fullest."""
    least, most = (sum(end(choice[1] for choice in layer) for layer in layers) for end in (min, max))
    return least, most


def _layer(rng: torch.Generator, choices: int, layouts: int, unit: int) -> Layer:
    memory = torch.randint(1, 11, (choices,), generator=rng)
    noise = torch.rand(choices, generator=rng, dtype=torch.float64)
    times = (unit * (1 + 0.4 * (10 - memory) + 2 * noise)).long()
    drawn = zip(times.tolist(), memory.tolist(), range(choices))
    return _shuffled([(*one, one[2] % layouts) for one in drawn], rng)


def _ways(rng: torch.Generator, count: int, parts: int) -> list[Way]:
    """So many ways, of which the faster tend to need more; the last name of each is its own."""
    memory = torch.randint(20, 120, (count,), generator=rng)
    times = 150 - memory + torch.randint(0, 40, (count,), generator=rng)
    names = torch.randint(0, 9, (count, parts), generator=rng)
    names[:, -1:] = torch.randperm(count, generator=rng)[:, None]
    return [(*pair, tuple(chosen)) for *pair, chosen in zip(times.tolist(), memory.tolist(), names.tolist())]


def _shuffled(items: Iterable, rng: torch.Generator) -> list:
    items = list(items)
    return [items[i] for i in torch.randperm(len(items), generator=rng)]


def _mistakes(wrong: dict[str, list[list[Way]]], texts: dict[str, str] = SAYS) -> list[Mistake]:
    return [(texts[name], [_rows(answer)]) for name, answers in wrong.items() for answer in answers]


def _rows(ways: list[Way]) -> Tensor:
    """As the driver hands them back: a row for each of time, memory and the names chosen."""
    rows = [[*way[:2], *(way[2] if len(way) > 2 else ())] for way in ways]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), -1 if rows else 0)


def _way_case(n: int, title: str, problem: Problem, right: Found, mistakes: list[Mistake], **said: str) -> Case:
    """`_case` for one way or None through layers."""
    arguments = dict(zip(("layers", "moves", "budget"), problem))
    return _case(n, title, arguments, right, mistakes, single=True, **said)


def _case(
    n: int,
    title: str,
    arguments: dict,
    right: list[Way],
    mistakes: list[Mistake],
    single: bool = False,
    **said: str,
) -> Case:
    """One call on each of n ranks, all with the same arguments."""
    settings, expected = {"arguments": arguments, "single": single}, [{"ways": _rows(right)}] * n
    mistakes = [(text, rows * n) for text, rows in mistakes if not torch.equal(rows[0], _rows(right))]
    return Case(title, n, "ways", settings, [[]] * n, expected, {"ways": mistakes}, **said)
