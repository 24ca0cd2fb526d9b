"""A GPT whose parts are cut in different ways, against the dense model, and against its parts' formulas."""

import functools
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from training import steps

import tpcourse as tp
from tpcourse import predict
from tpcourse.measure import Table
from tpcourse.models import GPT, generate
from tpcourse.predict.messages import again
from tpcourse.predict.moves import moved
from tpcourse.schemes import Dense

FORMULAS = {
    2: {"1D": predict.OneD(2), "1D+SP": predict.OneD(2, True), "1x1x2": predict.ThreeD(1, 1, 2),
        "2x1x1": predict.ThreeD(2, 1, 1, keep_gathered=False),
        "all-reduce": predict.ThreeD(1, 2, 1, "all_reduce")},
    4: {"1D": predict.OneD(4), "1D+SP": predict.OneD(4, True), "2D": predict.TwoD(2),
        "1x2x2": predict.ThreeD(1, 2, 2, keep_gathered=False), "2x2x1": predict.ThreeD(2, 2, 1),
        "4x1x1": predict.ThreeD(4, 1, 1), "all-reduce": predict.ThreeD(1, 2, 2, "all_reduce")},
}
NAMES = {ranks: list(names) for ranks, names in FORMULAS.items()}
MODELS = [  # of one layer; bias, hidden, tied and the rest take turns
    predict.Transformer(12, 5, 24, num_layers=1, num_heads=12, hidden=36),
    predict.Transformer(12, 5, 24, num_layers=1, num_heads=12, hidden=36, positions="rotary", norm="rms",
                        activation="swiglu", num_kv_heads=4, bias=False, tied=False),
    predict.Transformer(12, 5, 24, num_layers=1, num_heads=12, num_kv_heads=4, tied=False),
]
TWO_LAYERS = replace(MODELS[2], num_layers=2, positions="rotary")
RECOMPUTE = ("none", "selective", "full")
BATCH, SEQUENCE = 4, 3


@pytest.fixture(scope="module")
def worlds():
    with tp.World(ranks=2) as two, tp.World(ranks=4) as four:
        yield {2: two, 4: four}


def text():
    """Three batches of odd sequences; some targets do not count."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(12, (3, BATCH, SEQUENCE + 1), generator=draw)
    targets = ids[..., 1:].masked_fill(torch.rand(3, BATCH, SEQUENCE, generator=draw) < 0.3, -100)
    targets[:, 0, 0] = 7
    return list(ids[..., :-1]), list(targets)


def pairs(ranks):
    """Each scheme for attention with each for the MLP; of embedding and head, where tied, one more, else two."""
    names, places = NAMES[ranks], range(len(NAMES[ranks]))
    for a, b in ((a, b) for a in places for b in places):
        model, recompute = MODELS[(a + 2 * b) % 3], RECOMPUTE[(a + b) % 3]
        ends = [names[(a + b + further) % len(names)] for further in (0, 0 if model.tied else 2)]
        yield ends[0], names[a], names[b], ends[1], recompute, model


def make(mesh, formulas, seed=0):
    """The real schemes by name, each with a seed of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    from tpcourse.plan.real import scheme_of

    def own(scheme):
        return init_device_mesh("cpu", tuple(scheme.mesh.values()), mesh_dim_names=tuple(scheme.mesh))

    return {name: scheme_of(scheme, own(scheme), seed + number)
            for number, (name, scheme) in enumerate(formulas.items())}


def one_step(mesh, formulas, cases, ids, target):
    """Of each case: the loss, the gradients and where they lie, the books, and the bytes that were kept."""
    from tpcourse.layers import model_layouts
    from tpcourse.schemes import Layer, Parts

    made, outs = make(mesh, formulas), []
    for embedding, attention, mlp, head, recompute, model in cases:
        parts = Parts(made[embedding], (Layer(made[attention], made[mlp], recompute),), made[head])
        gpt = model.build(parts).double()
        with tp.ledger() as book, tp.saved_activations() as mem:
            loss = gpt.loss(ids, target)
            loss.backward()
        grads = {name: p.grad for name, p in gpt.named_parameters()}
        outs.append((loss.item(), grads, model_layouts(gpt, parts.group), Table(book.rows), mem.bytes))
    return outs


