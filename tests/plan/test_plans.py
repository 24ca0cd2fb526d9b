"""Plans: what they cost, how they are ranked, why not otherwise, on disk."""

from dataclasses import replace
from pathlib import Path

import pytest

from tpcourse.plan import LayerPlan, Plan, cost, plan
from tpcourse.plan.cost import prices
from tpcourse.plan.options import Degrees, all_degrees
from tpcourse.plan.search import fastest_plan
from tpcourse.plan.stages import Stages
from tpcourse.predict import Calibration, OneD, ThreeD, Transformer, TwoD, cluster, training_time

CALIBRATION = Path(__file__).parents[2] / "notebooks" / "calibrations" / "4_ranks.json"
SEVEN = Transformer(32000, 2048, 4096, 32, 32, hidden=11008, activation="swiglu", norm="rms", positions="rotary",
                    tied=False, bias=False)
SMALL = Transformer(60, 16, 48, num_layers=4, num_heads=3)
DGX = cluster.DGX_A100
SLOW = cluster.Cluster(cluster.GPU(2e12, 4e5, 4e10), cluster.Link(2e9, 2e-6), cluster.Link(1e8, 9e-6), node=2,
                       cards=1, nodes=2)


def uniform(model, scheme, batch, micro_batch=1, replicas=1, stages=1, recompute="none"):
    layers = model.num_layers * (LayerPlan(scheme, scheme, recompute),)
    return Plan(model, batch, micro_batch, replicas, stages, scheme, layers, scheme)


@pytest.mark.parametrize("replicas, recompute", [(1, "none"), (4, "full"), (2, "selective")])
@pytest.mark.parametrize("scheme", [OneD(8, True), TwoD(2), ThreeD(2, 2, 2)], ids=str)
def test_one_stage_takes_what_training_time_says(scheme, replicas, recompute):
    machine = replace(DGX, nodes=8)
    own = cost(uniform(SEVEN, scheme, 64, 4, replicas, recompute=recompute), machine)
    other = training_time(SEVEN, scheme, machine, 64, micro_batch=4, replicas=replicas, recompute=recompute)
    assert own.total == pytest.approx(other.total, rel=1e-9)


def test_the_ranks_are_the_best_of_all_degrees():
    """Not only the first: each is the fastest of its replicas, stages and ranks, and none is left out."""
    memory = 1e6
    plans = plan(SMALL, SLOW, memory, global_batch=8, e=4, within=0)
    known = {}
    for degrees in all_degrees(SMALL, SLOW.gpus, 8):
        stages = Stages(prices(SMALL, SLOW, 4), degrees, 8)
        if stages.schemes and (found := fastest_plan(stages, memory)):
            key = degrees.replicas, degrees.stages, degrees.ranks
            known[key] = min(found[0], known.get(key, found[0]))
    assert [cost.total for cost in plans.costs] == pytest.approx(sorted(known.values())[:5], rel=1e-12)
    assert len(plans.plans) > 3 and plans.best == plans.plans[0]
    assert all(cost.memory <= memory for cost in plans.costs)


def test_on_a_calibrated_machine_the_search_finds_what_the_plan_costs():
    """So parts, and what each adds to the update, are priced one by one there too."""
    machine = Calibration.load(CALIBRATION)
    for degrees in (Degrees(2, 1, 2, 4), Degrees(1, 1, 4, 8), Degrees(1, 4, 1, 2)):
        model = Transformer(256, 64, 96, num_layers=4, num_heads=4)
        seconds, found = fastest_plan(Stages(prices(model, machine, 4), degrees, 16), 6e6)
        assert cost(found, machine, e=4).total == pytest.approx(seconds, rel=1e-9)


def test_a_smaller_budget_costs_time():
    seconds = [plan(SEVEN, DGX, memory, global_batch=64, count=1).cost.total for memory in (80e9, 40e9, 20e9)]
    assert seconds[0] < seconds[1] < seconds[2]


