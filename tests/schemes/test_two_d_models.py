"""GPT and ViT in two dimensions and 2.5 against the dense model: losses, gradients, weights after SGD."""

import pytest
import torch
from grids import named
from torch.testing import assert_close
from training import steps

import tpcourse as tp
from tpcourse.models import GPT, ViT, generate
from tpcourse.schemes import Dense

GPT_SIZES = dict(vocab_size=11, context=5, dim=24, num_layers=1, num_heads=4, hidden=10)
VIT_SIZES = dict(classes=5, image=6, patch=2, channels=3, dim=12, num_layers=1, num_heads=2, hidden=10)
GPTS = {
    "gpt2": {"num_layers": 2},
    "untied, no bias": {"tied": False, "bias": False},
    "llama": {"positions": "rotary", "activation": "swiglu", "norm": "rms", "tied": False},
    "one kv head": {"num_kv_heads": 1},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
}
MESHES = [(1, 1), (2, 2), (1, 1, 2), (2, 2, 2)]


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


def test_generates_what_the_dense_model_does(grid_world):
    def on_rank(mesh, sizes, ids):
        from tpcourse import models
        from tpcourse.schemes import TwoD

        return models.generate(models.GPT(TwoD(mesh), **sizes, dropout=0.5), ids, 6, seed=3)

    sizes, ids = GPT_SIZES | {"context": 7}, torch.tensor([1, 2, 3, 4, 5])
    dense = generate(GPT(Dense(), **sizes), ids, 6, seed=3)
    assert len(set(dense[5:].tolist())) > 2
    assert all(torch.equal(own, dense) for own in grid_world.run(on_rank, sizes, ids))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_dropout_survives_recomputation(four, recompute):
    """With dropout, the gradients are to the bit those of a run that keeps everything; without it, others."""
    def on_rank(mesh, recompute, dropout):
        from tpcourse import models
        from tpcourse.schemes import TwoD

        scheme = TwoD(mesh, seed=1)
        model = models.GPT(scheme, **GPT_SIZES, dropout=dropout, recompute=recompute)
        ids = torch.arange(20).reshape(4, 5) % 11
        model.loss(ids, ids.roll(1)).backward()
        return {name: p.grad for name, p in model.named_parameters()}, scheme.random.get_state()

    kept, again, without = (four.run(on_rank, *args) for args in (("none", 0.3), (recompute, 0.3),
                                                                  (recompute, 0.0)))
    for (grads, state), (own, own_state), (other, _) in zip(kept, again, without):
        assert all(torch.equal(grads[name], own[name]) for name in grads)
        assert all(torch.equal(*pair) for pair in zip(state, own_state))
        assert not torch.equal(grads["blocks.0.mlp.up.weight"], other["blocks.0.mlp.up.weight"])


def test_recomputation_keeps_the_input_and_broadcasts_again(four):
    """A block that is recomputed keeps its input alone; the panels of its linears pass by once more."""
    def on_rank(mesh, recompute):
        from tpcourse import models
        from tpcourse.schemes import TwoD

        block = models.Block(TwoD(mesh), 24, 4, hidden=10, recompute=recompute)
        x = torch.randn(6, 12, requires_grad=True)
        with tp.ledger(mesh) as book:
            with tp.saved_activations() as mem:
                y = block(x, 3)
            y.sum().backward()
        return mem.bytes, {phase: book.total("calls", op="broadcast", phase=phase)
                           for phase in ("forward", "backward", "recomputation")}

    for (kept, sent), (kept_x, again) in zip(four.run(on_rank, "none"), four.run(on_rank, "full")):
        assert kept_x == 6 * 12 * 4 < kept / 5
        assert sent == {"forward": 16, "backward": 16, "recomputation": 0}  # 4 linears
        assert again == {**sent, "recomputation": 16}


def test_a_batch_that_does_not_divide_is_refused(four):
    """Three sequences of four tokens: each rank gets six tokens, which are no whole sequences."""
    def on_rank(mesh):
        from tpcourse import models
        from tpcourse.schemes import TwoD

        ids = torch.zeros(3, 4, dtype=torch.long)
        with pytest.raises(ValueError) as refused:
            models.GPT(TwoD(mesh), **GPT_SIZES).loss(ids, ids)
        return str(refused.value)

    assert four.run(on_rank) == ["6 tokens on a rank are not whole sequences of 4; pass a batch that is "
                                 "divisible by the 2 ranks it is split over"] * 4


def test_clipping_counts_every_entry_once():
    """Repeated biases, norms and weights at each depth, a tied table, copies of the one KV head."""
    def on_rank(mesh, sizes, ids, max_norm):
        from tpcourse import layers, models
        from tpcourse.schemes import TwoD

        scheme = TwoD(mesh)
        model = models.GPT(scheme, **sizes).double()
        model.loss(ids, ids.roll(1)).backward()
        norm = layers.clip_grad_norm_(model, max_norm, scheme.group)
        grads = {name: p.grad for name, p in model.named_parameters()}
        return norm, grads, layers.model_layouts(model, scheme.group)

    ids, sizes = torch.arange(12).view(4, 3) % 11, GPT_SIZES | {"num_kv_heads": 1}
    model = GPT(Dense(), **sizes).double()
    model.loss(ids, ids.roll(1)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for own_norm, grads, layouts in tp.spawn(on_rank, sizes, ids, 0.1, mesh=named((2, 2, 2))):
        assert_close(own_norm, norm)
        for name, p in model.named_parameters():
            assert_close(grads[name], layouts[name].take(p.grad), check_stride=False)


def one_step(mesh):
    from tpcourse import models
    from tpcourse.schemes import TwoD

    ids = torch.zeros(4, 3, dtype=torch.long)
    models.GPT(TwoD(mesh), **GPT_SIZES).loss(ids, ids).backward()


def test_a_dry_run_counts_what_real_ranks_send_and_keep():
    def on_rank(mesh):
        with tp.ledger(mesh) as book, tp.saved_activations() as mem:
            one_step(mesh)
        return book, mem

    mesh = named((2, 2, 2))
    dry = tp.measure.dry_run(one_step, mesh=mesh)
    book, mem = tp.spawn(on_rank, mesh=mesh)[0]
    assert dry.book == book and dry.activations == mem and len(book) > 10
