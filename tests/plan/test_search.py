"""The search against brute force: every plan there is, priced one by one."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tpcourse.models.block import RECOMPUTE
from tpcourse.plan import LayerPlan, Plan, cost
from tpcourse.plan.cost import Prices
from tpcourse.plan.options import Degrees, schemes_for
from tpcourse.plan.search import emptiest_plan, fastest_plan, least_seconds
from tpcourse.plan.stages import Stages
from tpcourse.predict import Transformer, cluster

# Slow links and little memory, so that on a small model every choice matters.
MACHINE = replace(cluster.Cluster(cluster.GPU(2e12, 4e6, 4e10), cluster.Link(2e9, 2e-6), cluster.Link(1e8, 9e-6)),
                  node=2, cards=1, nodes=4)
TIED = Transformer(60, 16, 48, num_layers=2, num_heads=3)
UNTIED = replace(TIED, num_layers=1, num_heads=4, tied=False, dropout=0.1, norm="rms")
CASES = [(TIED, Degrees(1, 1, 3, 1)), (TIED, Degrees(2, 1, 4, 2)), (TIED, Degrees(1, 2, 3, 1)),
         (replace(TIED, num_layers=3), Degrees(2, 3, 2, 1)), (UNTIED, Degrees(1, 1, 4, 1)),
         (replace(UNTIED, num_layers=2, num_heads=3), Degrees(1, 2, 4, 1)),
         (replace(TIED, num_layers=1, num_heads=4, norm="rms"), Degrees(1, 1, 4, 2))]
BATCH = 8


def every_plan(model, degrees):
    schemes = schemes_for(model, degrees.ranks, degrees.micro_batch)
    layers = [LayerPlan(*layer) for layer in product(schemes, schemes, RECOMPUTE)]
    ends = [(scheme, scheme) for scheme in schemes] if model.tied else product(schemes, schemes)
    for (embedding, head), *chosen in product(ends, *model.num_layers * [layers]):
        yield Plan(model, BATCH, degrees.micro_batch, degrees.replicas, degrees.stages, embedding, tuple(chosen),
                   head)


@pytest.fixture(params=range(len(CASES)), scope="module")
def case(request):
    """A model, degrees, and seconds and bytes of every plan."""
    model, degrees = CASES[request.param]
    costs = [cost(plan, MACHINE, e=4) for plan in every_plan(model, degrees)]
    return model, degrees, *np.array([(c.total, c.memory) for c in costs]).T


def budgets(nbytes):
    """From too little for any plan to more than enough for all."""
    return [nbytes.min() - 1, *np.quantile(nbytes, [0, 0.001, 0.01, 0.1, 0.3, 0.6, 1]), np.inf]


def test_brute_force_finds_nothing_faster(case):
    model, degrees, seconds, nbytes = case
    stages = Stages(Prices(model, MACHINE, 4), degrees, BATCH)
    assert fastest_plan(stages, nbytes.min() - 1) is None
    answers = set()
    for budget in budgets(nbytes)[1:]:
        found, plan = fastest_plan(stages, budget)
        assert found == pytest.approx(seconds[nbytes <= budget].min(), rel=1e-12)
        assert cost(plan, MACHINE, e=4).total == pytest.approx(found, rel=1e-12)
        assert cost(plan, MACHINE, e=4).memory <= budget
        answers.add(found)
    assert len(answers) > 2  # the budget matters


def test_a_tolerance_and_a_limit_are_kept(case):
    model, degrees, seconds, nbytes = case
    stages = Stages(Prices(model, MACHINE, 4), degrees, BATCH)
    for budget in budgets(nbytes)[1:]:
        fastest = seconds[nbytes <= budget].min()
        assert fastest_plan(stages, budget, within=0.01)[0] <= fastest * 1.0101
        assert fastest_plan(stages, budget, limit=fastest * (1 - 1e-9)) is None
        assert fastest_plan(stages, budget, limit=fastest * 1.0001)[0] == pytest.approx(fastest, rel=1e-12)


def test_no_plan_goes_below_the_least(case):
    model, degrees, seconds, nbytes = case
    stages = Stages(Prices(model, MACHINE, 4), degrees, BATCH)
    assert 0.3 * seconds.min() < stages.least <= seconds.min() * (1 + 1e-12)
    for budget in budgets(nbytes)[1:]:
        least = least_seconds(stages, budget)
        assert stages.least * (1 - 1e-12) <= least <= seconds[nbytes <= budget].min() * (1 + 1e-12)
    assert least_seconds(stages, nbytes.min() / 2) == np.inf


def test_the_emptiest_tied_plan_weighs_embedding_and_head_together():
    """Sizes at which the emptiest head's scheme is not the emptiest embedding's."""
    model, degrees = Transformer(48, 16, 32, num_layers=1, num_heads=4), Degrees(1, 1, 2, 1)
    plan = emptiest_plan(Stages(Prices(model, MACHINE, 2), degrees, 8))
    assert cost(plan, MACHINE).memory == min(cost(one, MACHINE).memory for one in every_plan(model, degrees))


def test_the_emptiest(case):
    model, degrees, _, nbytes = case
    plan = emptiest_plan(Stages(Prices(model, MACHINE, 4), degrees, BATCH))
    assert cost(plan, MACHINE, e=4).memory == nbytes.min()