@pytest.fixture(scope="module")
def measured(worlds):
    """Of four ranks and all pairs on them: `one_step`'s results by case, each with those of all ranks."""
    (ids, *_), (target, *_) = text()
    cases = list(pairs(4))
    return list(zip(cases, zip(*worlds[4].run(one_step, FORMULAS[4], cases, ids, target))))


@functools.cache
def dense_step(model):
    (ids, *_), (target, *_) = text()
    gpt = model.build(Dense()).double()
    loss = gpt.loss(ids, target)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in gpt.named_parameters()}


def test_loss_and_gradients_are_the_dense_models(measured):
    """Of every parameter, whose entries together have one owner each."""
    assert len(measured) == 7 * 7
    for (*case, model), of_ranks in measured:
        expected, grads = dense_step(model)
        owners = {name: torch.zeros_like(grad) for name, grad in grads.items()}
        for loss, own, layouts, *_ in of_ranks:
            assert loss == pytest.approx(expected, rel=1e-12, abs=0), case
            assert list(layouts) == list(own) == list(grads)
            for name, layout in layouts.items():
                assert_close(own[name], layout.take(grads[name]), rtol=1e-9, atol=1e-13, check_stride=False,
                             msg=f"{case} {name}")
                for piece in layout.pieces:
                    owners[name][piece.there] += piece.owned
        assert all((count == 1).all() for count in owners.values()), case


def predicted(case, rank):
    """What a rank sends: its parts, each of its scheme, and its share of the moves between them."""
    *names, recompute, model = case
    embedding, attention, mlp, head = (FORMULAS[4][name] for name in names)
    rows = []
    for part, scheme in zip(("embedding", "attention", "mlp", "head"), (embedding, attention, mlp, head)):
        rows += predict.volume(model, scheme, BATCH, SEQUENCE, e=8, recompute=recompute)[part].rows
    inside = recompute == "full"
    for source, target, repeated in (embedding, attention, False), (attention, mlp, inside), (mlp, head, False):
        move = moved(source.outer, target.outer, BATCH * SEQUENCE, model.dim, 8, rank)
        rows += move + (again(move) if repeated else [])
    return one_name(rows)


def one_name(rows):
    """All ranks may be called a dimension's name or world; here they are the world."""
    return Table(replace(row, dim="world") if row.group_size == 4 else row for row in rows)


def test_messages_are_those_of_the_parts_and_the_moves(measured):
    """Row by row on every rank; the move from attention to MLP once more where the layer is recomputed."""
    for case, of_ranks in measured:
        for rank, (*_, book, _) in enumerate(of_ranks):
            table = predicted(case, rank)
            assert one_name(book.rows) == table, f"{case[:-1]} on rank {rank}\n{one_name(book.rows) - table}"
    moves = [row for (*_, recompute, _), outs in measured for row in outs[0][3].rows if row.op == "all_to_all"]
    assert {row.phase for row in moves} == {"forward", "backward", "recomputation"}


def test_kept_are_the_activations_of_the_parts(measured):
    """A move keeps nothing."""
    for (*names, recompute, model), of_ranks in measured:
        held = [predict.memory(model, FORMULAS[4][name], BATCH, SEQUENCE, e=8, recompute=recompute)[part]
                for part, name in zip(("embedding", "attention", "mlp", "head"), names)]
        for _, grads, _, _, kept in of_ranks:
            assert kept == sum(part.activations for part in held), (names, recompute)
            assert sum(grad.nbytes for grad in grads.values()) == sum(part.gradients for part in held), names


