"""A plan on real ranks: it trains as the dense program does, and sends and holds what `cost` says of it."""

import sys
from dataclasses import asdict, replace

import pytest
import torch
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.measure import Table
from tpcourse.models import GPT
from tpcourse.plan import LayerPlan, Plan, cost, plan
from tpcourse.plan.real import parts_of
from tpcourse.predict import OneD, ThreeD, Transformer, TwoD, cluster
from tpcourse.schemes import Dense
from tpcourse.train import Config, main, run, train

MACHINE = replace(cluster.DGX_A100, nodes=1)
MODEL = Transformer(256, 6, 24, num_layers=2, num_heads=4)
LLAMA = replace(MODEL, num_heads=12, num_kv_heads=4, positions="rotary", norm="rms", activation="swiglu",
                tied=False)
SP, FSDP, CUBE = OneD(2, True), ThreeD(2, 1, 1, keep_gathered=False), ThreeD(1, 2, 2)
PLANS = {
    "1 x 2": Plan(MODEL, 4, 2, 1, 1, SP, (LayerPlan(SP, OneD(2), "full"), LayerPlan(FSDP, SP)), SP),
    "2 x 1": Plan(LLAMA, 4, 1, 2, 1, OneD(1), 2 * (LayerPlan(OneD(1), OneD(1), "selective"),), OneD(1)),
    "1 x 4": Plan(LLAMA, 8, 4, 1, 1, TwoD(2), (LayerPlan(CUBE, TwoD(2), "full"), LayerPlan(OneD(4), OneD(4, True))),
                  CUBE),
    "2 x 2": Plan(MODEL, 8, 2, 2, 1, FSDP, (LayerPlan(SP, FSDP, "selective"), LayerPlan(FSDP, OneD(2))), FSDP),
}
UNEQUAL = ThreeD(1, 1, 4)  # between its layout and the cube's two ranks have half of what they need, two a quarter
PLANS["1 x 4, unequal"] = Plan(LLAMA, 4, 4, 1, 1, CUBE, 2 * (LayerPlan(UNEQUAL, CUBE, "full"),), CUBE)


@pytest.fixture(scope="module", params=PLANS)
def planned(request):
    """A plan, and ranks for it."""
    own = PLANS[request.param]
    with tp.World(mesh={"dp": own.replicas, "tp": own.ranks}) as world:
        yield own, world


