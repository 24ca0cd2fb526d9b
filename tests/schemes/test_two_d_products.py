"""SUMMA's three products on real ranks against the whole matrices, and what they send."""

import pytest
import torch
from grids import named
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.measure import Row, Table, wire_bytes

M, K, N = 3, 5, 7  # of a block, so that no block is square
MESHES = [(1, 1), (2, 2), (1, 1, 2), (2, 2, 2)]


def block_of(whole, mesh, rows=None, columns=None):
    """This rank's block of a matrix, where parts may be uneven."""
    q, (i, j) = mesh.size(0), mesh.get_coordinate()[:2]
    part = whole.split(rows or len(whole) // q)[i]
    return part.split(columns or whole.size(1) // q, 1)[j].clone()


def product_on_rank(mesh, name, a, b, sizes, strided):
    from tpcourse.schemes import summa

    grid = summa.Grid.of(mesh)
    a_rows, a_columns, b_rows = {"ab": (None, sizes, sizes), "abt": (None, None, sizes),
                                 "atb": (None, sizes, None)}[name]
    a, b = block_of(a, mesh, a_rows, a_columns), block_of(b, mesh, b_rows)
    if strided:
        a, b = a.mT.contiguous().mT, torch.stack([b, -b], -1)[..., 0]
    before = a.clone(), b.clone()
    with tp.ledger(mesh) as book:
        c = getattr(summa, name)(a, b, grid, sizes)
    unchanged = all(torch.equal(t, old) for t, old in zip((a, b), before))
    return c, unchanged, book, mesh.get_coordinate()


def whole_product(name, q, k=None):
    """A, B and C for blocks of M, K, N; `k` in place of q K for the dimension of panels."""
    m, k, n = q * M, k or q * K, q * N
    shapes = {"ab": ((m, k), (k, n)), "abt": ((m, n), (k, n)), "atb": ((m, k), (m, n))}[name]
    a, b = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return a, b, {"ab": lambda: a @ b, "abt": lambda: a @ b.mT, "atb": lambda: a.mT @ b}[name]()


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("name", ["ab", "abt", "atb"])
def test_products(grid_world, name, strided):
    q = 2 if grid_world.size > 2 else 1
    a, b, c = whole_product(name, q)
    for own, unchanged, _, (i, j, *_) in grid_world.run(product_on_rank, name, a, b, None, strided):
        assert_close(own, c.chunk(q)[i].chunk(q, 1)[j])
        assert unchanged


@pytest.mark.parametrize("name", ["ab", "abt", "atb"])
def test_uneven_panels(four, name):
    a, b, c = whole_product(name, 2, k=5)
    sizes = [3, 2]
    rows = sizes if name == "atb" else M
    columns = sizes if name == "abt" else N
    for own, _, _, (i, j) in four.run(product_on_rank, name, a, b, sizes, False):
        assert_close(own, c.split(rows)[i].split(columns, 1)[j])


def test_nine_ranks():
    """A grid with a middle: panels that come neither first nor last."""
    whole = {name: whole_product(name, 3) for name in ("ab", "abt", "atb")}
    with tp.World(mesh=named((3, 3))) as world:
        for name, (a, b, c) in whole.items():
            for own, _, _, (i, j) in world.run(product_on_rank, name, a, b, None, False):
                assert_close(own, c.chunk(3)[i].chunk(3, 1)[j])


def rooted(op, dim, q, block, place):
    """One broadcast or reduce from each of q ranks in turn, of blocks of so many bytes."""
    return [Row(op, dim, q, 1, block, wire_bytes(op, block, q, from_root=(place - t) % q), "forward")
            for t in range(q)]


def test_what_the_products_send(grid_world):
    """Of each matrix that moves q blocks pass by: broadcasts of A and B, or of one and reduces of C."""
    q = 2 if grid_world.size > 2 else 1
    for name in ("ab", "abt", "atb"):
        a, b, c = whole_product(name, q)
        block = {key: 8 * t.numel() // q**2 for key, t in (("a", a), ("b", b), ("c", c))}
        for *_, book, (i, j, *_) in grid_world.run(product_on_rank, name, a, b, None, False):
            moves = {"ab": [("broadcast", "column", "a"), ("broadcast", "row", "b")],
                     "abt": [("broadcast", "row", "b"), ("reduce", "column", "c")],
                     "atb": [("broadcast", "column", "a"), ("reduce", "row", "c")]}[name]
            expected = [row for op, dim, key in moves
                        for row in rooted(op, dim, q, block[key], {"row": i, "column": j}[dim])]
            assert book == Table(expected if q > 1 else []), book
            assert book.total("wire_bytes") == (q - 1) * sum(block[key] for *_, key in moves)


def gradients_on_rank(mesh, name, a, b, dc, unsummed):
    """The block of C, and the gradients of the blocks of A and B; tokens lie over rows and depth."""
    from unittest import mock

    from tpcourse.comm import my_slice
    from tpcourse.schemes import summa

    grid = summa.Grid.of(mesh)

    def tokens(t):
        return t[my_slice(len(t), grid.tokens), my_slice(t.size(1), grid.columns)].clone()

    a, b = tokens(a).requires_grad_(), block_of(b, mesh).requires_grad_()
    with mock.patch("torch.distributed.all_reduce", return_value=None) if unsummed else mock.MagicMock():
        with tp.saved_activations() as mem:
            c = summa.multiply(a, b, grid, getattr(summa, name))
        c.backward(tokens(dc))
    return c.detach(), a.grad, b.grad, [tuple(s.shape) for s in mem.tensors], mesh.get_coordinate()


def check_gradients(world, name, unsummed=False):
    shape = world.run(lambda mesh: tuple(mesh.shape))[0]
    q, d = shape[0], (*shape, 1)[2]
    a, b, c = whole_product(name, q)
    a = torch.randn(d * q * M, a.size(1), dtype=torch.float64, requires_grad=True)
    b.requires_grad_()
    c = a @ (b if name == "ab" else b.mT)
    dc = torch.randn_like(c)
    c.backward(dc)

    def tokens(t, i, j, k):
        return t.detach().chunk(q * d)[i * d + k].chunk(q, 1)[j]

    outs = world.run(gradients_on_rank, name, a.detach(), b.detach(), dc, unsummed)
    for own, da, db, kept, (i, j, *k) in outs:
        place = i, j, *(k or [0])
        assert_close(own, tokens(c, *place))
        assert_close(da, tokens(a.grad, *place))
        assert_close(db, b.grad.chunk(q)[i].chunk(q, 1)[j])
        assert kept == [tuple(da.shape), tuple(db.shape)]  # the blocks themselves, no panels


@pytest.mark.parametrize("name", ["ab", "abt"])
def test_gradients(grid_world, name):
    check_gradients(grid_world, name)


def test_without_the_sum_over_depth_the_gradient_is_that_of_one_depth():
    """Each depth then has the dB of its own tokens, and they add up to the right one."""
    with tp.World(mesh=named((1, 1, 2))) as world:
        with pytest.raises(AssertionError, match="not close"):
            check_gradients(world, "ab", unsummed=True)
        a, b, _ = whole_product("ab", 1)
        a, dc = torch.randn(2 * M, K, dtype=torch.float64), torch.randn(2 * M, N, dtype=torch.float64)
        parts = [out[2] for out in world.run(gradients_on_rank, "ab", a, b, dc, True)]
        for part, a_k, dc_k in zip(parts, a.chunk(2), dc.chunk(2)):
            assert_close(part, a_k.mT @ dc_k)


def test_what_is_frozen_is_not_computed(four):
    """No dB: A is not kept, nothing reduced along rows of the grid; no dA: B is not kept."""

    def on_rank(mesh, frozen):
        from tpcourse.schemes import summa

        a, b = (torch.ones(4, 4, requires_grad=name != frozen) for name in "ab")
        with tp.ledger(mesh) as book, tp.saved_activations() as mem:
            summa.multiply(a, b, summa.Grid.of(mesh)).sum().backward()
        reduced = {dim: book.total("calls", op="reduce", dim=dim) for dim in ("row", "column")}
        return len(mem.tensors), reduced, a.grad is None, b.grad is None

    for out in four.run(on_rank, "a"):
        assert out == (1, {"row": 2, "column": 0}, True, False)
    for out in four.run(on_rank, "b"):
        assert out == (1, {"row": 0, "column": 2}, False, True)


def test_the_next_broadcast_is_under_way_while_a_panel_is_multiplied(four):
    """Before a panel is handed over the next broadcast has started; a reduce ends after the next product."""

    def on_rank(mesh):
        from unittest import mock

        import torch.distributed as dist

        from tpcourse.schemes import summa

        grid, seen = summa.Grid.of(mesh), []

        def noted(name, start):
            def call(*args, **kwargs):
                t = kwargs.get("group_src", kwargs.get("group_dst"))
                seen.append(f"{name} {t}")
                work = start(*args, **kwargs)
                return mock.Mock(wait=lambda: seen.append(f"wait {t}") or work.wait())
            return call

        with (mock.patch.object(dist, "broadcast", noted("broadcast", dist.broadcast)),
              mock.patch.object(dist, "reduce", noted("reduce", dist.reduce))):
            for panel in summa._panels(torch.ones(2, 2), grid.rows, 0, None):
                seen.append("use")
            summa._sum_each((seen.append("compute") or torch.ones(2, 2) for _ in range(2)), grid.rows)
        return seen

    for seen in four.run(on_rank):
        assert seen == ["broadcast 0", "broadcast 1", "wait 0", "use", "wait 1", "use",
                        "compute", "reduce 0", "compute", "wait 0", "reduce 1", "wait 1"]


@pytest.mark.parametrize("names, shape, text", [
    (("tp",), (4,), "a grid is a mesh of 2 named dimensions, rows and columns, or of 3 with depth, not "
                    "('tp',) of shape (4,)"),
    (("row", "column"), (4, 1), "mesh dimension 'row' has 4 ranks and 'column' has 1; SUMMA's grid has as "
                                "many rows as columns")], ids=["one dimension", "not square"])
def test_meshes_that_are_no_grid(four, names, shape, text):
    def on_rank(mesh):
        from torch.distributed.device_mesh import init_device_mesh

        from tpcourse.schemes.summa import Grid

        try:
            Grid.of(init_device_mesh(mesh.device_type, shape, mesh_dim_names=names))
        except ValueError as error:
            return str(error)

    assert four.run(on_rank) == [text] * 4
