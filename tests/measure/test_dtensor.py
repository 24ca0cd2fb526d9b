"""DTensor's own layers: the ledger against CommDebugMode's counts and against closed forms."""

from collections import Counter

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tpcourse.measure import ledger, saved_activations

TOKENS, D, HIDDEN = 6, 8, 20
PLANS = {
    "1D": {"0": ColwiseParallel(), "2": RowwiseParallel()},
    "sequence": {
        "norm": SequenceParallel(sequence_dim=0),
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    },
}


def mlp():
    return nn.Sequential(nn.Linear(D, HIDDEN, bias=False), nn.GELU(), nn.Linear(HIDDEN, D, bias=False))


def step(mesh, plan):
    model = mlp()
    if "norm" in plan:
        model.add_module("norm", nn.LayerNorm(D))
    model = parallelize_module(model, mesh["tp"], plan)
    x = torch.ones(TOKENS // (2 if "norm" in plan else 1), D, requires_grad=True)
    with ledger(mesh) as book, CommDebugMode() as debug:
        out = model(x)
        out = out.to_local() if isinstance(out, DTensor) else out
        out.sum().backward()
    seen = Counter()
    for op, calls in debug.get_comm_counts().items():
        seen[str(op).rpartition(".")[2]] += calls
    return book, dict(seen), book.total("calls")


def test_colwise_rowwise(two):
    for book, seen, calls in two.run(step, PLANS["1D"]):
        assert seen == {"all_reduce": calls} and calls == 2
        for phase in ("forward", "backward"):
            assert book.total("wire_bytes", op="all_reduce", dim="tp", phase=phase) == TOKENS * D * 4


def test_sequence_parallel(two):
    names = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
    for book, seen, calls in two.run(step, PLANS["sequence"]):
        counted = {names.get(op, op): n for op, n in seen.items()}
        assert {op: book.total("calls", op=op) for op in counted} == counted
        assert sum(counted.values()) == calls
        assert book.total("calls", op="all_gather", phase="backward") >= 1


def test_redistribute_on_two_dimensions(square):
    def body(mesh):
        shards = distribute_tensor(torch.ones(8, 12), mesh, [Shard(0), Shard(1)])
        with ledger(mesh) as book:
            shards.redistribute(mesh, [Shard(0), Replicate()]).redistribute(mesh, [Replicate(), Replicate()])
        return [(r.op, r.dim, r.message_bytes, r.wire_bytes) for r in book.rows]

    quarter = 8 * 12 * 4 // 4
    expected = [("all_gather", "tp", 2 * quarter, quarter), ("all_gather", "dp", 4 * quarter, 2 * quarter)]
    assert square.run(body) == [expected] * 4


def test_what_a_dtensor_operation_sends_by_itself(two):
    """A product of rows with rows: DTensor gathers the second factor, inside the operator."""

    def body(mesh):
        left, right = (distribute_tensor(torch.ones(s), mesh, [Shard(0)]) for s in ((80, 6), (6, 4)))
        with ledger(mesh) as book:
            left @ right
        return [(r.op, r.dim, r.message_bytes, r.wire_bytes) for r in book.rows]

    assert two.run(body) == [[("all_gather", "tp", 6 * 4 * 4, 6 * 4 * 4 // 2)]] * 2


def test_saved_activations_are_the_local_shards(two):
    def body(mesh):
        model = parallelize_module(mlp(), mesh["tp"], PLANS["1D"])
        with saved_activations() as mem:
            model(torch.ones(TOKENS, D))
        return mem

    for mem in two.run(body):
        assert mem.bytes == (TOKENS * D + 2 * TOKENS * HIDDEN // 2) * 4  # x, half of GELU's in- and output
        assert mem.parameter_bytes == D * HIDDEN // 2 * 4  # half of the second weight; the first is not read
