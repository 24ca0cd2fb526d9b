"""Known-wrong solutions of lesson 11."""

from grade_answers import Wrong, whole

KEPT, SORTED = "if not kept or way[0] < kept[-1][0]:", "sorted(ways, key=lambda way: (way[1], way[0]))"
LOOP = f"    kept = []\n    for way in {SORTED}:\n        {KEPT}\n            kept.append(way)\n    return kept"


def by_definition(beaten: str) -> tuple[tuple[str, str], ...]:
    """Each way against each."""
    return ((LOOP, f"    return [a for a in {SORTED} if not any({beaten} for b in ways)]"),)


FRONTS = [
    ("keeps all", "beaten ways are left", ((KEPT, "if True:"),)),
    ("does not sort", "sort first", ((SORTED, "ways"),)),
    (
        "sorts by memory alone",
        "the fastest must come first",
        ((SORTED, "sorted(ways, key=lambda way: way[1])"),),
    ),
    ("beaten in both alone", "is beaten too", by_definition("b[0] < a[0] and b[1] < a[1]")),
    (
        "keeps equal ways",
        "equal ways are kept twice",
        ((KEPT, "if not kept or way[0] < kept[-1][0] or way == kept[-1]:"),),
    ),
    (
        "equal ways beat each other",
        "have beaten each other",
        by_definition("b[0] <= a[0] and b[1] <= a[1] and b is not a"),
    ),
    ("the fastest first", "begin with the emptiest", (("return kept", "return kept[::-1]"),)),
    ("the fastest alone", "that is one way alone", (("return kept", "return kept[-1:]"),)),
    ("leaves the choices", "expected shape", (("kept.append(way)", "kept.append(way[:2])"),)),
    (
        "each with each",
        "Each with each are 400 million comparisons here",
        (
            *by_definition("b[0] <= a[0] and b[1] <= a[1] and b != a"),
            ("for a in sorted(ways,", "for a in sorted(set(ways),"),
        ),
    ),
    ("returns nothing", "it is not written yet, or its return is missing", (("return kept", "pass"),)),
    ("bare times", "a way is (time, memory, choices)", (("return kept", "return [way[0] for way in kept]"),)),
    ("the package's own", "comes from the package", whole("from tpcourse.plan.front import front\n")),
]

RETURN = "return front(sums)"
GROWTHS = [
    ("no front", "those are all sums", ((RETURN, "return sums"),)),
    (
        "one choice for each way",
        "every way goes with every choice",
        (
            (
                "for time, memory, names in ways\n        for more, added, name in choices",
                "for (time, memory, names), (more, added, name) in zip(ways, choices)",
            ),
        ),
    ),
    ("the fastest choice", "only the fastest choice was taken", (("in choices\n", "in [min(choices)]\n"),)),
    ("the larger memory", "all parts are held at once", (("memory + added", "max(memory, added)"),)),
    ("the new name first", "stands before the old ones", (("(*names, name)", "(name, *names)"),)),
    ("only the new name", "expected shape", (("(*names, name)", "(name,)"),)),
    ("the fastest first", "begin with the emptiest", ((RETURN, RETURN + "[::-1]"),)),
    ("the fastest sum", "that is one way alone", ((RETURN, "return [min(sums)]"),)),
    ("a name that is no tuple", "a way is (time, memory, choices)", (("(*names, name)", "name"),)),
]

MOVED, FITS, RESULT = "time + moves[a][b]", " if way[1] <= budget", "return min(fitting, default=None)"
START, OWN = "[[(0, 0, ())] for _ in layouts]", "if choice[3] == b]"
ARRIVING = "grow(front(arriving[b]), [choice[:3] for choice in layer if choice[3] == b])"
STEP_BY_STEP = """
def plan(layers, moves, budget):
    ways = [(0, 0, (), None)]
    for layer in layers:
        ways = [
            (time + more + (0 if at is None else moves[at][layout]), memory + added, (*names, name), layout)
            for time, memory, names, at in ways
            for more, added, name, layout in layer
            if memory + added <= budget
        ]
        ways = KEEP
    best = min(ways, default=None)
    return best and best[:3]
"""
EVERYWHERE = """
def plan(layers, moves, budget):
    found = []
    for name in range(len(layers[0])):
        same = [next(choice for choice in layer if choice[2] == name) for layer in layers]
        way = sum(choice[0] for choice in same), sum(choice[1] for choice in same), len(layers) * (name,)
        found += [way] if way[1] <= budget else []
    return min(found, default=None)
"""


def stepwise(keep: str) -> tuple[tuple[str, str], ...]:
    """All layouts in one list, of which something is kept behind every layer."""
    return whole(STEP_BY_STEP.replace("KEEP", keep))


PLANS = [
    ("greedy", "the best next step each time", stepwise("sorted(ways)[:1]")),
    ("one front in all", "one front for all layouts", stepwise("front(ways)")),
    ("brute force", "Of the ways to each layout keep the front alone", stepwise("ways")),
    (
        "the fastest to each layout",
        "only the fastest way to each layout",
        ((ARRIVING, ARRIVING.replace("grow(", "sorted(way for way in grow(") + " if way[1] <= budget)[:1]"),),
    ),
    ("forgets moves", "the moves are missing", ((MOVED, "time"),)),
    ("moves turned round", "that is moves[b][a]", ((MOVED, "time + moves[b][a]"),)),
    (
        "begins in layout 0",
        "a move before the first layer",
        ((START, "[[(0, 0, ())], *([] for _ in layouts[1:])]"),),
    ),
    ("looks at no budget", "the budget is not kept", ((FITS, ""),)),
    (
        "the budget for each layer",
        "the budget is not kept",
        ((FITS, ""), (OWN, "if choice[3] == b and choice[1] <= budget]")),
    ),
    (
        "a share for each layer",
        "held to its share",
        ((FITS, ""), (OWN, "if choice[3] == b and choice[1] <= budget / len(layers)]")),
    ),
    (
        "the emptiest",
        "not the fastest that fits",
        ((RESULT, "return min(fitting, key=lambda way: (way[1], way[0]), default=None)"),),
    ),
    ("one choice everywhere", "the same choice in every layer", whole(EVERYWHERE)),
    ("fails where nothing fits", "ValueError", ((", default=None", ""),)),
    (
        "the emptiest where nothing fits",
        "even that is over the budget",
        (
            (
                RESULT,
                "return min(fitting, default=None) or min(sum(fronts, []), key=lambda way: (way[1], way[0]))",
            ),
        ),
    ),
    ("never finds anything", "None says that nothing fits", ((RESULT, "return None"),)),
    (
        "only the choices",
        "a way is (time, memory, choices)",
        ((RESULT, "return min(fitting)[2] if fitting else None"),),
    ),
]

SLOW = {"each with each", "brute force"}
WRONG = [
    Wrong(task, mistake, *rest, ranks=1, seconds=3 if mistake in SLOW else 10)
    for task, answers in (("front", FRONTS), ("grow", GROWTHS), ("plan", PLANS))
    for mistake, *rest in answers
]
