"""What holds for all collectives besides values: cost, dtypes, autograd modes, errors, and the usual bugs."""

import pytest
import torch
from comm_reference import all_cases
from torch.testing import assert_close

import tpcourse as tp

SENT = {  # forward, backward, as torch dispatches them
    "copy_to_region": ([], ["allreduce_"]),
    "reduce_from_region": (["allreduce_"], []),
    "scatter_to_region": ([], ["_allgather_base_"]),
    "gather_from_region": (["_allgather_base_"], []),
    "all_reduce": (["allreduce_"], ["allreduce_"]),
    "all_gather": (["_allgather_base_"], ["_reduce_scatter_base_"]),
    "reduce_scatter": (["_reduce_scatter_base_"], ["_allgather_base_"]),
    "all_to_all": (["alltoall_base_"], ["alltoall_base_"]),
    "broadcast": (["broadcast_"], ["reduce_"]),
    "reduce": (["reduce_"], ["broadcast_"]),
    "ring_shift": (["send", "recv_"], ["send", "recv_"]),
}


def sent_by_ranks(mesh, cases, dim):
    """For each (name, args, xs): what is dispatched forward and backward; whether x itself is returned."""
    import warnings

    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from tpcourse import comm

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace in ("c10d", "_c10d_functional"):
                seen.append(func._opname)
                tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
                assert all(t.is_contiguous() for t in tensors), f"strided data goes to {func}"
            return func(*args, **(kwargs or {}))

    outs = []
    with warnings.catch_warnings(action="error"), Watch():
        for name, args, xs in cases:
            x = xs[mesh.get_local_rank(dim)]
            x = x.transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
            seen = []
            y = getattr(comm, name)(x, mesh[dim], *args)
            forward, seen = seen, []
            y.sum().backward()
            outs.append((forward, seen, y is x))
    return outs


def test_each_sends_what_its_row_says(three):
    cases = [case for case in all_cases(3) if case.args[0] != (3,)]  # a ring shift by 3 places sends nothing
    calls = [(case.name, case.args[0], case.tensors()[0]) for case in cases]
    for out in three.run(sent_by_ranks, calls, "tp"):
        for case, (forward, backward, _) in zip(cases, out):
            assert (forward, backward) == SENT[case.name], case.name
    assert {case.name for case in cases} == SENT.keys()


def test_alone_costs_nothing():
    """One rank by itself, and a mesh dimension of one rank in a world of two: no call, no copy."""
    cases = [(case.name, case.args[0], case.tensors()[0]) for case in all_cases(1)]
    for mesh in ({"tp": 1}, {"one": 1, "tp": 2}):
        for out in tp.spawn(sent_by_ranks, cases, next(iter(mesh)), mesh=mesh):
            assert out == [([], [], True)] * len(cases)