def one_step(mesh, plan, ids, target):
    """Loss, gradients and where they lie, the books, and bytes: parameters, gradients, optimizer, activations."""
    from tpcourse.layers import model_layouts
    from tpcourse.models.step import gradients

    model = plan.model.build(parts_of(plan, mesh)).double()
    with tp.ledger(mesh) as book, tp.saved_activations() as mem:
        loss = gradients(model, ids, target, plan.micro_batch, mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    moments = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    grads = {name: p.grad for name, p in model.named_parameters()}
    held = [sum(t.nbytes for t in ts) for ts in (model.parameters(), grads.values(), moments)]
    return loss.item(), grads, model_layouts(model, mesh["tp"]), Table(book.rows), [*held, mem.bytes]


@pytest.fixture(scope="module")
def measured(planned):
    """The plan, a batch for it, and what each rank measured."""
    own, world = planned
    ids, target = torch.randint(256, (2, own.global_batch, own.model.context), generator=torch.Generator())
    return own, (ids, target), world.run(one_step, own, ids, target)


def test_gradients_are_those_of_the_whole_batch(measured):
    own, batch, outs = measured
    dense = own.model.build(Dense()).double()
    loss = dense.loss(*batch)
    loss.backward()
    means = torch.tensor([loss for loss, *_ in outs]).view(own.replicas, own.ranks)
    assert_close(means.mean(0), loss.item() * torch.ones(own.ranks), rtol=1e-12, atol=0)
    for _, grads, layouts, *_ in outs:
        for name, p in dense.named_parameters():
            assert_close(grads[name], layouts[name].take(p.grad), rtol=1e-9, atol=1e-13, check_stride=False,
                         msg=name)


def same_names(table, own):
    """All ranks of a replica may be called a dimension's name or world; here they are all, and others replicas."""
    def called(row):
        return "replicas" if row.dim in ("dp", "replicas") else "all" if row.group_size == own.ranks else row.dim
    return Table(replace(row, dim=called(row)) for row in table.rows)


def predicted(own, e):
    """What the ledger is to show on a rank that sends most."""
    sent = cost(own, MACHINE, e=e).stages[0].sent
    assert len(sent["gradients"]) == (own.replicas > 1)
    return same_names(Table(row for table in sent.values() for row in table.rows), own)


def test_messages_are_those_of_its_cost(measured):
    """Row by row on every rank; of moves, where ranks send unequally, those of the rank that sends most."""
    own, _, outs = measured
    expected, books = predicted(own, 8), [same_names(book, own) for *_, book, _ in outs]
    busiest = max(books, key=Table.total)
    assert busiest == expected, busiest - expected
    for book in books:
        differ = [row for row in (expected - book).rows if row.op != "all_to_all" or row.wire_bytes < 0]
        assert not differ, differ
    unequal = any(UNEQUAL in (layer.attention, layer.mlp) for layer in own.layers)
    assert len({book.total() for book in books}) == 1 + unequal


def test_memory_is_that_of_its_cost(measured):
    """Parameters, gradients, Adam's moments; and of each micro-batch as many bytes as are held at once."""
    own, _, outs = measured
    parts = cost(own, MACHINE, e=8).stages[0].held.values()
    kinds = ("parameters", "gradients", "optimizer", "activations")
    expected = {kind: sum(getattr(part, kind) for part in parts) for kind in kinds}
    for *_, held in outs:
        assert dict(zip(kinds, held)) == expected | {"activations": own.micro_batches * expected["activations"]}


def test_a_plan_for_more_ranks_than_here_runs_dry():
    """Layers of GPT-3 on 64 ranks, of which rank 1 is one that sends most: the same messages and bytes."""
    cube, grid = ThreeD(4, 4, 4), TwoD(8)
    layers = LayerPlan(cube, grid, "full"), LayerPlan(grid, cube, "selective")
    own = Plan(Transformer(51200, 2048, 12288, 2, 96, dropout=0.1), 64, 32, 1, 1, cube, layers, cube)

    def step(mesh):
        from tpcourse.models.step import gradients

        model = own.model.build(parts_of(own, mesh)).bfloat16()
        ids = torch.zeros(own.global_batch, own.model.context, dtype=torch.long)
        gradients(model, ids, ids, own.micro_batch, mesh["dp"])
        return sum(p.nbytes for p in model.parameters())

    dry, parts = tp.dry_run(step, mesh={"dp": 1, "tp": 64}, rank=1), cost(own, MACHINE).stages[0].held.values()
    assert same_names(dry.book, own) == predicted(own, 2)
    assert dry.value == sum(part.parameters for part in parts)
    assert dry.activations.bytes == own.micro_batches * sum(part.activations for part in parts)


STEPS = {"steps": 2, "sample": 3}


def options(model, batch):
    """The program's, for a model of a plan without the plan."""
    return {"dim": model.dim, "layers": model.num_layers, "heads": model.num_heads, "batch": batch,
            "kv_heads": model.num_kv_heads or 0, "untied": not model.tied, "positions": model.positions,
            "activation": model.activation, "norm": model.norm, "context": model.context}


def test_trains_as_the_dense_program(planned, tmp_path):
    """From a file; the losses of all replicas are those of the whole batch on one rank."""
    own, world = planned
    own.save(tmp_path / "plan.json")
    config = Config(plan=str(tmp_path / "plan.json"), **STEPS)
    assert config.plan == own and config.mesh == {"dp": own.replicas, "tp": own.ranks}
    dense = run(Config(**options(own.model, own.global_batch), **STEPS))
    for result in world.run(train, config):
        assert_close(result.losses, dense.losses, rtol=2e-6, atol=0)
        assert result.sample == dense.sample


def test_goes_on_bit_for_bit(tmp_path):
    """With dropout, from the one checkpoint that the first replica writes; another plan takes the weights."""
    own = replace(PLANS["2 x 2"], model=replace(MODEL, dropout=0.2))
    free = {"plan": own, "sample": 0, "every": 1}
    with tp.World(mesh={"dp": 2, "tp": 2}) as world:
        whole = world.run(train, Config(steps=4, **free))
        world.run(train, Config(steps=2, save=str(tmp_path), **free))
        assert world.run(train, Config(steps=4, save=str(tmp_path), **free)) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_00000004"]
    assert len({tuple(result.losses) for result in whole}) == 1
    other = replace(PLANS["1 x 2"], model=own.model, global_batch=8)
    result = run(Config(plan=other, steps=5, sample=0, save=str(tmp_path)))
    assert result.losses[:4] == whole[0].losses and len(result.losses) == 5


def test_replicas_drop_differently():
    """Each replica, and each kind of scheme in it, has streams of its own; one kind has the program's."""
    def seeds(mesh, plan):
        return [scheme.random.seed for scheme in parts_of(plan, mesh, seed=3).schemes]

    kinds = len(set(PLANS["2 x 2"].schemes))
    outs = tp.spawn(seeds, PLANS["2 x 2"], mesh={"dp": 2, "tp": 2})
    assert outs[0] == outs[1] and outs[2] == outs[3]
    assert len({*outs[0], *outs[2]}) == 2 * kinds == 6
    assert tp.spawn(seeds, PLANS["2 x 1"], mesh={"dp": 2, "tp": 1}) == [[6], [7]]


def test_what_tp_plan_finds_runs(monkeypatch, tmp_path, capsys):
    """Searched, saved, and trained by the program's command line."""
    slow = cluster.Cluster(cluster.GPU(2e12, 4e5, 4e10), cluster.Link(2e9, 2e-6), cluster.Link(1e8, 9e-6), node=2,
                           cards=1, nodes=1)
    found = plan(MODEL, slow, global_batch=4, e=4)
    own = next(own for own in found.plans if own.stages == 1)
    own.save(tmp_path / "plan.json")
    monkeypatch.setattr(sys, "argv", ["train", "--plan", str(tmp_path / "plan.json"), "--steps", "2", "--sample",
                                      "3", "--save", str(tmp_path / "run")])
    main()
    assert "step      2 of 2" in capsys.readouterr().out
    dense = run(Config(**options(MODEL, 4), **STEPS))
    losses = [float(line) for line in (tmp_path / "run/losses.txt").read_text().split()]
    assert_close(losses, dense.losses, rtol=2e-6, atol=0)


@pytest.mark.parametrize("wrong, says", [
    ({"plan": replace(PLANS["1 x 2"], model=replace(MODEL, num_heads=3))}, "num_heads=3 does not split"),
    ({"plan": replace(PLANS["1 x 2"], stages=2)}, "the plan has 2 stages, and this program has no pipeline"),
    ({"plan": replace(PLANS["1 x 2"], model=replace(MODEL, vocab_size=96))}, "vocab_size=96, and there are 256"),
    ({"plan": PLANS["1 x 2"], "dim": 48}, "dim=48, and the plan has 24; leave it out"),
    ({"plan": PLANS["1 x 2"], "sequence_parallel": True}, "sequence_parallel=True, and the plan has False"),
    ({"plan": "nowhere.json"}, "nowhere.json is no plan")],
    ids=["heads", "stages", "vocabulary", "another size", "another layout", "no file"])
def test_plans_that_cannot_be_run_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        Config(**wrong)


def test_ranks_and_batches_that_do_not_fit_are_refused(two):
    def on_rank(mesh, plan):
        from tpcourse.models.step import gradients

        says, ids = [], torch.zeros(3, 6, dtype=torch.long)
        model = GPT(Dense(), **asdict(MODEL))
        for mistake in (lambda: parts_of(plan, mesh), lambda: gradients(model, ids, ids, 2)):
            with pytest.raises(ValueError) as refused:
                mistake()
            says.append(str(refused.value))
        return says

    for mesh, batch in two.run(on_rank, PLANS["1 x 2"]):
        assert "the mesh is (2,), not the plan's 1 replicas of 2 ranks" in mesh
        assert "a batch of 3 does not split over 1 replicas into micro-batches of 2" in batch
