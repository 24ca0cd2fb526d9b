"""What the ledger lists for every operation, whoever issues it, against figures worked out by hand."""

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tpcourse.measure import ledger

N = 3  # ranks; x is 5 x 3 float64: 120 bytes


def parts(x):
    return [torch.ones_like(x) for _ in range(N)]


def stacked(x, times=N):
    return x.new_ones(times * x.size(0), *x.shape[1:])


def rows_to(r, d):
    return r + 2 * d + 1  # rows of 24 bytes that rank r sends to rank d in the uneven all_to_all


def uneven(x, r):
    sent, received = [rows_to(r, d) for d in range(N)], [rows_to(s, r) for s in range(N)]
    dist.all_to_all_single(x.new_ones(sum(received), 3), x.new_ones(sum(sent), 3), received, sent)


def uneven_functional(x, r):
    sent, received = [rows_to(r, d) for d in range(N)], [rows_to(s, r) for s in range(N)]
    functional.all_to_all_single(x.new_ones(sum(sent), 3), received, sent, group()) + 1


def ring(x, r):
    out = dist.P2POp(dist.isend, x, (r + 1) % N)
    for work in dist.batch_isend_irecv([out, dist.P2POp(dist.irecv, torch.ones_like(x), (r - 1) % N)]):
        work.wait()


def one_way(x, r):
    if r == 0:
        dist.send(x, 2)
    if r == 2:
        dist.recv(x)  # from anyone


def one_way_async(x, r):
    if r == 0:
        dist.isend(x, 2).wait()
    if r == 2:
        dist.irecv(x, 0).wait()


def coalesced(enter):
    def body(x, r):
        with dist._coalescing_manager():
            enter(x)
            enter(x[:2])

    return body


def many(op, *args):
    def body(x, r):
        for out in getattr(functional, op)([x, x[:2]], *args, dist.group.WORLD):
            functional.wait_tensor(out)

    return body


def group():
    return dist.group.WORLD


FUNCTIONAL = {
    "functional all_reduce": (
        lambda x, r: functional.all_reduce(x, "sum", group()) + 1, "all_reduce", 120, 160),
    "functional all_gather": (
        lambda x, r: functional.all_gather_tensor(x, 0, group()) + 1, "all_gather", 360, 240),
    "functional reduce_scatter": (
        lambda x, r: functional.reduce_scatter_tensor(stacked(x), "sum", 0, group()) + 1,
        "reduce_scatter", 360, 240),
    "functional broadcast": (
        lambda x, r: functional.broadcast(x, 1, group()) + 1, "broadcast", 120, [0, 120, 120]),
    "functional all_reduce, two": (many("all_reduce_coalesced", "sum"), "all_reduce", 168, 224),
    "functional all_gather, two": (many("all_gather_into_tensor_coalesced"), "all_gather", 504, 336),
    "functional, autograd": (
        lambda x, r: functional.all_gather_tensor_autograd(x, 0, group()) + 1, "all_gather", 360, 240),
}  # fmt: skip