def test_shard_does_not_keep_the_whole_alive(three):
    def on_rank(mesh, x):
        from tpcourse import comm

        shards = [comm.scatter_to_region(x, mesh["tp"], 0), comm.scatter_to_region(x, mesh["tp"], 1),
                  comm.reduce_scatter(x, mesh["tp"], 0, [1, 6, 2])]
        return [(s.numel(), s.untyped_storage().nbytes() // s.itemsize, s.is_contiguous()) for s in shards]

    for out in three.run(on_rank, torch.randn(9, 6)):
        assert all(held == used and contiguous for used, held, contiguous in out), out


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.int32, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(three, dtype):
    """Small whole numbers come out exactly in every dtype; those that can have gradients have them."""

    def on_rank(mesh, cases):
        from tpcourse import comm

        outs = []
        for name, args, xs in cases:
            x = xs[mesh.get_rank()]
            if x.is_floating_point():
                x.requires_grad_()
            y = getattr(comm, name)(x, mesh["tp"], *args[mesh.get_rank()])
            if x.requires_grad:
                y.backward(torch.ones_like(y))
            outs.append((y.detach(), x.grad))
        return outs

    cases = all_cases(3)
    inputs = [[torch.randint(0, 9, shape).to(dtype) for shape in case.shapes] for case in cases]
    inputs = [[xs[0].clone() for _ in xs] if case.copies else xs for case, xs in zip(cases, inputs)]
    outs = three.run(on_rank, [(case.name, case.args, xs) for case, xs in zip(cases, inputs)])
    for i, (case, xs) in enumerate(zip(cases, inputs)):
        wide = [x.double() for x in xs]
        ones = [torch.ones_like(y) for y in case.reference(wide)]
        ys, grads = case.expected(wide, ones)
        for rank, out in enumerate(outs):
            assert_close(out[i][0], ys[rank].to(dtype), rtol=0, atol=0)
            if dtype.is_floating_point:
                assert_close(out[i][1], grads[rank].to(dtype), rtol=0, atol=0)


def test_booleans_travel(three):
    def on_rank(mesh, masks):
        from tpcourse import comm

        mask, tp = masks[mesh.get_rank()], mesh["tp"]
        return [comm.all_gather(mask, tp, 0), comm.all_to_all(mask, tp, 1, 0), comm.ring_shift(mask, tp)]

    masks = [torch.rand(2, 3) > 0.5 for _ in range(3)]
    for rank, (gathered, resharded, shifted) in enumerate(three.run(on_rank, masks)):
        assert torch.equal(gathered, torch.cat(masks))
        assert torch.equal(resharded, torch.cat(masks)[:, rank : rank + 1])
        assert torch.equal(shifted, masks[rank - 1])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_empty_tensors(three, shape):
    def on_rank(mesh, x):
        from tpcourse import comm

        group = mesh["tp"]
        return [comm.all_reduce(x, group), comm.all_gather(x, group, 0), comm.reduce_scatter(x, group, 1),
                comm.all_to_all(x, group, 0, 1), comm.broadcast(x, group, 0), comm.ring_shift(x, group)]

    n, m = shape
    shapes = [(n, m), (3 * n, m), (n, m // 3), (n // 3, 3 * m), (n, m), (n, m)]
    for out in three.run(on_rank, torch.empty(shape)):
        assert [tuple(y.shape) for y in out] == shapes


def test_no_graph_without_grad(three):
    def on_rank(mesh, cases):
        from tpcourse import comm

        outs = []
        for name, args, xs in cases:
            x = xs[mesh.get_rank()].requires_grad_()
            with torch.no_grad():
                y = getattr(comm, name)(x, mesh["tp"], *args)
            outs.append((y, y.grad_fn is None))
        return outs

    cases = [(case, case.tensors()[0]) for case in all_cases(3)]
    for rank, out in enumerate(three.run(on_rank, [(case.name, case.args[0], xs) for case, xs in cases])):
        for (case, xs), (y, no_graph) in zip(cases, out):
            assert_close(y, case.reference(xs)[rank].contiguous())
            assert no_graph, case.name


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(three, reentrant):
    """Under activation checkpointing the collectives run again in backward; no number changes."""

    def on_rank(mesh, x, a):
        from torch.utils.checkpoint import checkpoint

        from tpcourse import comm

        group, a = mesh["tp"], a[mesh.get_rank()]

        def block(x, a):
            shards = comm.reduce_scatter((comm.copy_to_region(x, group) @ a).exp(), group, 0)
            return comm.all_gather(shards.sin(), group, 0).cos()

        outs = []
        for run in (block, lambda *args: checkpoint(block, *args, use_reentrant=reentrant)):
            leaves = [x.clone().requires_grad_(), a.clone().requires_grad_()]
            y = run(*leaves)
            (y * (1 + mesh.get_rank())).sum().backward()
            outs.append([y.detach()] + [leaf.grad for leaf in leaves])
        return outs

    x, a = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
    for kept, recomputed in three.run(on_rank, x, a):
        assert all(torch.equal(*pair) for pair in zip(kept, recomputed))


def test_a_second_derivative_is_refused(three):
    def on_rank(mesh, x):
        from tpcourse import comm

        x.requires_grad_()
        (grad,) = torch.autograd.grad(comm.all_reduce(x, mesh["tp"]).square().sum(), x, create_graph=True)
        try:
            grad.sum().backward()
        except RuntimeError as error:
            return str(error)

    assert all("differentiate twice" in text for text in three.run(on_rank, torch.ones(2)))


def two_layers(mesh, x, a, b, enter, leave):
    """sum((enter(x) A_r B_r)^2), with A in columns and B in rows; returns the gradients of x, A_r and B_r."""
    from tpcourse import comm

    group, rank = mesh["tp"], mesh.get_rank()
    leaves = [t.clone().requires_grad_() for t in (x, a.chunk(3, 1)[rank], b.chunk(3, 0)[rank])]
    x, a, b = leaves
    x = x if enter is None else getattr(comm, enter)(x, group)
    getattr(comm, leave)(x @ a @ b, group).square().sum().backward()
    return [leaf.grad for leaf in leaves]


def test_the_bug_of_the_field(three):
    """The wrong row of the table raises nothing: gradients are P times too large, or parts of a sum."""
    x, a, b = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 5), (5, 6), (6, 7)))
    leaves = [t.clone().requires_grad_() for t in (x, a, b)]
    (leaves[0] @ leaves[1] @ leaves[2]).square().sum().backward()
    whole = [leaf.grad for leaf in leaves]

    def grads(enter, leave):
        return three.run(two_layers, x, a, b, enter, leave)

    for rank, (dx, da, db) in enumerate(grads("copy_to_region", "reduce_from_region")):
        assert_close([dx, da, db], [whole[0], whole[1].chunk(3, 1)[rank], whole[2].chunk(3, 0)[rank]])

    right = grads("copy_to_region", "reduce_from_region")
    for wrong, good in zip(grads("copy_to_region", "all_reduce"), right):
        assert_close(wrong, [3 * t for t in good])  # P times too large, everywhere

    partial = grads(None, "reduce_from_region")
    assert_close(sum(dx for dx, _, _ in partial), whole[0])  # each rank holds its own part only
    assert all((dx - whole[0]).abs().max() > 1e-3 for dx, _, _ in partial)


REFUSED = [  # call on 3 ranks, x of shape [4, 6]; what the error must say
    ("reduce_scatter", (0,), "dimension 0 of size 4 is not divisible by the 3 ranks of mesh dimension 'tp'; "
                             "pad to 6 or use 2 or 4 ranks, or pass sizes=[2, 1, 1]"),
    ("scatter_to_region", (-2,), "dimension -2 of size 4 is not divisible by the 3 ranks of mesh"),
    ("all_to_all", (0, 1), "dimension 0 of size 4 is not divisible by the 3 ranks"),
    ("all_to_all", (0, 0), "dimension 0 of size 4 is not divisible by the 3 ranks"),
    ("all_to_all", (0, 0, [1, 1, 2]), "needs split_sizes (what goes to each rank) and concat_sizes"),
    ("reduce_scatter", (1, [2, 2, 3]), "dimension 1 of size 6 does not split into sizes=[2, 2, 3], which add "
                                       "up to 7; pass sizes that add up to 6, such as [2, 2, 2]"),
    ("scatter_to_region", (1, [3, 3]), "sizes=[3, 3] are 2 sizes for the 3 ranks of mesh dimension 'tp'"),
    ("scatter_to_region", (1, [7, -2, 1]), "zero or more"),
    ("all_gather", (0, [2, 2, 2]), "has 4 entries in dimension 0, not 2 as sizes=[2, 2, 2] say"),
    ("all_to_all", (1, 0, None, [5, 5, 5]), "has 4 entries in dimension 0, not 5 as sizes=[5, 5, 5] say"),
    ("all_gather", (2,), "Dimension out of range (expected to be in range of [-2, 1], but got 2)"),
    ("broadcast", (3,), "rank 3 is not one of the 3 ranks of mesh dimension 'tp'; count within the"),
    ("reduce", (-1,), "rank -1 is not one of the 3 ranks"),
    ("send", (7,), "rank 7 is not one of the 3 ranks"),
    ("recv", (7,), "rank 7 is not one of the 3 ranks"),
]


@pytest.mark.parametrize("name, args, says", REFUSED)
def test_bad_arguments_raise_on_every_rank(three, name, args, says):
    def on_rank(mesh):
        from tpcourse import comm

        try:
            getattr(comm, name)(torch.zeros(4, 6), mesh["tp"], *args)
        except (ValueError, IndexError) as error:
            return str(error)

    for text in three.run(on_rank, timeout=20):
        assert says in text


def test_no_message_to_oneself(three):
    def on_rank(mesh):
        from tpcourse import comm

        for exchange in (comm.send, comm.recv):
            with pytest.raises(ValueError, match=f"rank {mesh.get_rank()} of the 3 ranks .* cannot send to"):
                exchange(torch.zeros(2), mesh["tp"], mesh.get_rank())

    three.run(on_rank, timeout=20)


def test_group_must_be_one_group(square):
    def on_rank(mesh):
        import torch.distributed as dist

        from tpcourse import comm

        outsiders = dist.new_group([0, 1])
        texts = []
        for group in (mesh, None, "tp") + (() if mesh.get_rank() < 2 else (outsiders,)):
            try:
                comm.all_reduce(torch.zeros(1), group)
            except (ValueError, TypeError) as error:
                texts.append(f"{type(error).__name__}: {error}")
        return texts

    for rank, (several, none, name, *outside) in enumerate(square.run(on_rank, timeout=20)):
        assert several == ("ValueError: a collective runs along one mesh dimension, not 2: ('dp', 'tp'); "
                           "take one, e.g. mesh['tp']")
        assert none.startswith("TypeError: group must be one mesh dimension") and none.endswith("not None")
        assert name.endswith("not 'tp'")
        assert len(outside) == (rank > 1)
        assert all("a ProcessGroup that holds this rank" in text for text in outside)


def test_shares_of_a_dimension(three):
    from tpcourse import comm

    assert comm.split_sizes(10, 4) == [3, 3, 2, 2]
    assert comm.split_sizes(2, 3) == [1, 1, 0]
    assert comm.split_sizes(0, 2) == [0, 0]

    def on_rank(mesh, x):
        mine = [comm.my_slice(9, mesh["tp"]), comm.my_slice(9, mesh["tp"], [0, 2, 7])]
        return [x[part] for part in mine]

    x = torch.arange(9)
    for rank, (even, uneven) in enumerate(three.run(on_rank, x)):
        assert torch.equal(even, x.chunk(3)[rank]) and torch.equal(uneven, x.split([0, 2, 7])[rank])