def two_layers(mesh, formulas, names, recompute, model, ids, targets, seed=0):
    """Parts, where each layer is of the two next names; what three steps of training give."""
    from tpcourse.layers import model_layouts

    gpt = mixed(mesh, formulas, names, recompute, model, seed)
    return *steps(gpt, ids, targets), model_layouts(gpt, gpt.scheme.group)


def mixed(mesh, formulas, names, recompute, model, seed=0):
    from tpcourse.schemes import Layer, Parts

    made = make(mesh, formulas, seed)
    embedding, *layers, head = (made[name] for name in names)
    return model.build(Parts(embedding, tuple(map(Layer, layers[::2], layers[1::2], recompute)), head)).double()


MIXED = [("1D", "1D+SP", "2x1x1", "1x1x2", "all-reduce", "1D+SP"),
         ("2x1x1", "all-reduce", "1D", "2x1x1", "1x1x2", "1D")]


@pytest.mark.parametrize("names, recompute", [(MIXED[0], ("full", "none")), (MIXED[1], ("selective", "full"))],
                         ids=["ends apart", "ends alike"])
def test_trains_as_the_dense_model_does(worlds, names, recompute):
    """On two ranks, layers that differ: losses, first gradients and last weights of three steps."""
    losses, first, last = steps(TWO_LAYERS.build(Dense()).double(), *text())
    for own_losses, own_first, own_last, layouts in worlds[2].run(two_layers, FORMULAS[2], names, recompute,
                                                                  TWO_LAYERS, *text()):
        assert_close(own_losses, losses, rtol=1e-12, atol=0)
        for whole, own in ((first, own_first), (last, own_last)):
            for name, layout in layouts.items():
                assert_close(own[name], layout.take(whole[name]), rtol=1e-9, atol=1e-13, check_stride=False,
                             msg=name)


def test_dropout_is_the_same_in_recomputation_and_of_other_seeds_another(worlds):
    """Each part draws from streams of its own, which stand where they stood when a layer is recomputed."""
    model, (ids, targets) = replace(TWO_LAYERS, dropout=0.3), text()
    outs = [worlds[2].run(two_layers, FORMULAS[2], MIXED[0], (recompute, "none"), model, ids, targets, seed)
            for recompute, seed in (("none", 0), ("full", 0), ("none", 10))]
    for kept, again, other in zip(*outs):
        assert_close(kept[:3], again[:3], rtol=1e-12, atol=1e-15)
        assert abs(kept[0][0] - other[0][0]) > 1e-3


def masks(mesh, formulas):
    """The dropout masks of attention's and the MLP's results in each layer, whole ones or this rank's part."""
    names = ["1D", "1D", "1D+SP", "all-reduce", "2x1x1", "1D"]
    gpt = mixed(mesh, formulas, names, ("none", "none"), replace(TWO_LAYERS, dropout=0.5))
    ones = torch.ones(8, 24, dtype=torch.float64)
    return [dropout(ones) for block in gpt.blocks for dropout in (block.dropout, block.mlp_dropout)]


def test_parts_draw_different_masks(worlds):
    """Copies on both ranks the same one, shards another on each; no two parts the same."""
    first, second = worlds[2].run(masks, FORMULAS[2])
    equal = [torch.equal(a, b) for a, b in zip(first, second)]
    assert equal == [True, False, True, False]  # 1D, 1D+SP, all-reduce over j, 2x1x1
    assert not any(torch.equal(a, b) for n, a in enumerate(first) for b in first[:n] + second[:n])