RAW = {
    "all_reduce": (lambda x, r: dist.all_reduce(x), "all_reduce", 120, 160),
    "all_reduce max": (lambda x, r: dist.all_reduce(x, op=dist.ReduceOp.MAX), "all_reduce", 120, 160),
    "all_reduce async": (lambda x, r: dist.all_reduce(x, async_op=True).wait(), "all_reduce", 120, 160),
    "all_reduce bf16": (lambda x, r: dist.all_reduce(x.bfloat16()), "all_reduce", 30, 40),
    "all_reduce strided": (lambda x, r: dist.all_reduce(x.t()), "all_reduce", 120, 160),
    "all_reduce, a slice": (lambda x, r: dist.all_reduce(x[:2]), "all_reduce", 48, 64),
    "all_reduce that does not divide": (lambda x, r: dist.all_reduce(x[0, :1]), "all_reduce", 8, 32 / 3),
    "all_reduce of nothing": (lambda x, r: dist.all_reduce(x[:0]), "all_reduce", 0, 0),
    "the group's method": (lambda x, r: group().allreduce([x]).wait(), "all_reduce", 120, 160),
    "two all_reduces, coalesced": (coalesced(dist.all_reduce), "all_reduce", 168, 224),
    "all_gather": (lambda x, r: dist.all_gather(parts(x), x), "all_gather", 360, 240),
    "all_gather_into_tensor": (
        lambda x, r: dist.all_gather_into_tensor(stacked(x), x), "all_gather", 360, 240),
    "two all_gathers, coalesced": (
        coalesced(lambda x: dist.all_gather_into_tensor(stacked(x), x)), "all_gather", 504, 336),
    "reduce_scatter": (lambda x, r: dist.reduce_scatter(x, parts(x)), "reduce_scatter", 360, 240),
    "reduce_scatter_tensor": (
        lambda x, r: dist.reduce_scatter_tensor(x, stacked(x)), "reduce_scatter", 360, 240),
    "two reduce_scatters, coalesced": (
        coalesced(lambda x: dist.reduce_scatter_tensor(x, stacked(x))), "reduce_scatter", 504, 336),
    "all_to_all": (lambda x, r: dist.all_to_all(parts(x), parts(x)), "all_to_all", 360, 240),
    "all_to_all_single": (
        lambda x, r: dist.all_to_all_single(stacked(x), stacked(x)), "all_to_all", 360, 240),
    "broadcast": (lambda x, r: dist.broadcast(x, 1), "broadcast", 120, [0, 120, 120]),
    "reduce": (lambda x, r: dist.reduce(x, 1), "reduce", 120, [120, 0, 120]),
    "gather": (lambda x, r: dist.gather(x, parts(x) if r == 2 else None, 2), "gather", 360, [120, 120, 0]),
    "scatter": (lambda x, r: dist.scatter(x, parts(x) if r == 2 else None, 2), "scatter", 360, [0, 0, 240]),
    "barrier": (lambda x, r: dist.barrier(), "barrier", 0, 0),
    "monitored_barrier": (lambda x, r: dist.monitored_barrier(), "barrier", 0, 0),
}  # fmt: skip


def record(mesh, body):
    x, rank = torch.ones(5, 3, dtype=torch.float64), dist.get_rank()
    with ledger(mesh) as book:
        body(x, rank)
    return book


def figures(book):
    return [(row.op, row.calls, row.message_bytes, row.wire_bytes) for row in book.rows]


@pytest.mark.parametrize("name", RAW | FUNCTIONAL)
def test_one_operation(three, name):
    body, op, message, wire = (RAW | FUNCTIONAL)[name]
    books = three.run(record, body)
    for rank, book in enumerate(books):
        sent = wire[rank] if isinstance(wire, list) else wire
        assert figures(book) == [(op, 1, message, sent)], f"rank {rank}"
        assert {(row.dim, row.group_size, row.phase) for row in book.rows} == {("tp", N, "forward")}


@pytest.mark.parametrize("body", [uneven, uneven_functional])
def test_uneven_all_to_all_sends_all_but_what_stays(three, body):
    for rank, book in enumerate(three.run(record, body)):
        message = 24 * sum(rows_to(rank, d) for d in range(N))
        assert figures(book) == [("all_to_all", 1, message, message - 24 * rows_to(rank, rank))]


def test_messages_between_two_ranks(three):
    sent, received = ("send", 1, 120, 120), ("recv", 1, 120, 0)
    assert [sorted(figures(book)) for book in three.run(record, ring)] == [[received, sent]] * N
    for body in (one_way, one_way_async):
        assert [figures(book) for book in three.run(record, body)] == [[sent], [], [received]]


def test_every_operator_of_torch_is_known():
    """A new operator in torch's namespaces must be put into the list, or it would go uncounted."""
    import torch.distributed.tensor  # registers operators of its own

    from tpcourse.measure.calls import _BATCH, _OPERATORS, _SILENT

    namespaces = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "_dtensor::")
    there = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith(namespaces)}
    assert there == set(_OPERATORS) | _SILENT | {_BATCH}


def test_rows_add_up_and_calls_stay(three):
    def body(x, rank):
        for _ in range(4):
            dist.all_reduce(x)
        dist.all_reduce(x[:2])
        dist.barrier()

    book = three.run(record, body)[0]
    assert figures(book) == [("all_reduce", 5, 4 * 120 + 48, 4 * 160 + 64), ("barrier", 1, 0, 0)]
    assert [call.message_bytes for call in book.calls] == [120] * 4 + [48, 0]
    assert book.total("calls") == 6 and book.total("wire_bytes", op="all_reduce") == 704


