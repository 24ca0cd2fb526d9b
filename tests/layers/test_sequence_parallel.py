"""Column, row and embedding layers under sequence parallelism, against whole layers and DTensor's styles."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.measure import Row, Table, wire_bytes

IN, OUT, WORDS = 5, 3, 11
HIDDEN = {1: 7, 2: 6, 3: 9, 4: 12}  # split features for each number of ranks: odd where P allows it
SHAPES = [(1,), (3, 1), (2, 3)]  # a first dimension of so many tokens a rank, and what follows it


def strided(x):
    return torch.stack([x, -x], -1)[..., 0]


def held(layer):
    return [t for p in layer.parameters() for t in (p.detach(), p.grad)]


def column_on_rank(mesh, xs, grads, hidden, bias, gather_output, change):
    from tpcourse.layers import ColumnParallelLinear

    torch.manual_seed(3)
    layer = ColumnParallelLinear(IN, hidden, mesh["tp"], bias, gather_output, sequence_parallel=True,
                                 dtype=torch.float64)
    x = change(xs[mesh.get_rank()]).requires_grad_()
    y = layer(x)
    y.backward(change(grads[mesh.get_rank()]))
    return y.detach(), x.grad, held(layer)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("gather_output", [True, False], ids=["gathered", "split"])
@pytest.mark.parametrize("change", [torch.clone, strided], ids=["contiguous", "strided"])
def test_columns(world, shape, bias, gather_output, change):
    """Tokens in, columns out: each rank gives its own columns' gradient, and gets that of its own tokens."""
    p = world.size
    torch.manual_seed(3)
    whole = nn.Linear(IN, HIDDEN[p], bias, dtype=torch.float64)
    x = torch.randn(p * shape[0], *shape[1:], IN, dtype=torch.float64, requires_grad=True)
    y = whole(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    ys, grads = ([t] * p if gather_output else t.chunk(p, -1) for t in (y.detach(), dy))
    outs = world.run(column_on_rank, x.detach().chunk(p), grads, HIDDEN[p], bias, gather_output, change)
    for rank, (own_y, dx, own) in enumerate(outs):
        assert_close(own_y, ys[rank], check_stride=False)
        assert_close(dx, x.grad.chunk(p)[rank], check_stride=False)
        assert_close(own, [t.chunk(p)[rank] for t in held(whole)])


def row_on_rank(mesh, xs, grads, hidden, bias, skip_bias_add, change, wrong):
    from tpcourse.layers import RowParallelLinear

    torch.manual_seed(3)
    layer = RowParallelLinear(hidden, OUT, mesh["tp"], bias, skip_bias_add=skip_bias_add,
                              sequence_parallel=True, dtype=torch.float64)
    x = change(xs[mesh.get_rank()]).requires_grad_()
    y = layer(x) if wrong is None else wrong(layer, x)
    if skip_bias_add:
        y = y[0] if y[1] is None else y[0] + y[1]
    y.backward(change(grads[mesh.get_rank()]))
    return y.detach(), x.grad, held(layer)


def check_rows(world, shape=(2,), bias=True, skip_bias_add=False, change=torch.clone, wrong=None):
    p = world.size
    torch.manual_seed(3)
    whole = nn.Linear(HIDDEN[p], OUT, bias, dtype=torch.float64)
    x = torch.randn(p * shape[0], *shape[1:], HIDDEN[p], dtype=torch.float64, requires_grad=True)
    y = whole(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    args = x.detach().chunk(p, -1), dy.chunk(p), HIDDEN[p], bias, skip_bias_add, change, wrong
    for rank, (own_y, dx, (weight, dw, *own_bias)) in enumerate(world.run(row_on_rank, *args)):
        assert_close(own_y, y.detach().chunk(p)[rank])
        assert_close(dx, x.grad.chunk(p, -1)[rank], check_stride=False)
        assert_close([weight, dw], [t.chunk(p, 1)[rank] for t in held(whole)[:2]], check_stride=False)
        assert_close(own_bias, held(whole)[2:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("skip_bias_add", [True, False], ids=["kept back", "added"])
@pytest.mark.parametrize("change", [torch.clone, strided], ids=["contiguous", "strided"])
def test_rows(world, shape, bias, skip_bias_add, change):
    """Features in, tokens out: each rank gives the gradient of its own tokens; db is summed over all."""
    check_rows(world, shape, bias, skip_bias_add, change)


def bias_gradient_not_summed(layer, x):
    from tpcourse.comm import reduce_scatter

    return reduce_scatter(nn.functional.linear(x, layer.weight), layer.group, 0) + layer.bias


def bias_gradient_divided(layer, x):
    layer.bias.register_hook(lambda grad: grad / 3)
    return layer(x)


@pytest.mark.parametrize("wrong", [bias_gradient_not_summed, bias_gradient_divided])
def test_the_usual_bugs_of_the_bias_are_seen(three, wrong):
    check_rows(three)
    with pytest.raises(AssertionError, match="not close"):
        check_rows(three, wrong=wrong)


def test_the_usual_bugs_of_the_bias_by_how_much(three):
    """Not summed, each rank has the part of its own tokens, and the copies of the bias drift apart."""
    x, dy = torch.randn(6, 9, dtype=torch.float64), torch.randn(6, OUT, dtype=torch.float64)
    args = x.chunk(3, -1), dy.chunk(3), 9, True, False, torch.clone
    for rank, (*_, own) in enumerate(three.run(row_on_rank, *args, bias_gradient_not_summed)):
        assert_close(own[3], dy.chunk(3)[rank].sum(0))
    for *_, own in three.run(row_on_rank, *args, bias_gradient_divided):
        assert_close(own[3], dy.sum(0) / 3)


def embedding_on_rank(mesh, ids, grads, wrong):
    from tpcourse.layers import VocabParallelEmbedding

    torch.manual_seed(3)
    layer = VocabParallelEmbedding(WORDS, OUT, mesh["tp"], 2, sequence_parallel=not wrong,
                                   dtype=torch.float64)
    y = layer(ids)
    if wrong:  # this rank's tokens, but no other rank's gradient comes back
        y = y.chunk(mesh.size())[mesh.get_rank()]
    y.backward(grads[mesh.get_rank()])
    return y.detach(), layer.weight.grad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_embedding(world, shape):
    from tpcourse.comm import split_sizes

    p = world.size
    torch.manual_seed(3)
    whole = nn.Embedding(WORDS, OUT, 2, dtype=torch.float64)
    ids = torch.randint(WORDS, (p * shape[0], *shape[1:]))
    y = whole(ids)
    dy = torch.randn_like(y)
    y.backward(dy)
    rows = whole.weight.grad.split(split_sizes(WORDS, p))
    for rank, (own_y, grad) in enumerate(world.run(embedding_on_rank, ids, dy.chunk(p), False)):
        assert_close(own_y, y.detach().chunk(p)[rank])
        assert_close(grad, rows[rank])
    if p > 1:
        grads = [grad for _, grad in world.run(embedding_on_rank, ids, dy.chunk(p), True)]
        assert any((grad - row).abs().max() > 1e-3 for grad, row in zip(grads, rows))


def mlp_on_rank(mesh, x, steps, hidden, theirs):
    """Losses, gradients and parameters of a norm and an MLP on token shards, some steps of SGD."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel, SequenceParallel,
                                                   parallelize_module)

    from tpcourse.layers import ColumnParallelLinear, LayerNorm, RowParallelLinear

    torch.manual_seed(3)
    kind, group = {"dtype": torch.float64}, mesh["tp"]
    if theirs:
        model = nn.Sequential(nn.LayerNorm(IN, **kind), nn.Linear(IN, hidden, **kind), nn.Tanh(),
                              nn.Linear(hidden, IN, **kind))
        parallelize_module(model, group, {
            "0": SequenceParallel(sequence_dim=0), "1": ColwiseParallel(input_layouts=Shard(0)),
            "3": RowwiseParallel(output_layouts=Shard(0))})
    else:
        model = nn.Sequential(LayerNorm(IN, group, sequence_parallel=True, **kind),
                              ColumnParallelLinear(IN, hidden, group, sequence_parallel=True, **kind),
                              nn.Tanh(),
                              RowParallelLinear(hidden, IN, group, sequence_parallel=True, **kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own, seen = x.chunk(mesh.size())[mesh.get_rank()], []
    for _ in range(steps):
        leaf = own.clone().requires_grad_()
        y = model(leaf)
        y.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [y.detach(), leaf.grad]
    seen += [p.detach() for p in model.parameters()]
    seen = [t.to_local() if hasattr(t, "to_local") else t for t in seen]
    return [t.contiguous() for t in seen]


def test_training_against_dtensor(world):
    """ColwiseParallel, RowwiseParallel and SequenceParallel: outputs, input gradients and parameters."""
    p = world.size
    x = torch.randn(2 * p, IN, dtype=torch.float64)
    runs = [world.run(mlp_on_rank, x, 4, HIDDEN[p], theirs) for theirs in (False, True)]
    for ours, theirs in zip(*runs):
        assert_close(ours, theirs)


def test_training_against_the_whole_model(world):
    p = world.size
    x = torch.randn(2 * p, IN, dtype=torch.float64)
    torch.manual_seed(3)
    kind = {"dtype": torch.float64}
    model = nn.Sequential(nn.LayerNorm(IN, **kind), nn.Linear(IN, HIDDEN[p], **kind), nn.Tanh(),
                          nn.Linear(HIDDEN[p], IN, **kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for _ in range(4):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected += [y.detach(), leaf.grad]
    scale, shift, w1, b1, w2, b2 = (p.detach() for p in model.parameters())
    for rank, own in enumerate(world.run(mlp_on_rank, x, 4, HIDDEN[p], False)):
        assert_close(own[:-6], [t.chunk(p)[rank] for t in expected])
        parts = [scale, shift, w1.chunk(p)[rank], b1.chunk(p)[rank], w2.chunk(p, 1)[rank], b2]
        assert_close(own[-6:], parts, check_stride=False)


def test_what_column_then_row_send(world):
    """Forward a gather and a scatter of the stream; backward the same, and the gather again for dW.

    db needs none: dY of all tokens is there. A bias kept back for a later kernel has to send it.
    """

    def on_rank(mesh, hidden, skip_bias_add):
        from tpcourse.layers import ColumnParallelLinear, RowParallelLinear

        enter = ColumnParallelLinear(IN, hidden, mesh["tp"], sequence_parallel=True)
        leave = RowParallelLinear(hidden, IN, mesh["tp"], skip_bias_add=skip_bias_add, sequence_parallel=True)
        with tp.ledger(mesh) as book:
            y = leave(enter(torch.ones(2, IN, requires_grad=True)))
            (sum(y) if skip_bias_add else y).sum().backward()
        return book

    p, stream = world.size, 2 * world.size * IN * 4
    calls = [("all_gather", stream, "forward"), ("reduce_scatter", stream, "forward"),
             ("all_gather", stream, "backward"),  # of dY, the row layer's
             ("all_gather", stream, "backward"),  # of X, again
             ("reduce_scatter", stream, "backward")]
    for skip_bias_add, more in ((False, []), (True, [("all_reduce", IN * 4, "backward")])):
        rows = [Row(op, "tp", p, 1, size, wire_bytes(op, size, p), phase) for op, size, phase in calls + more]
        for book in world.run(on_rank, HIDDEN[p], skip_bias_add):
            assert book == Table(rows if p > 1 else []), book


def test_what_the_embedding_sends(world):
    """Forward one reduce-scatter of Y, backward one all-gather of dY: together one all-reduce."""

    def on_rank(mesh, ids):
        from tpcourse.layers import VocabParallelEmbedding

        layer = VocabParallelEmbedding(WORDS, OUT, mesh["tp"], sequence_parallel=True)
        with tp.ledger(mesh) as book:
            layer(ids).sum().backward()
        return book

    p, size = world.size, 2 * world.size * OUT * 4
    rows = [Row(op, "tp", p, 1, size, wire_bytes(op, size, p), phase)
            for op, phase in (("reduce_scatter", "forward"), ("all_gather", "backward"))]
    for book in world.run(on_rank, torch.arange(2 * p) % WORDS):
        assert book == Table(rows if p > 1 else []), book


def test_tokens_that_do_not_divide(three):
    def on_rank(mesh):
        from tpcourse.layers import RowParallelLinear, VocabParallelEmbedding

        row = RowParallelLinear(9, OUT, mesh["tp"], sequence_parallel=True)
        embedding = VocabParallelEmbedding(WORDS, OUT, mesh["tp"], sequence_parallel=True)
        texts = []
        for attempt in (lambda: row(torch.ones(7, 2, 3)), lambda: row(torch.ones(3)),
                        lambda: embedding(torch.arange(4)), lambda: embedding(torch.tensor(1))):
            try:
                attempt()
            except ValueError as error:
                texts.append(str(error))
        return texts

    over, way = "is not divisible by the 3 ranks of mesh dimension 'tp'", "add one in front"
    none = "sequence_parallel splits the tokens of [tokens, ..., features], and a shape of"
    for texts in three.run(on_rank):
        assert texts == [
            f"with sequence_parallel, a first dimension of 7 tokens {over}; pad to 9 or use 1 or 7 ranks",
            f"{none} (3,) has no dimension for them; {way}",
            f"with sequence_parallel, a first dimension of 4 tokens {over}; pad to 6 or use 2 or 4 ranks",
            f"{none} (3,) has no dimension for them; {way}"]
