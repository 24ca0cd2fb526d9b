"""Recomputation: the masks of the first run again, the same gradients to the bit, what is kept and sent."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import tpcourse as tp
from tpcourse.comm import RandomStates
from tpcourse.layers import Dropout, recompute
from tpcourse.measure import Row, Table, wire_bytes

TOKENS, DIM, HIDDEN = 5, 6, 12
P = 0.3


def plain_checkpoint(function, *args, random):
    return checkpoint(function, *args, use_reentrant=False)


def run_again(function, *args, random):
    return recompute(function, *args, random=random)


def keep_all(function, *args, random):
    return function(*args)


def on_rank(mesh, x, grad, runs):
    """Two blocks, each with dropout of shards and of copies: result, gradients, the streams' next numbers."""
    from tpcourse.comm import RandomStates
    from tpcourse.layers import ColumnParallelLinear, Dropout, RowParallelLinear

    torch.manual_seed(3)
    group, random = mesh["tp"], RandomStates(3, mesh["tp"])
    blocks = [torch.nn.Sequential(ColumnParallelLinear(DIM, HIDDEN, group, dtype=torch.float64),
                                  torch.nn.GELU(), Dropout(P, random, sharded=True),
                                  RowParallelLinear(HIDDEN, DIM, group, dtype=torch.float64),
                                  Dropout(P, random, sharded=False), torch.nn.Tanh()) for _ in range(2)]
    x = x.clone().requires_grad_()
    y = x
    for block in blocks:
        y = runs(block, y, random=random)
    y.backward(grad)
    grads = [p.grad for block in blocks for p in block.parameters()]
    after = [torch.rand(3, generator=g) for g in (random.replicated, random.sharded)]
    return [y.detach(), x.grad, *grads, *after]


def both(world, runs):
    """What each rank has with `runs`, and without recomputation."""
    x, grad = torch.randn(2, TOKENS, DIM, dtype=torch.float64)
    return zip(world.run(on_rank, x, grad, runs), world.run(on_rank, x, grad, keep_all))


def test_the_same_to_the_bit_as_without(world):
    """Outputs, all gradients, and where both streams stand afterwards."""
    for again, once in both(world, run_again):
        assert all(map(torch.equal, again, once))


def test_a_plain_checkpoint_draws_new_masks(three):
    """torch restores its own stream and no others: right outputs, wrong gradients, and streams too far on."""
    for again, once in both(three, plain_checkpoint):
        assert torch.equal(again[0], once[0])
        assert not torch.isclose(again[1], once[1]).any()
        assert not any(map(torch.equal, again[-2:], once[-2:]))


@pytest.mark.parametrize("sharded", [True, False])
def test_which_mask_a_gradient_has(sharded):
    """With a plain checkpoint the second one drawn; with ours the first, however often backward runs."""
    random = RandomStates(3, None)
    dropout, x = Dropout(P, random, sharded), torch.ones(50, dtype=torch.float64, requires_grad=True)
    state = random.get_state()
    first, second = (dropout(x).detach() for _ in range(2))
    assert not torch.equal(first, second)
    for runs, mask in ((plain_checkpoint, second), (run_again, first)):
        random.set_state(state)
        y = runs(dropout, x, random=random)
        assert torch.equal(y, first)
        grads = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2)]
        assert torch.equal(grads[0], mask)
        assert torch.equal(grads[1], grads[0]) == (runs is run_again)


def test_streams_stand_where_they_stood_if_the_second_run_fails():
    random, runs = RandomStates(3, None), []
    dropout = Dropout(P, random, sharded=True)

    def fails_again(x):
        runs.append(dropout(x))
        if len(runs) == 2:
            raise ArithmeticError
        return runs[0].sin()

    y = recompute(fails_again, torch.ones(5, requires_grad=True), random=random)
    before = random.get_state()
    with pytest.raises(ArithmeticError):
        y.sum().backward()
    assert all(map(torch.equal, random.get_state(), before))


def test_one_within_another():
    """A block that is recomputed whole, with a part that is recomputed anyway."""

    def grad(runs):
        random = RandomStates(3, None)
        dropout, x = Dropout(P, random, sharded=True), torch.linspace(0, 1, 50).requires_grad_()

        def inner(x):
            return dropout(x.sin()).cos()

        def outer(x):
            return dropout(runs(inner, dropout(x), random=random).sin())

        runs(outer, x, random=random).square().sum().backward()
        return x.grad

    assert torch.equal(grad(run_again), grad(keep_all))
    assert not torch.isclose(grad(plain_checkpoint), grad(keep_all)).all()