def test_no_more_stages_than_are_asked_for():
    plans = plan(SEVEN, DGX, 20e9, global_batch=64, stages=2)
    assert {one.stages for one in plans.plans} == {1, 2}
    plans = plan(SEVEN, DGX, global_batch=64, stages=1, count=1)
    reasons = {one.change: one.reason for one in plans.rejected}
    assert reasons["stages: 2"] == "not more than 1 were asked for"


@pytest.mark.parametrize("change, says", [
    ({"memory": 0}, "memory=0 must be a number above 0"), ({"memory": "40GB"}, "memory='40GB' must be"),
    ({"global_batch": -4}, "global_batch=-4 must be"), ({"stages": 0}, "stages=0 must be"),
    ({"count": 0}, "count=0 must be"), ({"within": 1.0}, "within=1.0 must be at least 0"),
    ({"e": 3}, "e=3 one of 2, 4 and 8"), ({"memory": float("nan")}, "memory=nan must be")])
def test_numbers_that_make_no_sense_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        plan(SMALL, SLOW, **{"global_batch": 8} | change)


def test_every_neighbour_has_its_reason():
    plans = plan(SEVEN, DGX, 40e9, global_batch=64)
    changes = [one.change for one in plans.rejected]
    assert {change.split(":")[0] for change in changes} == {
        "ranks", "stages", "micro-batch", "attention", "MLP", "embedding", "head", "recomputed"}
    for one in plans.rejected:
        if one.cost and one.cost.memory > 40e9:
            assert "needed, 40 GB there: " in one.reason
        elif one.cost:
            assert one.cost.total >= plans.cost.total * (1 - 1e-3) and "% slower: " in one.reason
    full = next(one for one in plans.rejected if one.change == "recomputed: full")
    assert full.reason.endswith("products")
    assert any("GB needed, 40 GB there: optimizer of MLP" in one.reason for one in plans.rejected)


def test_the_table_says_what_was_found():
    plans = plan(SEVEN, DGX, 40e9, global_batch=64, count=3)
    text = repr(plans)
    assert text.splitlines()[0].split()[:3] == ["replicas", "stages", "ranks"]
    assert str(plans.best) in text and all(one.reason in text for one in plans.rejected)
    assert len(text.split("\n\n")[0].splitlines()) == 4


@pytest.mark.parametrize("machine, batch, says", [
    (replace(DGX, node=1), 64, "on a rank .* GB needed, 80 GB there, even with 1 replicas"),
    (replace(DGX, node=7), 64, "nothing splits evenly over 7 GPUs")])
def test_what_cannot_be_planned_says_what_is_lacking(machine, batch, says):
    with pytest.raises(ValueError, match=says):
        plan(SEVEN, machine, global_batch=batch)


@pytest.mark.parametrize("change, says", [
    ({"global_batch": 6}, "global_batch=6 does not split over 2 replicas into micro-batches of 2; make it a"),
    ({"stages": 3}, "do not split into 3 stages"), ({"stages": 0}, "stages=0 must be a whole number"),
    ({"micro_batch": -2}, "micro_batch=-2 must be"),
    ({"layers": 4 * (LayerPlan(TwoD(2), TwoD(2), "half"),)}, "'half' is not one"),
    ({"head": OneD(4)}, "a tied head has the embedding's weight"),
    ({"embedding": OneD(2), "head": OneD(2)}, r"the parts are on \[2, 4\] ranks")])
def test_a_plan_that_cannot_be_is_refused(change, says):
    own = uniform(SMALL, TwoD(2), 8, 2, replicas=2)
    with pytest.raises(ValueError, match=says):
        replace(own, **change)


def test_on_disk_and_back(tmp_path):
    scheme = ThreeD(1, 2, 2, "all_reduce", False)
    layers = 2 * (LayerPlan(TwoD(2), scheme, "full"), LayerPlan(OneD(4, True), OneD(4)))
    own = Plan(SMALL, 8, 2, 2, 2, scheme, layers, scheme)
    own.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == own
    for text in ("", "{}", "[1]", '{"layers": 3}'):
        (tmp_path / "no.json").write_text(text)
        with pytest.raises(ValueError, match="is no plan"):
            Plan.load(tmp_path / "no.json")
    with pytest.raises(ValueError, match="is no plan"):
        Plan.load(tmp_path / "missing.json")
