"""Every collective and its conjugate, on real ranks, against one process that sees all ranks as one graph."""

import pytest
import torch
from comm_reference import Case, all_cases, exchange, plain_cases, resharding, sharding_cases, uneven
from torch.testing import assert_close

from tpcourse.comm import split_sizes

DIMS = [0, 1, 2, -1, -2, -3]
LAYOUTS = ["contiguous", "transposed", "sliced", "mixed"]  # mixed: not the same on each rank


def on_ranks(mesh, name, xs, grads, args, dim="tp", layout="contiguous"):
    """One collective forward and backward: its result, its input's gradient, whether x stayed as it was."""
    from tpcourse import comm

    def lay_out(t):  # equal values, other strides
        how = ["transposed", "contiguous", "sliced"][rank % 3] if layout == "mixed" else layout
        if how == "transposed":
            return t.transpose(0, -1).contiguous().transpose(0, -1)
        return torch.stack([t, -t], -1)[..., 0] if how == "sliced" else t

    group, rank = mesh[dim], mesh.get_local_rank(dim)
    x = lay_out(xs[rank]).requires_grad_()
    y = getattr(comm, name)(x, group, *args[rank])
    y.backward(lay_out(grads[rank]))
    return y.detach(), x.grad, torch.equal(x.detach(), xs[rank])


def check(world, case: Case, layout="contiguous"):
    xs, grads = case.tensors()
    expected_ys, expected_grads = case.expected(xs, grads)
    outs = world.run(on_ranks, case.name, xs, grads, case.args, "tp", layout)
    for rank, (y, grad, untouched) in enumerate(outs):
        assert_close(y, expected_ys[rank], msg=lambda text: f"{case.name}, result on rank {rank}: {text}")
        assert_close(grad, expected_grads[rank], msg=lambda text: f"{case.name}, grad on rank {rank}: {text}")
        assert untouched, f"{case.name} changed its input on rank {rank}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_without_a_dimension(world, layout):
    for case in plain_cases(world.size):
        check(world, case, layout)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_shards(world, dim, layout):
    for case in sharding_cases(world.size, dim, None):
        check(world, case, layout)


@pytest.mark.parametrize("dim", DIMS)
def test_uneven_shards(world, dim):
    for sizes in (split_sizes(7, world.size), uneven(world.size)):
        for case in sharding_cases(world.size, dim, sizes):
            check(world, case, "mixed")


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
    for case in cases:
        check(world, case, "mixed")


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
    for case in all_cases(world.size):
        if case.copies or case.used_alike:
            continue
        xs, ys = case.tensors()
        outs = world.run(on_ranks, case.name, xs, ys, case.args)
        forward = sum((ax * y).sum() for (ax, _, _), y in zip(outs, ys))
        backward = sum((x * aty).sum() for x, (_, aty, _) in zip(xs, outs))
        assert_close(forward, backward, msg=lambda text: f"{case.name}: {text}")


@pytest.mark.parametrize("dim", ["dp", "tp"])
def test_one_dimension_of_a_mesh(square, dim):
    """On a 2 x 2 mesh, the two groups of a dimension work side by side and do not mix."""
    ranks_of = {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]}[dim]
    for cases in zip(all_cases(2), all_cases(2)):  # one for each of the two groups, with numbers of its own
        tensors = [case.tensors() for case in cases]
        outs = square.run(on_own_group, cases[0].name, tensors, cases[0].args, dim)
        for group, (case, (xs, grads)) in enumerate(zip(cases, tensors)):
            expected_ys, expected_grads = case.expected(xs, grads)
            for place, rank in enumerate(ranks_of[group]):
                assert_close(outs[rank][0], expected_ys[place])
                assert_close(outs[rank][1], expected_grads[place])


def on_own_group(mesh, name, tensors, args, dim):
    from tpcourse import comm

    other = "tp" if dim == "dp" else "dp"
    xs, grads = tensors[mesh.get_local_rank(other)]
    rank = mesh.get_local_rank(dim)
    x = xs[rank].requires_grad_()
    y = getattr(comm, name)(x, mesh[dim].get_group(), *args[rank])  # a process group serves as well as a mesh
    y.backward(grads[rank])
    return y.detach(), x.grad


def test_send_and_recv_carry_gradients_back(world):
    """A chain: rank 0 sends w0 to rank 1, which sends w1 * (what came) on; the last rank has the loss."""

    def on_rank(mesh, weights):
        from tpcourse import comm

        group, rank, last = mesh["tp"], mesh.get_rank(), mesh.size() - 1
        w = weights[rank].requires_grad_()
        like = torch.empty(3, 2, dtype=w.dtype, requires_grad=True)
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
