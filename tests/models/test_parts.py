"""A GPT whose parts are cut in different ways, against the dense model, and against its parts' formulas."""

import functools
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from training import steps

import tpcourse as tp
from tpcourse import predict
from tpcourse.measure import Table, dry_run
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
ATTENTION = [(ranks, name) for ranks, names in FORMULAS.items() for name in names]
GPT_SIZES = dict(vocab_size=11, context=5, dim=24, num_layers=2, num_heads=12, hidden=36)
LLAMA = {"positions": "rotary", "activation": "swiglu", "norm": "rms", "num_kv_heads": 4, "bias": False}
RECOMPUTE = ("none", "selective", "full")


@pytest.fixture(scope="module")
def worlds():
    with tp.World(ranks=2) as two, tp.World(ranks=4) as four:
        yield {2: two, 4: four}


def build(mesh, formulas, names, recompute):
    """The parts of the named schemes: embedding, then attention and MLP of each layer, then the head."""
    from torch.distributed.device_mesh import init_device_mesh

    from tpcourse.plan.real import scheme_of
    from tpcourse.schemes import Layer, Parts

    def real(number, scheme):
        axes = init_device_mesh(mesh.device_type, tuple(scheme.mesh.values()),
                                mesh_dim_names=tuple(scheme.mesh))
        return scheme_of(scheme, axes, seed=number)

    made = {name: real(number, formulas[name]) for number, name in enumerate(sorted(set(names)))}
    embedding, *layers, head = (made[name] for name in names)
    return Parts(embedding, tuple(map(Layer, layers[::2], layers[1::2], recompute)), head)


def mixtures(ranks, attention):
    """For every scheme of the MLP, a model of two layers: what the parts are, recomputed, and options."""
    names = list(FORMULAS[ranks])
    for number, mlp in enumerate(names):
        ends = [names[(number + 2) % len(names)], names[(number + (2 if number % 2 else 3)) % len(names)]]
        options = {"tied": ends[0] == ends[1]} | (LLAMA if number % 3 == 1 else {})
        recompute = RECOMPUTE[number % 3], RECOMPUTE[(number + 1 + number % 2) % 3]
        yield [ends[0], attention, mlp, mlp, attention, ends[1]], recompute, options


def train(mesh, formulas, mixed, sizes, inputs, targets):
    from tpcourse import layers, models

    outs = []
    for names, recompute, options in mixed:
        parts = build(mesh, formulas, names, recompute)
        model = models.GPT(parts, **sizes | options).double()
        outs.append((*steps(model, inputs, targets), layers.model_layouts(model, parts.group)))
    return outs


def text():
    """Three batches of odd sequences; some targets do not count."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(11, (3, 4, 4), generator=draw)
    targets = ids[..., 1:].masked_fill(torch.rand(3, 4, 3, generator=draw) < 0.3, -100)
    targets[:, 0, 0] = 7
    return list(ids[..., :-1]), list(targets)


@functools.cache
def dense(options):
    return steps(GPT(Dense(), **GPT_SIZES | dict(options)).double(), *text())


def compare(outs, expected):
    """Losses, first gradients and last weights on every rank; each entry has one owner."""
    losses, first, last = expected
    owners = {name: torch.zeros_like(p) for name, p in last.items()}
    for own_losses, own_first, own_last, layouts in outs:
        assert_close(own_losses, losses, rtol=1e-12, atol=0)
        assert list(layouts) == list(first)
        for name, layout in layouts.items():
            assert_close(own_first[name], layout.take(first[name]), rtol=1e-9, atol=1e-13, msg=name,
                         check_stride=False)
            assert_close(own_last[name], layout.take(last[name]), rtol=1e-9, atol=1e-13, msg=name)
            for piece in layout.pieces:
                owners[name][piece.there] += piece.owned
    assert all((count == 1).all() for count in owners.values())


@pytest.mark.parametrize("ranks, attention", ATTENTION, ids=lambda value: str(value))
def test_trains_as_the_dense_model_does(worlds, ranks, attention):
    """With every scheme for the MLP, other schemes at both ends, and layers that recompute differently."""
    mixed = list(mixtures(ranks, attention))
    outs = worlds[ranks].run(train, FORMULAS[ranks], mixed, GPT_SIZES, *text())
    for (_, _, options), own in zip(mixed, zip(*outs)):
        compare(own, dense(tuple(options.items())))