def test_dimensions_of_a_mesh(square):
    def body(mesh):
        x = torch.ones(5, 3)
        pair = dist.new_group([0, 1, 2, 3], group_desc="everyone twice")
        alone = [dist.new_group([r]) for r in range(4)][dist.get_rank()]
        with ledger() as book:
            dist.all_reduce(x, group=mesh.get_group("tp"))
            dist.all_reduce(x, group=mesh.get_group("dp"))
            dist.all_reduce(x)
            dist.all_reduce(x, group=pair)
            dist.all_reduce(x, group=alone)
        return [(row.dim, row.group_size, row.wire_bytes) for row in book.rows], alone.group_name

    for rows, alone in square.run(body):
        known = [("tp", 2, 60), ("dp", 2, 60), ("world", 4, 90), ("everyone twice", 4, 90)]
        assert rows == [*known, (f"group {alone}", 1, 0)]


def test_a_root_counts_in_its_own_group(square):
    def body(mesh):
        first_of_dp = dist.get_global_rank(mesh.get_group("dp"), 0)
        with ledger() as book:
            dist.broadcast(torch.ones(5), first_of_dp, group=mesh.get_group("dp"))
        return book.total("wire_bytes", dim="dp")

    assert square.run(body) == [20, 20, 0, 0]  # of each pair along dp, the root sends


def test_nested_ledgers_each_see_everything_inside_them(two):
    def body(mesh):
        with ledger(mesh) as outer:
            dist.all_reduce(torch.ones(3))
            with ledger() as inner:
                functional.all_reduce(torch.ones(5), "sum", mesh["tp"]) + 1
            dist.barrier()
        dist.all_reduce(torch.ones(7))  # after both
        return figures(outer), figures(inner)

    outer, inner = two.run(body)[0]
    assert outer == [("all_reduce", 2, 32, 32), ("barrier", 1, 0, 0)]
    assert inner == [("all_reduce", 1, 20, 20)]


def test_a_result_that_is_still_on_its_way(two):
    """A functional collective returns a tensor that waits when it is used, here by the next collective."""

    def body(mesh):
        with ledger(mesh) as book:
            dist.all_reduce(functional.all_reduce(torch.ones(3), "sum", mesh["tp"]))
        return figures(book)

    assert two.run(body) == [[("all_reduce", 2, 24, 24)]] * 2


def test_an_error_inside_leaves_what_came_before(two):
    def body(mesh):
        try:
            with ledger() as book:
                dist.all_reduce(torch.ones(3))
                raise KeyError("mine")
        except KeyError:
            pass
        dist.all_reduce(torch.ones(5))
        return figures(book)

    assert two.run(body)[0] == [("all_reduce", 1, 12, 12)]


def test_a_refused_call_is_not_counted(two):
    def body(mesh):
        with ledger() as book:
            try:
                dist.all_gather_into_tensor(torch.ones(5), torch.ones(3))
            except (RuntimeError, ValueError):
                dist.barrier()
        return figures(book)

    assert two.run(body) == [[("barrier", 1, 0, 0)]] * 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(two, mode):
    def body(mesh):
        with mode(), ledger() as book:
            x = torch.ones(3)
            dist.all_reduce(x)
            functional.all_gather_tensor_autograd(x, 0, mesh["tp"]) + 1
        return figures(book), {row.phase for row in book.rows}

    assert two.run(body)[0] == ([("all_reduce", 1, 12, 12), ("all_gather", 1, 24, 12)], {"forward"})


def test_data_parallel_buckets_are_seen(two):
    def body(mesh):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3))
        with ledger(mesh) as book:
            model(torch.ones(2, 5)).sum().backward()
        return [(r.op, r.calls, r.message_bytes, r.phase) for r in book.rows]

    assert two.run(body)[0] == [("all_reduce", 1, (5 * 3 + 3) * 4, "backward")]


def test_a_book_is_plain_data(two):
    book = two.run(record, lambda x, rank: dist.all_reduce(x))[0]
    again = pickle.loads(pickle.dumps(book))
    assert again == book and again.calls == book.calls
    assert type(book).__module__ == "tpcourse.measure.table"
