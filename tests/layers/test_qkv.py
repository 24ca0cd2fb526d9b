"""QKVParallelLinear against nn.Linear: heads over ranks, grouped queries, copies of a KV head."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.testing._internal.distributed.fake_pg import FakeStore

import tpcourse as tp
from tpcourse.measure import Row, Table, wire_bytes

IN, HEAD_DIM = 5, 3
HEADS = {  # for each number of ranks: query heads, KV heads
    1: [(1, 1), (3, 1), (4, 2), (6, 3)], 2: [(2, 2), (2, 1), (8, 4), (6, 2)],
    3: [(3, 3), (3, 1), (6, 6), (9, 3)], 4: [(4, 4), (4, 2), (4, 1), (8, 2)]}


def strided(x):
    return torch.stack([x, -x], -1)[..., 0]


def same(layer):
    return layer


def not_summed(layer):
    layer.copies = None
    return layer


def own_rows(whole, heads, kv, p, rank):
    """This rank's rows of a whole weight, bias or result: its queries, its keys, its values."""
    q, k, v = whole.split([heads * HEAD_DIM, kv * HEAD_DIM, kv * HEAD_DIM])
    if kv >= p:
        return torch.cat([block.chunk(p)[rank] for block in (q, k, v)])
    mine = rank * kv // p
    return torch.cat([q.chunk(p)[rank], k.chunk(kv)[mine], v.chunk(kv)[mine]])


def spread(parts, heads, kv, p):
    """The gradient of a whole result whose ranks have these gradients: those of copies add up."""
    total = parts[0].new_zeros(*parts[0].shape[:-1], (heads + 2 * kv) * HEAD_DIM)
    places = torch.arange(total.size(-1))
    for rank, part in enumerate(parts):
        total.index_add_(-1, own_rows(places, heads, kv, p, rank), part)
    return total


def on_rank(mesh, x, grads, heads, kv, bias, sequence_parallel, change, spoil):
    from tpcourse.layers import QKVParallelLinear

    torch.manual_seed(3)
    layer = spoil(QKVParallelLinear(IN, HEAD_DIM, heads, kv, mesh["tp"], bias, dtype=torch.float64,
                                    sequence_parallel=sequence_parallel))
    x = x.chunk(mesh.size())[mesh.get_rank()] if sequence_parallel else x
    x = change(x).requires_grad_()
    y = layer(x)
    y.backward(change(grads[mesh.get_rank()]))
    return y.detach(), x.grad, {n: (p.detach(), p.grad) for n, p in layer.named_parameters()}


def check(world, heads, kv, bias=True, sequence_parallel=False, change=torch.clone, spoil=same):
    p = world.size
    torch.manual_seed(3)
    whole = nn.Linear(IN, (heads + 2 * kv) * HEAD_DIM, bias, dtype=torch.float64)
    x = torch.randn(2 * p, 1, IN, dtype=torch.float64, requires_grad=True)
    width = (heads // p + 2 * max(1, kv // p)) * HEAD_DIM
    grads = list(torch.randn(p, 2 * p, 1, width, dtype=torch.float64))  # copies of a head get different ones
    y = whole(x)
    y.backward(spread(grads, heads, kv, p))
    args = x.detach(), grads, heads, kv, bias, sequence_parallel, change, spoil
    for rank, (own_y, dx, own) in enumerate(world.run(on_rank, *args)):
        assert_close(own_y, own_rows(y.detach().movedim(-1, 0), heads, kv, p, rank).movedim(0, -1),
                     check_stride=False)
        assert_close(dx, x.grad.chunk(p)[rank] if sequence_parallel else x.grad, check_stride=False)
        assert len(own) == 1 + bias
        for name, parameter in whole.named_parameters():
            assert torch.equal(own[name][0], own_rows(parameter.detach(), heads, kv, p, rank))
            assert_close(own[name][1], own_rows(parameter.grad, heads, kv, p, rank))


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "tokens"])
@pytest.mark.parametrize("change", [torch.clone, strided], ids=["contiguous", "strided"])
def test_heads_against_the_whole_layer(world, case, bias, sequence_parallel, change):
    check(world, *HEADS[world.size][case], bias, sequence_parallel, change)


@pytest.mark.parametrize("kv", [1, 2])
@pytest.mark.parametrize("spoil", [copy.deepcopy, same], ids=["deep copy", "itself"])
def test_a_deep_copy_still_sums_the_copies_of_a_head(four, kv, spoil):
    check(four, 4, kv, spoil=spoil)


def test_gradients_of_copies_left_unsummed_are_seen(four):
    check(four, 4, 2)
    with pytest.raises(AssertionError, match="not close"):
        check(four, 4, 2, spoil=not_summed)


def test_gradients_of_copies_left_unsummed_by_how_much(four):
    """Each copy has what its own queries gave it; together they are the gradient of the head."""
    x, grads = torch.randn(6, IN, dtype=torch.float64), list(torch.randn(4, 6, 9, dtype=torch.float64))
    args = x, grads, 4, 2, True, False, torch.clone
    right, wrong = four.run(on_rank, *args, same), four.run(on_rank, *args, not_summed)
    for pair in ((0, 1), (2, 3)):
        parts = [wrong[rank][2]["weight"][1][3:] for rank in pair]
        assert (parts[0] - parts[1]).abs().max() > 1e-3
        for rank in pair:
            assert_close(right[rank][2]["weight"][1][3:], sum(parts))
            assert_close(right[rank][2]["weight"][1][:3], wrong[rank][2]["weight"][1][:3])  # queries


