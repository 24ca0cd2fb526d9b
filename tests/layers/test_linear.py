"""entering_linear against the plain composition, to the bit; what it sends, when, and what it keeps."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing import assert_close
from torch.testing._internal.distributed.fake_pg import FakeStore

import tpcourse as tp
from tpcourse.launch import RanksStuck
from tpcourse.measure import Row, Table, wire_bytes

IN, OUT, TOKENS = 5, 3, 4  # features, this rank's columns, this rank's tokens
SHAPES = [(1, IN), (7, IN), (2, 3, IN)]  # one token, several, a batch of sequences


def plain(x, weight, bias, group, sequence_parallel):
    from tpcourse.comm import all_gather, copy_to_region

    return F.linear(all_gather(x, group, 0) if sequence_parallel else copy_to_region(x, group), weight, bias)


def strided(x):
    return torch.stack([x, -x], -1)[..., 0]


def on_rank(mesh, shape, bias, sequence_parallel, dtype, change, frozen=()):
    """Result and gradients of the layer, and of the plain composition, from this rank's own numbers."""
    from tpcourse.layers import entering_linear

    torch.manual_seed(0)  # X and dY
    if sequence_parallel:
        torch.manual_seed(mesh.get_rank())
    x = torch.randn(shape).to(dtype)
    torch.manual_seed(10 + mesh.get_rank())
    weight, b = torch.randn(OUT, shape[-1]).to(dtype), torch.randn(OUT).to(dtype) if bias else None
    factor = mesh.size() if sequence_parallel else 1
    dy = torch.randn(*([shape[0] * factor, *shape[1:-1]] if len(shape) > 1 else []), OUT).to(dtype)
    outs = []
    for function in (entering_linear, plain):
        leaves = {"x": x.clone(), "weight": weight.clone(), "bias": None if b is None else b.clone()}
        for name, leaf in leaves.items():
            if leaf is not None:
                leaf.requires_grad_(name not in frozen)
        y = function(change(leaves["x"]), leaves["weight"], leaves["bias"], mesh["tp"], sequence_parallel)
        if y.requires_grad:
            y.backward(change(dy))
        outs.append([y.detach(), *(None if leaf is None else leaf.grad for leaf in leaves.values())])
    return outs


def equal(ours, theirs):
    return all(a is b is None or a is not None and b is not None and torch.equal(a, b)
               for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shape, sequence_parallel", [(shape, False) for shape in SHAPES + [(IN,)]]
                         + [(shape, True) for shape in SHAPES], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", [torch.clone, strided], ids=["contiguous", "strided"])
def test_to_the_bit_the_plain_composition(world, shape, bias, sequence_parallel, dtype, change):
    for ours, theirs in world.run(on_rank, shape, bias, sequence_parallel, dtype, change):
        assert equal(ours, theirs)


@pytest.mark.parametrize("frozen", [["x"], ["weight"], ["bias"], ["x", "weight"], ["x", "weight", "bias"]],
                         ids="-".join)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "tokens"])
def test_frozen_tensors(three, frozen, sequence_parallel):
    args = (7, IN), True, sequence_parallel, torch.float64, torch.clone, frozen
    for ours, theirs in three.run(on_rank, *args):
        assert equal(ours, theirs)
        assert [name for name, grad in zip(("x", "weight", "bias"), ours[1:]) if grad is None] == frozen


def a_step(mesh, device, sequence_parallel, frozen=(), size=IN):
    """The books of one step: what was sent, what was kept; and what was called in backward, in order."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from tpcourse.layers import entering_linear

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    kind = {"dtype": torch.float64, "device": device}
    leaves = {"x": torch.ones(TOKENS, size, **kind), "weight": torch.ones(OUT, size, **kind),
              "bias": torch.ones(OUT, **kind)}
    x, weight, bias = (leaf.requires_grad_(name not in frozen) for name, leaf in leaves.items())
    names = []
    with tp.ledger(mesh) as book, tp.saved_activations() as mem:
        weight = torch.nn.Parameter(weight, weight.requires_grad)
        y = entering_linear(x, weight, bias, mesh["tp"], sequence_parallel)
        loss = y.sum()
        with Calls():
            loss.backward()
    return book, mem.bytes, names


def expected_rows(p, sequence_parallel, frozen):
    """One message of the whole X each: gathered forward and, for dW, again; dX summed, whole or scattered."""
    size = TOKENS * IN * 8 * (p if sequence_parallel else 1)
    calls = [("all_gather", "forward")] if sequence_parallel else []
    calls += [("all_gather", "backward")] if sequence_parallel and "weight" not in frozen else []
    if "x" not in frozen:
        calls.append(("reduce_scatter" if sequence_parallel else "all_reduce", "backward"))
    return [Row(op, "tp", p, 1, size, wire_bytes(op, size, p), phase) for op, phase in calls]


@pytest.mark.parametrize("frozen", [[], ["x"], ["weight"], ["x", "weight"]], ids="-".join)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "tokens"])
def test_what_it_sends_and_keeps(world, sequence_parallel, frozen):
    """A frozen W keeps no X, and gathers none for dW; of a split X only this rank's tokens are kept."""
    kept = 0 if "weight" in frozen else TOKENS * IN * 8
    for book, kept_bytes, _ in world.run(a_step, "cpu", sequence_parallel, frozen):
        rows = expected_rows(world.size, sequence_parallel, frozen) if world.size > 1 else []
        assert book == Table(rows), book
        assert kept_bytes == kept


