"""Every collective and its conjugate, on real ranks, against one process that sees all ranks as one graph."""

import pytest
import torch
from comm_reference import Case, all_cases, exchange, plain_cases, resharding, sharding_cases, uneven
from torch.testing import assert_close

from tpcourse.comm import split_sizes

DIMS = [0, 1, 2, -1, -2, -3]
LAYOUTS = ["contiguous", "transposed", "sliced", "mixed"]  # mixed: not the same on each rank


def on_ranks(mesh, calls, layout="contiguous", dim="tp"):
    """Each call forward and backward: the result, the input's gradient, and whether x stayed as it was."""
    from tpcourse import comm

    rank, outs = mesh.get_local_rank(dim), []
    how = ["transposed", "contiguous", "sliced"][rank % 3] if layout == "mixed" else layout

    def lay_out(t):  # equal values, other strides
        if how == "transposed":
            return t.transpose(0, -1).contiguous().transpose(0, -1)
        return torch.stack([t, -t], -1)[..., 0] if how == "sliced" else t

    for name, args, xs, grads in calls:
        x = lay_out(xs[rank]).requires_grad_()
        y = getattr(comm, name)(x, mesh[dim], *args[rank])
        y.backward(lay_out(grads[rank]))
        outs.append((y.detach(), x.grad, torch.equal(x.detach(), xs[rank])))
    return outs


def calls_of(cases: list[Case]) -> list[tuple]:
    return [(case.name, case.args, *case.tensors()) for case in cases]


def compare(cases: list[Case], calls: list[tuple], outs: list[list]) -> None:
    """What every rank has, against the reference."""
    for i, (case, (name, _, xs, grads)) in enumerate(zip(cases, calls)):
        ys, x_grads = case.expected(xs, grads)
        for rank, (y, x_grad, untouched) in enumerate(out[i] for out in outs):
            assert_close(y, ys[rank], msg=lambda text: f"{name}, result on rank {rank}: {text}")
            assert_close(x_grad, x_grads[rank], msg=lambda text: f"{name}, gradient on rank {rank}: {text}")
            assert untouched, f"{name} changed its input on rank {rank}"


def check(world, cases: list[Case], layout: str) -> None:
    calls = calls_of(cases)
    compare(cases, calls, world.run(on_ranks, calls, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_without_a_dimension(world, layout):
    check(world, plain_cases(world.size), layout)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_shards(world, dim, layout):
    check(world, sharding_cases(world.size, dim, None), layout)


@pytest.mark.parametrize("dim", DIMS)
def test_uneven_shards(world, dim):
    for sizes in (split_sizes(7, world.size), uneven(world.size)):
        check(world, sharding_cases(world.size, dim, sizes), "mixed")


@pytest.mark.parametrize("split_dim", DIMS[:4])
@pytest.mark.parametrize("concat_dim", DIMS[:4])
def test_all_to_all(world, split_dim, concat_dim):
    p = world.size
    if split_dim % 3 == concat_dim % 3:
        counts = [[(2 * s + r) % 3 for r in range(p)] for s in range(p)]
        cases = [exchange(p, split_dim), exchange(p, split_dim, counts)]
    else:
        cases = [resharding(p, split_dim, concat_dim),
                 resharding(p, split_dim, concat_dim, split_sizes(5, p), uneven(p))]
    check(world, cases, "mixed")


def test_expanded_tensors(world):
    """A row that is stored once and seen many times, as input and as upstream gradient."""

    def on_rank(mesh, rows):
        from tpcourse import comm

        x = rows[mesh.get_rank()].expand(4, 3).requires_grad_()
        y = comm.all_reduce(x, mesh["tp"])
        y.backward(rows[mesh.get_rank()].expand(4, 3))
        return y.detach(), x.grad

    rows = [torch.randn(1, 3, dtype=torch.float64) for _ in range(world.size)]
    for y, grad in world.run(on_rank, rows):
        assert_close(y, sum(rows).expand(4, 3).contiguous())
        assert_close(grad, sum(rows).expand(4, 3).contiguous())


def test_dot_products(world):
    """<A x, y> = <x, A^T y> over all ranks together: the plain names are true adjoints."""
    calls = calls_of([case for case in all_cases(world.size) if not case.copies and not case.used_alike])
    outs = world.run(on_ranks, calls)
    for i, (name, _, xs, ys) in enumerate(calls):
        forward = sum((out[i][0] * y).sum() for out, y in zip(outs, ys))
        backward = sum((out[i][1] * x).sum() for out, x in zip(outs, xs))
        assert_close(forward, backward, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("dim, groups", [("dp", [[0, 2], [1, 3]]), ("tp", [[0, 1], [2, 3]])])
def test_one_dimension_of_a_mesh(square, dim, groups):
    """On a 2 x 2 mesh the two groups of a dimension work side by side, on tensors of their own."""

    def on_own_group(mesh, calls_of_groups):
        other = "tp" if dim == "dp" else "dp"
        return on_ranks(mesh, calls_of_groups[mesh.get_local_rank(other)], "mixed", dim)

    cases = all_cases(2)
    calls = [calls_of(cases) for _ in groups]
    outs = square.run(on_own_group, calls)
    for group, own_calls in zip(groups, calls):
        compare(cases, own_calls, [outs[rank] for rank in group])


def test_a_process_group_serves_as_well_as_a_mesh(square):
    def on_rank(mesh):
        from tpcourse import comm

        return comm.all_gather(torch.tensor([mesh.get_rank()]), mesh["dp"].get_group(), 0).tolist()

    assert square.run(on_rank) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_send_and_recv_carry_gradients_back(world):
    """A chain: rank 0 sends w0 to rank 1, which sends w1 * (what came) on; the last rank has the loss."""

    def on_rank(mesh, weights):
        from tpcourse import comm

        group, rank, last = mesh["tp"], mesh.get_rank(), mesh.size() - 1
        w = weights[rank].requires_grad_()
        like = torch.empty(2, 3, dtype=w.dtype).t().requires_grad_()
        h = w.t() if rank == 0 else w.t() * comm.recv(like, group, rank - 1)
        end = h.square().sum() if rank == last else comm.send(h, group, rank + 1)
        end.backward()
        return end.detach(), w.grad

    weights = [torch.randn(2, 3, dtype=torch.float64) for _ in range(world.size)]
    leaves = [w.clone().requires_grad_() for w in weights]
    loss = torch.stack([w.t() for w in leaves]).prod(0).square().sum()
    outs = world.run(on_rank, weights)
    for rank, (end, grad) in enumerate(outs):
        assert_close(end, loss.detach() if rank == world.size - 1 else torch.zeros((), dtype=torch.float64))
        assert_close(grad, torch.autograd.grad(loss, leaves, retain_graph=True)[rank])