def on_the_way(mesh, formulas, model, ids, target, folder):
    """The gradient's norm and clipped gradients, text, and a checkpoint that other parts and the dense load."""
    from tpcourse.layers import checkpoint, model_layouts
    from tpcourse.layers.clip import clip_grad_norm_

    gpts = [mixed(mesh, formulas, names, ("none", "full"), model, seed) for seed, names in zip((0, 10), MIXED)]
    optimizers = [torch.optim.AdamW(gpt.parameters()) for gpt in gpts]
    gpt, other, group = *gpts, gpts[0].scheme.group
    gpt.loss(ids, target).backward()
    norm = clip_grad_norm_(gpt, 0.1, group)
    optimizers[0].step()
    checkpoint.save(folder, gpt, optimizers[0], group, "extra")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    extra = checkpoint.load(folder, other, optimizers[1], other.scheme.group)
    losses = [gpt.loss(ids, target).item() for gpt in gpts]
    grads = {name: p.grad for name, p in gpt.named_parameters()}
    return norm, grads, model_layouts(gpt, group), generate(gpt, ids[0], 6, seed=1), losses, extra


def test_clipping_checkpoints_and_text(worlds, tmp_path):
    """Of a model of parts: the dense model's norm, its text, and a checkpoint that goes to other parts."""
    from tpcourse.layers import checkpoint
    from tpcourse.layers.clip import clip_grad_norm_

    (ids, *_), (target, *_) = text()
    outs = worlds[2].run(on_the_way, FORMULAS[2], TWO_LAYERS, ids, target, str(tmp_path / "saved"))
    dense = TWO_LAYERS.build(Dense()).double()
    optimizer = torch.optim.AdamW(dense.parameters())
    dense.loss(ids, target).backward()
    expected = clip_grad_norm_(dense, 0.1, None)
    optimizer.step()
    assert expected > 0.1
    for norm, grads, layouts, words, losses, extra in outs:
        assert_close(norm, expected, rtol=1e-12, atol=0)
        for name, p in dense.named_parameters():
            assert_close(grads[name], layouts[name].take(p.grad), rtol=1e-9, atol=1e-13, check_stride=False)
        assert words.tolist() == generate(dense, ids[0], 6, seed=1).tolist() and extra == "extra"
        assert_close(losses, 2 * [dense.loss(ids, target).item()], rtol=1e-12, atol=0)
    loaded = TWO_LAYERS.build(Dense()).double()
    checkpoint.load(tmp_path / "saved", loaded, torch.optim.AdamW(loaded.parameters()), None)
    for own, other in zip(loaded.parameters(), dense.parameters()):
        assert_close(own, other, rtol=1e-9, atol=1e-12)


def refusals(mesh, formulas, sizes):
    from tpcourse.schemes import Layer, OneD, Parts

    made = make(mesh, formulas)
    one, other = made["1D"], made["1D+SP"]
    alike = OneD(mesh["tp"], True)  # of seed 0, as `one` is
    whole = Parts(one, (Layer(one, other),), other)
    mistakes = [lambda: GPT(whole, **sizes, num_layers=1),
                lambda: GPT(whole, **sizes, num_layers=2, tied=False),
                lambda: GPT(whole, **sizes, num_layers=1, tied=False, recompute="full"),
                lambda: GPT(Parts(one, (Layer(one, alike),), one), **sizes, num_layers=1, dropout=0.1),
                lambda: GPT(Parts(one, (Layer(one, one, "some"),), one), **sizes, num_layers=1),
                lambda: Parts(one, (Layer(one, Dense()),), one)]
    says = []
    for mistake in mistakes:
        with pytest.raises(ValueError) as refused:
            mistake()
        says.append(str(refused.value))
    GPT(Parts(one, (Layer(one, alike),), one), **sizes, num_layers=1)  # without dropout nothing is drawn
    return says


def test_what_cannot_be_one_model_is_refused(worlds):
    sizes = {"vocab_size": 12, "context": 5, "dim": 24, "num_heads": 12}
    says = ["give both parts one scheme, or pass tied=False", "parts of 1 layers for num_layers=2",
            "recompute='full'; pass a Layer for each", "dropout=0.1 would draw the same masks",
            "recompute='some' is not one of", "are on the ranks None and [0, 1]"]
    for own in worlds[2].run(refusals, FORMULAS[2], sizes):
        for got, expected in zip(own, says, strict=True):
            assert expected in got
