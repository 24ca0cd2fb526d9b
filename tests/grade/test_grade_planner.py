"""What lesson 11's answers are held against: brute force, the planner's fronts and its search agree."""

import numpy as np
import pytest
import torch

from tpcourse.grade import planner
from tpcourse.grade.ways import brute_force, by_fronts
from tpcourse.plan.chain import Chain, Mode, Search
from tpcourse.plan.front import front


@pytest.mark.parametrize("seed", range(20))
def test_brute_force_and_the_planners_fronts_find_the_same(seed):
    layers, moves, budget = planner._problem(torch.Generator().manual_seed(seed), 4, 6, 3)
    assert by_fronts(layers, moves, budget) == brute_force(layers, moves, budget) != []
    least = sum(min(choice[1] for choice in layer) for layer in layers)
    assert by_fronts(layers, moves, least - 1) == brute_force(layers, moves, least - 1) == []


@pytest.mark.parametrize("seed", range(5))
def test_the_planner_searches_the_same(seed):
    """Its chain of equal layers is so many times an attention and an MLP."""
    (attention, mlp), moves, _ = planner._problem(torch.Generator().manual_seed(seed), 2, 9, 3)

    def parts(layer):
        own = [[choice for choice in layer if choice[3] == layout] for layout in range(3)]
        return [front([choice[:2] for choice in here], [choice[2] for choice in here]) for here in own]

    free, times = 3 * [front([(0, 0)], [None])], np.array(moves, dtype=float)
    chain = Chain(free, times, [Mode(parts(attention), times, parts(mlp))], free, layers=12)
    answers = set()
    least = 12 * sum(min(choice[1] for choice in layer) for layer in (attention, mlp))
    assert Search(chain, least - 1).value == np.inf
    for budget in (least, least + 7, least + 30, least + 60, 240):
        [(seconds, nbytes, names)] = by_fronts(12 * [attention, mlp], moves, budget)
        found = Search(chain, budget).way(0)
        assert found.seconds == seconds and found.bytes <= budget and nbytes <= budget and len(names) == 24
        answers.add(seconds)
    assert len(answers) > 2  # the budget matters
