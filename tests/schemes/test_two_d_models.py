"""GPT and ViT in two dimensions and 2.5 against the dense model: losses, gradients, weights after SGD."""

import pytest
import torch
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.models import GPT, ViT
from tpcourse.schemes import Dense

GPT_SIZES = dict(vocab_size=11, context=5, dim=24, num_layers=2, num_heads=4, hidden=10)
VIT_SIZES = dict(classes=5, image=6, patch=2, channels=3, dim=12, num_layers=1, num_heads=2, hidden=10)
GPTS = {
    "gpt2": {},
    "untied, no bias": {"tied": False, "bias": False},
    "llama": {"positions": "rotary", "activation": "swiglu", "norm": "rms", "tied": False},
    "one kv head": {"num_kv_heads": 1},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
}
MESHES = {"1x1": (1, 1), "2x2": (2, 2), "1x1x2": (1, 1, 2), "2x2x2": (2, 2, 2)}


def named(shape):
    return dict(zip(("row", "column", "depth"), shape))


@pytest.fixture(scope="module", params=list(MESHES))
def grid_world(request):
    with tp.World(mesh=named(MESHES[request.param])) as world:
        yield world


@pytest.fixture(scope="module")
def four():
    with tp.World(mesh=named((2, 2))) as world:
        yield world


def steps(model, inputs, targets):
    """Three steps of SGD with momentum: the losses, the first gradients, the last weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, first = [], None
    for x, target in zip(inputs, targets):
        loss = model.loss(x, target)
        optimizer.zero_grad()
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, first, {name: p.detach() for name, p in model.named_parameters()}


def on_rank(mesh, kind, sizes, inputs, targets):
    from tpcourse import layers, models
    from tpcourse.schemes import TwoD

    scheme = TwoD(mesh)
    model = getattr(models, kind)(scheme, **sizes).double()
    return *steps(model, inputs, targets), layers.model_layouts(model, scheme.group)


def compare(world, kind, sizes, inputs, targets):
    """Every rank sees the losses of the dense model, and has its part of the gradients and the weights."""
    losses, first, last = steps({"GPT": GPT, "ViT": ViT}[kind](Dense(), **sizes).double(), inputs, targets)
    owned = {name: torch.zeros_like(p) for name, p in last.items()}
    for own_losses, own_first, own_last, layouts in world.run(on_rank, kind, sizes, inputs, targets):
        assert_close(own_losses, losses, rtol=1e-12, atol=0)
        assert set(layouts) == set(first)
        for name, layout in layouts.items():
            assert_close(own_first[name], layout.take(first[name]), rtol=1e-9, atol=1e-13, check_stride=False)
            assert_close(own_last[name], layout.take(last[name]), rtol=1e-9, atol=1e-13)
            for piece in layout.pieces:
                owned[name][piece.there] += piece.owned
    assert all((count == 1).all() for count in owned.values()), owned  # each entry answered for once


def batch_of(count, size=4):
    """`count` batches of odd sequences; some targets do not count."""
    ids = torch.randint(11, (count, size, 4))
    targets = ids[..., 1:].masked_fill(torch.rand(count, size, 3) < 0.3, -100)
    targets[:, 0, 0] = 7
    return list(ids[..., :-1]), list(targets)


@pytest.mark.parametrize("options", GPTS.values(), ids=GPTS)
def test_gpt(grid_world, options):
    compare(grid_world, "GPT", GPT_SIZES | options, *batch_of(3))


def test_vit(grid_world):
    images = torch.randn(3, 4, 3, 6, 6, dtype=torch.float64)
    compare(grid_world, "ViT", VIT_SIZES, list(images), list(torch.randint(5, (3, 4))))