@pytest.mark.parametrize("sequence_parallel, order", [
    (False, ["aten::mm", "c10d::allreduce_", "aten::mm", "aten::sum"]),
    (True, ["c10d::_allgather_base_", "aten::mm", "c10d::_reduce_scatter_base_", "aten::mm", "aten::sum"])])
def test_messages_are_under_way_while_the_products_are_computed(two, sequence_parallel, order):
    """The gather runs beside dX = dY W, and the sum of dX beside dW and db."""
    for _, _, names in two.run(a_step, "cpu", sequence_parallel):
        assert [name for name in names if name in order] == order


def works(mesh, sequence_parallel):
    """How many messages were waited for in a step."""
    from unittest import mock

    from tpcourse.layers import entering_linear

    waited = []
    wait = dist.Work.wait
    with mock.patch.object(dist.Work, "wait", lambda work: waited.append(1) or wait(work)):
        x, weight = torch.ones(TOKENS, IN, requires_grad=True), torch.ones(OUT, IN, requires_grad=True)
        entering_linear(x, weight, None, mesh["tp"], sequence_parallel).sum().backward()
    return len(waited)


def test_all_messages_are_waited_for(two):
    assert two.run(works, False) == [1, 1]
    assert two.run(works, True) == [3, 3]  # two in backward; one in forward, where torch itself waits


def test_meta_tensors_give_the_books_of_real_ranks(two):
    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for sequence_parallel in (False, True):
            book, kept, names = two.run(a_step, "cpu", sequence_parallel)[0]
            dry_book, dry_kept, _ = a_step(mesh, "meta", sequence_parallel)
            assert dry_book.calls == book.calls and len(book.calls) == 1 + 2 * sequence_parallel
            assert dry_kept == kept
    finally:
        dist.destroy_process_group()


def test_a_rank_that_stays_away_from_the_sum_is_named():
    """The launcher sees the call that was started, and the line at which a rank waits for it."""

    def on_rank(mesh):
        from tpcourse.layers import entering_linear

        x = torch.ones(TOKENS, IN, requires_grad=True)
        y = entering_linear(x, torch.ones(OUT, IN, requires_grad=True), None, mesh["tp"])
        if mesh.get_rank() != 1:
            y.sum().backward()

    with pytest.raises(RanksStuck, match=r"rank 0 waits in all_reduce\(SUM\) for rank 1"):
        tp.spawn(on_rank, ranks=2, timeout=20)


def test_gradients_of_gradients_are_refused(two):
    """The sum of dX is not differentiable again, so that asking for it raises instead of leaving it out."""

    def on_rank(mesh):
        from tpcourse.layers import entering_linear

        x = torch.ones(TOKENS, IN, requires_grad=True)
        y = entering_linear(x, torch.ones(OUT, IN, requires_grad=True), None, mesh["tp"])
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        try:
            dx.sum().backward()
        except RuntimeError as error:
            return str(error)

    assert all("once_differentiable" in text for text in two.run(on_rank))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "tokens"])
def test_autocast(world, sequence_parallel):
    """In float32 with a product in bfloat16, as F.linear computes it under autocast: the same, to the bit."""

    def on_rank(mesh):
        from tpcourse.layers import entering_linear

        outs = []
        for function in (entering_linear, plain):
            torch.manual_seed(5)
            x, weight, bias = (torch.randn(s, requires_grad=True) for s in ((TOKENS, IN), (OUT, IN), (OUT,)))
            with torch.autocast("cpu", torch.bfloat16):
                y = function(x, weight, bias, mesh["tp"], sequence_parallel)
            y.float().square().sum().backward()
            outs.append([y.detach(), x.grad, weight.grad, bias.grad])
        return outs

    for (y, *grads), (plain_y, *plain_grads) in world.run(on_rank):
        assert y.dtype == torch.bfloat16 and torch.equal(y, plain_y)
        assert all(grad.dtype == torch.float32 for grad in grads)
        assert_close(grads, plain_grads, rtol=0.02, atol=0.05)  # the plain one sums in float32


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "tokens"])
def test_a_region_ends_in_the_dtype_of_autocast(world, sequence_parallel):
    """As nn.Linear does: the bias does not widen the sum."""
    def on_rank(mesh):
        from tpcourse.layers import RowParallelLinear

        layer = RowParallelLinear(12, 5, mesh["tp"], sequence_parallel=sequence_parallel)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(torch.randn(12, 12 // mesh.size(), requires_grad=True))
        y.float().sum().backward()
        return y.dtype, layer.bias.grad

    for dtype, db in world.run(on_rank):
        assert dtype == torch.bfloat16 and torch.equal(db, torch.full((5,), 12.0))


def test_tokens_need_a_dimension(two):
    def on_rank(mesh):
        from tpcourse.layers import entering_linear

        try:
            entering_linear(torch.ones(IN), torch.ones(OUT, IN), None, mesh["tp"], True)
        except ValueError as error:
            return str(error)

    text = ("sequence_parallel splits the tokens of [tokens, ..., features], and a shape of (5,) has no "
            "dimension for them; add one in front")
    assert two.run(on_rank) == [text] * 2
