"""GPT and ViT on three mesh dimensions, against the dense model: losses, gradients, weights, dropout, books."""

import pytest
import torch
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.measure import Row, Table, wire_bytes
from tpcourse.models import GPT, ViT, generate
from tpcourse.schemes import Dense

MESHES = [(1, 4, 1), (4, 1, 1), (1, 1, 4), (1, 2, 3), (2, 3, 1), (2, 2, 2)]
DESIGNS = [("reduce_scatter", True), ("reduce_scatter", False), ("all_reduce", True), ("all_reduce", False)]
GPT_SIZES = dict(vocab_size=11, context=3, dim=24, num_layers=1, num_heads=12, hidden=36)
VIT_SIZES = dict(classes=7, image=6, patch=2, channels=3, dim=24, num_layers=1, num_heads=12, hidden=36)
BATCH, SEQUENCE, STEPS = 12, 3, 2
GPTS = {
    "gpt2": {},
    "llama": {"positions": "rotary", "activation": "swiglu", "norm": "rms", "tied": False, "num_kv_heads": 1,
              "bias": False, "recompute": "full"},
}


@pytest.fixture(scope="module", params=MESHES, ids=str)
def cube(request):
    with tp.World(mesh=dict(zip("ijl", request.param))) as world:
        yield world


@pytest.fixture(scope="module")
def eight():
    with tp.World(mesh={"i": 2, "j": 2, "l": 2}) as world:
        yield world


def steps(model, inputs, targets, lr=0.5):
    """Steps of SGD, by hand as torch.optim takes seconds to import: losses, first gradients, last weights."""
    losses, first = [], None
    for x, target in zip(inputs, targets):
        loss = model.loss(x, target)
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
    return losses, first, {name: p.detach() for name, p in model.named_parameters()}


def on_rank(mesh, kind, sizes, designs, inputs, targets):
    from tpcourse import models
    from tpcourse.layers import model_layouts
    from tpcourse.schemes import ThreeD

    outs = []
    for design in designs:
        scheme = ThreeD(mesh, *design)
        model = getattr(models, kind)(scheme, **sizes).double()
        outs.append((*steps(model, inputs, targets), model_layouts(model, scheme.group)))
    return outs


def assembled(shape, parts):
    """The whole from the pieces that ranks own; each entry has one owner."""
    whole, owners = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape)
    for layout, part in parts:
        for piece in layout.pieces:
            if piece.owned:
                whole[piece.there] = part[piece.here]
                owners[piece.there] += 1
    assert torch.equal(owners, torch.ones(shape))
    return whole


def compare(world, kind, sizes, designs, inputs, targets):
    losses, first, last = steps({"GPT": GPT, "ViT": ViT}[kind](Dense(), **sizes).double(), inputs, targets)
    for outs in zip(*world.run(on_rank, kind, sizes, designs, inputs, targets)):
        for own_losses, own_first, own_last, layouts in outs:
            assert_close(own_losses, losses, rtol=1e-12, atol=0)
            for name, layout in layouts.items():
                assert_close(own_first[name], layout.take(first[name]), rtol=1e-9, atol=1e-13, msg=name)
        for name in last:
            parts = [(layouts[name], own_last[name]) for *_, own_last, layouts in outs]
            assert_close(assembled(last[name].shape, parts), last[name], rtol=1e-9, atol=1e-13, msg=name)


def text(batch=BATCH):
    ids = torch.randint(11, (STEPS, batch, SEQUENCE + 1))
    targets = ids[..., 1:].masked_fill(torch.rand(STEPS, batch, SEQUENCE) < 0.3, -100)
    targets[:, 0, 0] = 7
    return list(ids[..., :-1]), list(targets)


@pytest.mark.parametrize("options", GPTS.values(), ids=GPTS)
def test_gpt(cube, options):
    """Odd sequences, an uneven vocabulary, some targets that do not count."""
    compare(cube, "GPT", GPT_SIZES | options, DESIGNS if cube.size > 4 else DESIGNS[1:3], *text())


def test_two_layers(eight):
    """Gradients pass from layer to layer; several queries to a KV head; the core recomputed."""
    sizes = GPT_SIZES | {"num_layers": 2, "num_kv_heads": 6, "recompute": "selective", "activation": "swiglu"}
    compare(eight, "GPT", sizes, DESIGNS[1:3], *text())


def test_vit(cube):
    images, classes = torch.randn(STEPS, BATCH, 3, 6, 6, dtype=torch.float64), torch.randint(7, (STEPS, BATCH))
    compare(cube, "ViT", VIT_SIZES, DESIGNS[:1] if cube.size > 4 else DESIGNS[2:3], list(images), list(classes))


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_by_p_by_one_is_one_dimensional(ranks):
    """To the bit, and message for message: Megatron's layers, with and without sequence parallelism."""

    def on_rank(mesh, make, leave, sizes, inputs, targets):
        from tpcourse import models
        from tpcourse.schemes import OneD, ThreeD

        outs = []
        for scheme in (OneD(mesh["j"], leave == "reduce_scatter", seed=4), ThreeD(mesh, leave, False, seed=4)):
            model = getattr(models, make)(scheme, **sizes).double()
            with tp.ledger(mesh) as book:
                outs.append((*steps(model, inputs, targets), scheme.random.get_state()[1]))
            outs[-1] += (book.rows,)
        return outs

    with tp.World(mesh={"i": 1, "j": ranks, "l": 1}) as world:
        for leave in ("reduce_scatter", "all_reduce"):
            for options in GPTS.values():
                sizes = GPT_SIZES | options | {"dropout": 0.2}
                for theirs, ours in world.run(on_rank, "GPT", leave, sizes, *text()):
                    equal_to_the_bit(ours, theirs)


def equal_to_the_bit(ours, theirs):
    assert ours[0] == theirs[0]
    for mine, other in zip(ours[1:3], theirs[1:3]):
        assert set(mine) == set(other)
        for name in mine:
            assert torch.equal(mine[name], other[name]), name
    assert torch.equal(ours[3], theirs[3])
    assert Table(ours[4]) == Table(theirs[4]), Table(ours[4]) - Table(theirs[4])
