"""All parallel layers in one model, trained: embedding, columns, rows, a head with padding, the loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.comm import split_sizes
from tpcourse.measure import Row, Table, wire_bytes

WORDS, PADDED, DIM, HIDDEN, STEPS = 11, 12, 5, 12, 5
IDS = torch.tensor([[1, 0, 10, 4, 7], [5, 2, 0, 9, 3], [8, 6, 1, 1, 0]])
TARGETS = torch.tensor([[0, 10, 4, 7, -100], [2, 0, 9, 3, -100], [6, 1, 1, -100, -100]])


def whole_model():
    torch.manual_seed(3)
    kind = {"dtype": torch.float64}
    return nn.ModuleList([nn.Embedding(WORDS, DIM, padding_idx=0, **kind), nn.Linear(DIM, HIDDEN, **kind),
                          nn.Linear(HIDDEN, DIM, **kind), nn.Linear(DIM, PADDED, **kind)])


def whole_loss(logits):
    return F.cross_entropy(logits.flatten(0, 1)[:, :WORDS], TARGETS.flatten(), label_smoothing=0.1)


def train(model, loss_of):
    """The loss of every step of SGD with momentum on a block with a residual, and the parameters after."""
    embedding, enter, leave, head = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = embedding(IDS)
        loss = loss_of(head(x + leave(enter(x).tanh())))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def train_on_rank(mesh, wrong):
    from unittest import mock

    from tpcourse.layers import (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding,
                                 vocab_parallel_cross_entropy)

    def loss_of(logits):
        return vocab_parallel_cross_entropy(logits, TARGETS, group, WORDS, padded_vocab_size=PADDED,
                                            label_smoothing=0.1)

    torch.manual_seed(3)
    group, kind = mesh["tp"], {"dtype": torch.float64}
    model = nn.ModuleList([VocabParallelEmbedding(WORDS, DIM, group, padding_idx=0, **kind),
                           ColumnParallelLinear(DIM, HIDDEN, group, **kind),
                           RowParallelLinear(HIDDEN, DIM, group, **kind),
                           ColumnParallelLinear(DIM, PADDED, group, **kind)])
    with mock.patch(*wrong) if wrong else mock.MagicMock(), tp.ledger(mesh) as book:
        return *train(model, loss_of), book


def check(world, wrong=None):
    losses, (table, w1, b1, w2, b2, w3, b3) = train(whole_model(), whole_loss)
    assert losses[-1] < losses[0] - 0.1  # it learns, so that gradients that are off would show
    p = world.size
    parts = zip(table.split(split_sizes(WORDS, p)), w1.chunk(p), b1.chunk(p), w2.chunk(p, 1), [b2] * p,
                w3.chunk(p), b3.chunk(p))
    for (own_losses, parameters, _), expected in zip(world.run(train_on_rank, wrong), parts):
        assert_close(own_losses, losses)
        assert_close(parameters, list(expected), check_stride=False)


def test_training(world):
    """Every rank sees the losses of the whole model, and ends with its part of the model's parameters."""
    check(world)


def thrice_backward(x, group):
    from tpcourse import comm

    return comm.all_reduce(x, group)


@pytest.mark.parametrize("module", ["embedding", "linear", "loss"])
def test_the_wrong_conjugate_trains_another_model(three, module):
    with pytest.raises(AssertionError, match="not close"):
        check(three, (f"tpcourse.layers.{module}.reduce_from_region", thrice_backward))


def test_what_a_step_sends(world):
    """Embedding and row layer one all-reduce each, the loss two, and each column layer's backward one."""
    p, tokens = world.size, IDS.numel()
    stream = tokens * DIM * 8
    sizes = {"forward": [stream, stream, tokens * 8, 3 * tokens * 8], "backward": [stream, stream]}
    rows = [Row("all_reduce", "tp", p, STEPS, STEPS * size, STEPS * wire_bytes("all_reduce", size, p), phase)
            for phase in sizes for size in sizes[phase]]
    for *_, book in world.run(train_on_rank, None):
        assert book == Table(rows if p > 1 else []), book
