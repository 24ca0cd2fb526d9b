"""What the layers say about where their parameters lie, and the norm of all gradients, which uses it."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.measure import Row, Table, wire_bytes

WORDS, DIM, HIDDEN, HEAD_DIM = 13, 5, 24, 3
HEADS = {1: (2, 1), 2: (2, 1), 3: (3, 1), 4: (4, 2)}  # query heads, KV heads; copies from 2 ranks on


def model_on(mesh):
    """One of each kind of layer, a layer without layouts, and a head tied to the embedding."""
    from tpcourse.layers import (ColumnParallelLinear, QKVParallelLinear, RowParallelLinear,
                                 VocabParallelEmbedding, VocabParallelHead)

    torch.manual_seed(3)
    group, kind = mesh["tp"], {"dtype": torch.float64}
    embedding = VocabParallelEmbedding(WORDS, DIM, group, **kind)
    return nn.ModuleDict({
        "embedding": embedding, "norm": nn.LayerNorm(DIM, **kind),
        "qkv": QKVParallelLinear(DIM, HEAD_DIM, *HEADS[mesh.size()], group, **kind),
        "enter": ColumnParallelLinear(DIM, HIDDEN, group, stride=2, **kind),
        "leave": RowParallelLinear(HIDDEN // 2, DIM, group, **kind),
        "head": VocabParallelHead(DIM, WORDS, group, weight=embedding.weight, **kind)})


def whole_model(p):
    torch.manual_seed(3)
    kind = {"dtype": torch.float64}
    heads, kv = HEADS[p]
    model = nn.ModuleDict({
        "embedding": nn.Embedding(WORDS, DIM, **kind), "norm": nn.LayerNorm(DIM, **kind),
        "qkv": nn.Linear(DIM, (heads + 2 * kv) * HEAD_DIM, **kind), "enter": nn.Linear(DIM, HIDDEN, **kind),
        "leave": nn.Linear(HIDDEN // 2, DIM, **kind), "head": nn.Linear(DIM, WORDS, bias=False, **kind)})
    model.head.weight = model.embedding.weight
    return model


def described(mesh):
    from tpcourse.layers import model_layouts

    model = model_on(mesh)
    return model_layouts(model, mesh["tp"]), {name: p.detach() for name, p in model.named_parameters()}


def test_pieces_cover_the_whole_and_each_entry_has_one_owner(world):
    """Every parameter of the model in one process, to the bit, and nothing else."""
    whole, outs = whole_model(world.size), world.run(described)
    assert all(list(layouts) == list(own) == list(dict(whole.named_parameters())) for layouts, own in outs)
    for name, parameter in whole.named_parameters():
        owners = torch.zeros(parameter.shape)
        for layouts, own in outs:
            layout = layouts[name]
            assert layout.shape == parameter.shape and layout.local_shape == own[name].shape
            assert torch.equal(layout.take(parameter), own[name])
            for piece in layout.pieces:
                assert torch.equal(own[name][piece.here], parameter.detach()[piece.there])
                owners[piece.there] += piece.owned
        assert (owners == 1).all()


def test_a_part_has_memory_of_its_own(two):
    def on_rank(mesh):
        from tpcourse.layers import model_layouts

        layout = model_layouts(model_on(mesh), mesh["tp"])["leave.weight"]
        whole = torch.ones(layout.shape, requires_grad=True)
        part = layout.take(whole)
        try:
            layout.take(torch.ones(7, 2))
        except ValueError as error:
            text = str(error)
        return part.is_contiguous(), part.untyped_storage().nbytes(), part.requires_grad, text

    text = "the whole has shape (7, 2), not (5, 12); pass the tensor of all ranks together"
    assert two.run(on_rank) == [(True, 5 * 6 * 4, False, text)] * 2


# clipping


def clipped(mesh, whole_grads, max_norm, wrong):
    """The norm and this rank's gradients after clipping, from its parts of these whole gradients."""
    from unittest import mock

    from tpcourse.layers import Layout, Piece, clip_grad_norm_, model_layouts

    model = model_on(mesh)
    layouts = model_layouts(model, mesh["tp"])
    for name, parameter in model.named_parameters():
        if name in whole_grads:
            parameter.grad = layouts[name].take(whole_grads[name])
    if wrong:  # every rank counts all it holds
        layouts = {name: Layout(layout.shape, tuple(Piece(p.here, p.there, True) for p in layout.pieces))
                   for name, layout in layouts.items()}
    with mock.patch("tpcourse.layers.clip.model_layouts", return_value=layouts), tp.ledger(mesh) as book:
        norm = clip_grad_norm_(model, max_norm, mesh["tp"])
    return norm, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, book