def test_torch_s_own_dropout_needs_no_streams():
    def grad(runs):
        torch.manual_seed(3)
        x = torch.ones(50, requires_grad=True)
        y = runs(torch.nn.Dropout(P), x)
        torch.rand(5)
        y.square().sum().backward()
        return x.grad

    assert_close(grad(recompute), grad(lambda function, x: function(x)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_keeps_the_arguments_alone(device):
    with torch.device(device), tp.saved_activations() as mem:
        random = RandomStates(3, None)
        dropout = Dropout(P, random, sharded=True)
        x, w = torch.randn(TOKENS, DIM, requires_grad=True), torch.randn(DIM, HIDDEN, requires_grad=True)
        recompute(lambda x, w: dropout((x @ w).sin()).cos(), x, w, random=random).sum().backward()
    assert mem.bytes == (TOKENS * DIM + DIM * HIDDEN) * 4


@pytest.mark.parametrize("ends_with_the_sum", [True, False])
def test_what_it_sends_again(world, ends_with_the_sum):
    """The row layer's all-reduce once more, unless it is the end: then the second run stops before it."""

    def counted(mesh, ends_with_the_sum):
        from tpcourse.layers import ColumnParallelLinear, RowParallelLinear

        block = [ColumnParallelLinear(DIM, HIDDEN, mesh["tp"]), RowParallelLinear(HIDDEN, DIM, mesh["tp"])]
        block += [] if ends_with_the_sum else [torch.nn.Tanh(), torch.nn.Linear(DIM, DIM)]
        with tp.ledger(mesh) as book:
            y = recompute(torch.nn.Sequential(*block), torch.ones(TOKENS, DIM, requires_grad=True))
            y.sum().backward()
        return book

    p, size = world.size, TOKENS * DIM * 4
    phases = ["forward", "backward"] + ([] if ends_with_the_sum else ["recomputation"])
    rows = [Row("all_reduce", "tp", p, 1, size, wire_bytes("all_reduce", size, p), phase) for phase in phases]
    for book in world.run(counted, ends_with_the_sum):
        assert book == Table(rows if p > 1 else []), book


def block_on_rank(mesh, xs, grads, sequence_parallel, dropout, recompute):
    """A layer of the course's model: what it gives, all gradients, and its traffic."""
    from tpcourse.models import Block
    from tpcourse.schemes import OneD

    torch.manual_seed(3)
    scheme = OneD(mesh["tp"], sequence_parallel)
    block = Block(scheme, 12, 6, 3, rotary=True, dropout=dropout, recompute=recompute).double()
    x = xs[mesh.get_rank()].clone().requires_grad_()
    with tp.ledger(mesh) as book:
        y = block(x, 3)
        y.backward(grads[mesh.get_rank()])
    return [y.detach(), x.grad, *(p.grad for p in block.parameters())], book


RESENT = {  # sequence_parallel, dropout: the collectives that full recomputation sends again
    (False, 0.0): {"all_reduce": 1},  # attention's; the MLP's is the end
    (False, P): {"all_reduce": 2},  # after the MLP's comes a mask that backward needs
    (True, 0.0): {"all_gather": 2, "reduce_scatter": 1},
    (True, P): {"all_gather": 2, "reduce_scatter": 2},
}


@pytest.mark.parametrize("sequence_parallel, dropout", RESENT)
def test_a_transformer_layer(three, sequence_parallel, dropout):
    """Selective and full give what none gives, to the bit; selective sends nothing again."""
    x, grad = torch.randn(2, 6, 12, dtype=torch.float64)
    parts = [t.chunk(3) if sequence_parallel else [t] * 3 for t in (x, grad)]
    once, selective, full = (three.run(block_on_rank, *parts, sequence_parallel, dropout, recompute)
                             for recompute in ("none", "selective", "full"))
    for (tensors, book), (some, same_book), (all_again, more) in zip(once, selective, full):
        assert all(map(torch.equal, some, tensors)) and all(map(torch.equal, all_again, tensors))
        assert same_book == book and not book.total("calls", phase="recomputation")
        assert {row.op: row.calls for row in (more - book).rows} == RESENT[sequence_parallel, dropout]
        assert {row.phase for row in (more - book).rows} == {"recomputation"}
