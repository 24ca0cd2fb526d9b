"""VocabParallelHead against nn.Linear, alone and tied to the embedding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.comm import split_sizes
from tpcourse.measure import Row, Table, wire_bytes

WORDS, DIM = 11, 3  # uneven on 2, 3 and 4 ranks
SHAPES = [(1,), (3, 1), (2, 3)]  # a first dimension of so many tokens a rank, and what follows it


def strided(x):
    return torch.stack([x, -x], -1)[..., 0]


def on_rank(mesh, x, grads, sequence_parallel, change):
    from tpcourse.layers import VocabParallelHead

    torch.manual_seed(3)
    layer = VocabParallelHead(DIM, WORDS, mesh["tp"], sequence_parallel=sequence_parallel,
                              dtype=torch.float64)
    x = x.chunk(mesh.size())[mesh.get_rank()] if sequence_parallel else x
    x = change(x).requires_grad_()
    logits = layer(x)
    logits.backward(grads[mesh.get_rank()])
    return logits.detach(), x.grad, layer.weight.detach(), layer.weight.grad, torch.rand(3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "tokens"])
@pytest.mark.parametrize("change", [torch.clone, strided], ids=["contiguous", "strided"])
def test_logits_against_the_whole_layer(world, shape, sequence_parallel, change):
    p, sizes = world.size, split_sizes(WORDS, world.size)
    torch.manual_seed(3)
    whole = nn.Linear(DIM, WORDS, bias=False, dtype=torch.float64)
    after = torch.rand(3)
    x = torch.randn(p * shape[0], *shape[1:], DIM, dtype=torch.float64, requires_grad=True)
    logits = whole(x)
    grad = torch.randn_like(logits)
    logits.backward(grad)
    outs = world.run(on_rank, x.detach(), grad.split(sizes, -1), sequence_parallel, change)
    for rank, (own, dx, weight, dw, drawn) in enumerate(outs):
        assert_close(own, logits.detach().split(sizes, -1)[rank], check_stride=False)
        assert_close(dx, x.grad.chunk(p)[rank] if sequence_parallel else x.grad, check_stride=False)
        assert torch.equal(weight, whole.weight.detach().split(sizes)[rank])
        assert_close(dw, whole.weight.grad.split(sizes)[rank])
        assert torch.equal(drawn, after)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "tokens"])
def test_what_it_sends(world, sequence_parallel):
    def on_rank(mesh):
        from tpcourse.layers import VocabParallelHead

        layer = VocabParallelHead(DIM, WORDS, mesh["tp"], sequence_parallel=sequence_parallel)
        with tp.ledger(mesh) as book:
            layer(torch.ones(2, DIM, requires_grad=True)).sum().backward()
        return book

    p = world.size
    size = 2 * DIM * 4 * (p if sequence_parallel else 1)
    calls = [("all_reduce", "backward")]
    if sequence_parallel:
        calls = [("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")]
    rows = [Row(op, "tp", p, 1, size, wire_bytes(op, size, p), phase) for op, phase in calls]
    for book in world.run(on_rank):
        assert book == Table(rows if p > 1 else []), book


IDS = torch.tensor([1, 0, 10, 4, 7, 5, 2, 0, 9, 3, 8, 6])
TARGETS = torch.tensor([0, 10, 4, 7, 5, 2, 0, 9, 3, 8, 6, 1])
STEPS = 4


def train(model, loss_of):
    """The loss of every step of SGD with momentum."""
    embedding, head = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(head(embedding(IDS).sin()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_tied(mesh, sequence_parallel, copied):
    from tpcourse.layers import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_cross_entropy

    torch.manual_seed(3)
    options = {"sequence_parallel": sequence_parallel, "dtype": torch.float64}
    group = mesh["tp"]
    embedding = VocabParallelEmbedding(WORDS, DIM, group, **options)
    weight = nn.Parameter(embedding.weight.detach().clone()) if copied else embedding.weight
    head = VocabParallelHead(DIM, WORDS, group, weight=weight, **options)
    assert copied or head.weight is embedding.weight
    model = nn.ModuleList([embedding, head])
    losses = train(model, lambda logits: vocab_parallel_cross_entropy(logits, TARGETS, group, WORDS))
    return losses, embedding.weight.detach(), head.weight.detach(), torch.rand(3)


def whole_run():
    """The dense tied model as it is usually written: the head draws a weight, and gives it up."""
    torch.manual_seed(3)
    embedding = nn.Embedding(WORDS, DIM, dtype=torch.float64)
    head = nn.Linear(DIM, WORDS, bias=False, dtype=torch.float64)
    head.weight = embedding.weight
    model = nn.ModuleList([embedding, head])
    losses = train(model, lambda logits: F.cross_entropy(logits, TARGETS))
    return losses, embedding.weight.detach(), torch.rand(3)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "tokens"])
def test_a_tied_head_trains_as_the_dense_one(world, sequence_parallel):
    """One parameter, two uses: its gradient is the sum of both, and there is nothing that could drift."""
    losses, table, after = whole_run()
    rows = table.split(split_sizes(WORDS, world.size))
    for rank, (own, embedding, head, drawn) in enumerate(world.run(train_tied, sequence_parallel, False)):
        assert_close(own, losses)
        assert_close(embedding, rows[rank])
        assert torch.equal(head, embedding) and torch.equal(drawn, after)


def test_a_copied_head_drifts_apart(three):
    """Each copy gets the gradient of its own use alone, and after some steps it is another model."""
    losses, table, _ = whole_run()
    rows = table.split(split_sizes(WORDS, 3))
    for rank, (own, embedding, head, _) in enumerate(three.run(train_tied, False, True)):
        assert own[0] == pytest.approx(losses[0])
        assert abs(own[-1] - losses[-1]) > 1e-3
        assert (embedding - head).abs().max() > 1e-2 and (embedding - rows[rank]).abs().max() > 1e-3


def test_errors_name_both_numbers_and_the_way_out(three):
    def on_rank(mesh):
        from tpcourse.layers import VocabParallelHead

        texts = []
        for words, weight in ((2, None), (WORDS, nn.Parameter(torch.ones(WORDS, DIM)))):
            try:
                VocabParallelHead(DIM, words, mesh["tp"], weight=weight)
            except ValueError as error:
                texts.append(str(error))
        return texts

    over = "the 3 ranks of mesh dimension 'tp'"
    for rank, texts in enumerate(three.run(on_rank)):
        assert texts == [
            f"vocab_size=2 is less than {over}, and each needs an entry; pad to 3 or use at most 2 ranks",
            f"weight has shape (11, 3), not ({4 - (rank == 2)}, 3) as this rank's part over {over}; pass "
            "that part of the weight to share"]