def whole_clipped(p, without, max_norm):
    model = whole_model(p)
    for name, parameter in model.named_parameters():
        if name not in without:
            parameter.grad = torch.randn_like(parameter)
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return before, norm, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("without", [[], ["norm.weight", "qkv.weight"]], ids=["all", "some without"])
@pytest.mark.parametrize("max_norm", [0.5, 1e4, 0.0])
def test_clipping_against_torch(world, without, max_norm):
    """On every rank the norm of the whole model's gradient, and its part of it scaled; one number is sent."""
    p = world.size
    before, norm, after = whole_clipped(p, without, max_norm)
    layouts = [layouts for layouts, _ in world.run(described)]
    rows = [Row("all_reduce", "tp", p, 1, 8, wire_bytes("all_reduce", 8, p), "forward")] if p > 1 else []
    for rank, (own_norm, own, book) in enumerate(world.run(clipped, before, max_norm, False)):
        assert_close(own_norm, norm)
        assert_close(own, {name: layouts[rank][name].take(grad) for name, grad in after.items()})
        assert book == Table(rows), book


def test_replicas_counted_on_every_rank_make_the_norm_too_large(four):
    """By the squares of what is whole on 4 ranks three times, and of what two ranks have a copy of, once."""
    before, norm, _ = whole_clipped(4, [], 0.5)
    squares = {name: grad.square() for name, grad in before.items()}
    extra = 3 * sum(squares[name].sum() for name in ("norm.weight", "norm.bias", "leave.bias"))
    extra += sum(squares[name][4 * HEAD_DIM:].sum() for name in ("qkv.weight", "qkv.bias"))
    for own_norm, *_ in four.run(clipped, before, 0.5, True):
        assert_close(own_norm, (norm.square() + extra).sqrt())
        assert own_norm > norm + 0.5
    for own_norm, *_ in four.run(clipped, before, 0.5, False):
        assert_close(own_norm, norm)


def test_clipping_in_16_bit(two):
    """The norm is in float32: bfloat16 would make 44.75 of 44.72."""

    def on_rank(mesh):
        from tpcourse.layers import ColumnParallelLinear, clip_grad_norm_

        layer = ColumnParallelLinear(100, 20, mesh["tp"], bias=False, dtype=torch.bfloat16)
        layer.weight.grad = torch.ones_like(layer.weight)
        norm = clip_grad_norm_(layer, 1.0, mesh["tp"])
        return norm, layer.weight.grad.dtype

    for norm, dtype in two.run(on_rank):
        assert_close(norm, torch.tensor(2000.0).sqrt())
        assert dtype == torch.bfloat16


def test_a_negative_norm(two):
    def on_rank(mesh):
        from tpcourse.layers import clip_grad_norm_

        try:
            clip_grad_norm_(nn.Linear(2, 2), -1.0, mesh["tp"])
        except ValueError as error:
            return str(error)

    assert two.run(on_rank) == ["max_norm=-1.0 is negative; pass zero or more"] * 2


@pytest.fixture(scope="module")
def four():
    with tp.World(ranks=4) as world:
        yield world


def test_one_process_clips_without_a_group():
    """As torch does; a dense scheme has no group."""
    from tpcourse.layers import clip_grad_norm_

    ours, theirs = (nn.Linear(3, 5, dtype=torch.float64) for _ in range(2))
    for model in (ours, theirs):
        for i, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, i + 1.0)
    norm = clip_grad_norm_(ours, 0.5, None)
    assert_close(norm, nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))
    assert_close([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])
