"""GPT and ViT on the 1D schemes against the dense model: losses, gradients, weights after steps of SGD."""

import pytest
import torch
from torch.testing import assert_close
from training import steps

from tpcourse.models import GPT, ViT
from tpcourse.schemes import Dense

GPT_SIZES = dict(vocab_size=11, context=5, dim=24, num_layers=2, num_heads=12, hidden=36)
VIT_SIZES = dict(classes=5, image=6, patch=2, dim=24, num_layers=2, num_heads=12, hidden=36)
GPTS = {
    "gpt2": {},
    "untied, no bias": {"tied": False, "bias": False},
    "llama": {"positions": "rotary", "activation": "swiglu", "norm": "rms", "tied": False},
    "one kv head": {"num_kv_heads": 1},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
}


def on_rank(mesh, kind, sizes, sequence_parallel, inputs, targets):
    from tpcourse import layers, models
    from tpcourse.schemes import OneD

    model = getattr(models, kind)(OneD(mesh["tp"], sequence_parallel), **sizes).double()
    return *steps(model, inputs, targets), layers.model_layouts(model, mesh["tp"])


def compare(world, kind, sizes, sequence_parallel, inputs, targets):
    losses, first, last = steps({"GPT": GPT, "ViT": ViT}[kind](Dense(), **sizes).double(), inputs, targets)
    for own in world.run(on_rank, kind, sizes, sequence_parallel, inputs, targets):
        own_losses, own_first, own_last, layouts = own
        assert_close(own_losses, losses, rtol=1e-12, atol=0)
        assert set(layouts) == set(first)
        for name, layout in layouts.items():
            assert_close(own_first[name], layout.take(first[name]), rtol=1e-9, atol=1e-13, msg=name)
            assert_close(own_last[name], layout.take(last[name]), rtol=1e-9, atol=1e-13, msg=name)


@pytest.mark.parametrize("options", GPTS.values(), ids=GPTS)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["1D", "1D+SP"])
def test_gpt(world, options, sequence_parallel):
    """Odd sequences; some targets do not count. Tokens divide only where they must."""
    batch, sequence = (4, 3) if sequence_parallel else (1, 5)
    ids = torch.randint(11, (3, batch, sequence + 1))
    targets = ids[..., 1:].masked_fill(torch.rand(3, batch, sequence) < 0.3, -100)
    targets[:, 0, 0] = 7
    compare(world, "GPT", GPT_SIZES | options, sequence_parallel, list(ids[..., :-1]), list(targets))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["1D", "1D+SP"])
def test_vit(world, sequence_parallel):
    images = torch.randn(3, 4, 3, 6, 6, dtype=torch.float64)
    compare(world, "ViT", VIT_SIZES | {"channels": 3}, sequence_parallel, list(images),
            list(torch.randint(5, (3, 4))))


def test_starts_alike_on_any_number_of_ranks(world):
    """What a rank starts with is its part of what one process starts with, to the bit."""
    def on_rank(mesh):
        from tpcourse import layers, models
        from tpcourse.schemes import OneD
        model = models.GPT(OneD(mesh["tp"]), **GPT_SIZES, num_kv_heads=1, activation="swiglu", seed=5)
        return dict(model.named_parameters()), layers.model_layouts(model, mesh["tp"])

    whole = dict(GPT(Dense(), **GPT_SIZES, num_kv_heads=1, activation="swiglu", seed=5).named_parameters())
    for parameters, layouts in world.run(on_rank):
        for name, layout in layouts.items():
            assert torch.equal(parameters[name].detach(), layout.take(whole[name])), name


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["1D", "1D+SP"])
def test_generates_what_the_dense_model_does(world, sequence_parallel):
    """Also where the number of tokens so far does not divide by the ranks, and past the context."""
    def on_rank(mesh, sequence_parallel):
        from tpcourse import models
        from tpcourse.schemes import OneD
        sizes = GPT_SIZES | {"context": 12}
        model = models.GPT(OneD(mesh["tp"], sequence_parallel), **sizes, dropout=0.5)
        return models.generate(model, torch.tensor([1, 2, 3, 4, 5]), 12, seed=3)

    from tpcourse.models import generate
    dense = generate(GPT(Dense(), **GPT_SIZES | {"context": 12}), torch.tensor([1, 2, 3, 4, 5]), 12, seed=3)
    assert len(set(dense.tolist())) > 4
    assert all(torch.equal(own, dense) for own in world.run(on_rank, sequence_parallel))


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["1D", "1D+SP"])
def test_dropout_survives_recomputation(two, sequence_parallel, recompute):
    """With dropout, the gradients are to the bit those of a run that keeps everything; without it, others."""
    def on_rank(mesh, sequence_parallel, recompute, dropout):
        from tpcourse import models
        from tpcourse.schemes import OneD
        scheme = OneD(mesh["tp"], sequence_parallel, seed=1)
        model = models.GPT(scheme, **GPT_SIZES, dropout=dropout, recompute=recompute)
        ids = torch.arange(20).reshape(4, 5) % 11
        model.loss(ids, ids.roll(1)).backward()
        return {name: p.grad for name, p in model.named_parameters()}, scheme.random.get_state()

    kept = two.run(on_rank, sequence_parallel, "none", 0.3)
    again = two.run(on_rank, sequence_parallel, recompute, 0.3)
    without = two.run(on_rank, sequence_parallel, recompute, 0.0)
    for (grads, state), (own, own_state), (other, _) in zip(kept, again, without):
        assert all(torch.equal(grads[name], own[name]) for name in grads)
        assert all(torch.equal(*pair) for pair in zip(state, own_state))
        assert not torch.equal(grads["blocks.0.mlp.up.weight"], other["blocks.0.mlp.up.weight"])


@pytest.mark.parametrize("build, says", [
    (dict(num_heads=10, dim=40), "num_heads=10"), (dict(dim=25), "dim=25"), (dict(hidden=35), "35"),
    (dict(num_kv_heads=5), "num_kv_heads=5"), (dict(vocab_size=3), "num_embeddings=3"),
    (dict(positions="sinus"), "sinus"), (dict(activation="relu"), "relu"), (dict(recompute="half"), "half")],
    ids=lambda value: value if isinstance(value, str) else "")
def test_refused_at_construction(build, says):
    def on_rank(mesh, build):
        from tpcourse import models
        from tpcourse.schemes import OneD
        with pytest.raises(ValueError) as refused:
            models.GPT(OneD(mesh["tp"]), **GPT_SIZES | build)
        return str(refused.value)

    import tpcourse as tp
    assert all(says in text for text in tp.spawn(on_rank, build, ranks=4))


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match="sequence of 6 exceeds context=5"):
        GPT(Dense(), **GPT_SIZES)(torch.zeros(1, 6, dtype=torch.long))