def train(mesh, x, steps, spoil):
    """Keys and values after some steps of SGD, where each rank uses the shared head in its own way."""
    from tpcourse.layers import QKVParallelLinear

    torch.manual_seed(3)
    layer = spoil(QKVParallelLinear(IN, HEAD_DIM, 4, 2, mesh["tp"], dtype=torch.float64))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        q, k, v = layer(x).split(HEAD_DIM, -1)
        (q * k + v).square().sum().backward()
        optimizer.step()
    return layer.weight.detach(), layer.bias.detach()


def whole_train(x, steps):
    torch.manual_seed(3)
    layer = nn.Linear(IN, 8 * HEAD_DIM, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        q, k, v = (t.unflatten(-1, (-1, HEAD_DIM)) for t in layer(x).split([12, 6, 6], -1))
        k, v = (t.repeat_interleave(2, -2) for t in (k, v))
        (q * k + v).square().sum().backward()
        optimizer.step()
    return layer.weight.detach(), layer.bias.detach()


def test_training(four):
    """Four steps: the parts stay those of the whole layer, and unsummed copies of one head drift apart."""
    x = torch.randn(3, IN, dtype=torch.float64) / 3
    whole = whole_train(x, 4)
    for rank, own in enumerate(four.run(train, x, 4, same)):
        assert_close(list(own), [own_rows(t, 4, 2, 4, rank) for t in whole])
    wrong = [weight[3:] for weight, _ in four.run(train, x, 4, not_summed)]
    assert (wrong[0] - wrong[1]).abs().max() > 1e-3 and (wrong[2] - wrong[3]).abs().max() > 1e-3


def test_what_it_sends(four):
    """Beside dX's all-reduce, one of K's and V's rows and one of their bias, over the ranks with a copy."""

    def on_rank(mesh):
        from tpcourse.layers import QKVParallelLinear

        layer = QKVParallelLinear(IN, HEAD_DIM, 4, 2, mesh["tp"])
        with tp.ledger(mesh) as book:
            layer(torch.ones(7, IN, requires_grad=True)).sum().backward()
        return book

    kv = 2 * HEAD_DIM * 4
    rows = [Row("all_reduce", dim, p, 1, size, wire_bytes("all_reduce", size, p), "backward")
            for dim, p, size in (("tp", 4, 7 * IN * 4), ("kv_copies", 2, kv * IN), ("kv_copies", 2, kv))]
    for book in four.run(on_rank):
        assert book == Table(rows), book


def test_frozen_copies_send_nothing(four):
    def on_rank(mesh):
        from tpcourse.layers import QKVParallelLinear

        layer = QKVParallelLinear(IN, HEAD_DIM, 4, 2, mesh["tp"]).requires_grad_(False)
        with tp.ledger(mesh) as book, tp.saved_activations() as mem:
            layer(torch.ones(7, IN, requires_grad=True)).sum().backward()
        return [row.dim for row in book.rows], mem.bytes

    assert four.run(on_rank) == [(["tp"], 0)] * 4


def test_on_one_dimension_of_a_mesh(square):
    """The ranks of a head are those along tp, whatever their place along dp."""

    def on_rank(mesh):
        import torch.distributed as dist

        from tpcourse.layers import QKVParallelLinear

        layer = QKVParallelLinear(IN, HEAD_DIM, 2, 1, mesh["tp"])
        return dist.get_process_group_ranks(layer.copies.get_group())

    assert square.run(on_rank) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_process_group_does_too(two):
    def on_rank(mesh):
        from tpcourse.layers import QKVParallelLinear

        group = mesh["tp"].get_group()
        layer = QKVParallelLinear(IN, HEAD_DIM, 2, 1, group)
        layer(torch.ones(1, IN)).sum().backward()
        timeouts = [g._get_backend(torch.device("cpu")).options._timeout for g in (group, layer.copies)]
        return layer.copies.size(), timeouts[0] == timeouts[1]

    assert two.run(on_rank) == [(2, True)] * 2


def test_on_a_fake_group():
    """128 ranks over 8 KV heads: 16 copies of each."""
    import torch.distributed as dist

    from tpcourse.layers import QKVParallelLinear

    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=17, world_size=128)
    try:
        mesh = dist.init_device_mesh("cpu", (128,), mesh_dim_names=("tp",))
        with torch.device("meta"):
            layer = QKVParallelLinear(16384, 128, 128, 8, mesh["tp"], bias=False)
            with tp.ledger(mesh) as book:
                layer(torch.empty(2, 16384, requires_grad=True)).sum().backward()
        assert dist.get_process_group_ranks(layer.copies.get_group()) == list(range(16, 32))
        assert [(row.dim, row.group_size) for row in book.calls] == [("tp", 128), ("kv_copies", 16)]
    finally:
        dist.destroy_process_group()


def test_errors_name_both_numbers_and_the_way_out(four):
    def on_rank(mesh):
        from tpcourse.layers import QKVParallelLinear

        texts = []
        for heads, kv in ((6, 2), (8, 3), (12, 6), (4, 0)):
            try:
                QKVParallelLinear(IN, HEAD_DIM, heads, kv, mesh["tp"])
            except ValueError as error:
                texts.append(str(error))
        return texts

    over = "the 4 ranks of mesh dimension 'tp'"
    for texts in four.run(on_rank):
        assert texts == [
            f"num_heads=6 is not divisible by {over}; pad to 8 or use 3 or 6 ranks",
            "num_heads=8 cannot share num_kv_heads=3 evenly; use KV heads whose number divides 8",
            f"num_kv_heads=6 neither divides nor is divided by {over}; use ranks or KV heads of which one "
            "number divides the other",
            "num_heads=4 cannot share num_kv_heads=0 evenly; use KV heads whose number divides 4"]


@pytest.fixture(scope="module")
def four():
    with tp.World(ranks=4) as world:
        yield world
