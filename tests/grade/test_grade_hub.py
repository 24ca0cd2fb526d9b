"""Each operation of torch.distributed on a checked rank, against what it means, and what the hub counted of
it.
"""

import pytest
import torch

from tpcourse.grade.hub import Hub
from tpcourse.grade.session import Session

N = 3
PROGRAM = """
import torch
import torch.distributed as dist
def operation(x):
    r, n = dist.get_rank(), dist.get_world_size()
    {body}
"""
GIVEN = [torch.arange(6, dtype=torch.float64) + 10 * r for r in range(N)]
SUM, CAT = sum(GIVEN), torch.cat(GIVEN)
CASES = {
    "all_reduce": ("dist.all_reduce(x); return x", [SUM] * N, 2 * 2 / 3 * 48),
    "all_reduce max": ("dist.all_reduce(x, dist.ReduceOp.MAX); return x", [GIVEN[2]] * N, 2 * 2 / 3 * 48),
    "all_reduce avg": ("dist.all_reduce(x, dist.ReduceOp.AVG); return x", [SUM / N] * N, 2 * 2 / 3 * 48),
    "all_reduce of a strided tensor": (
        "y = x.reshape(2, 3).T; dist.all_reduce(y); return y",
        [SUM.reshape(2, 3).T] * N,
        64,
    ),
    "broadcast": ("dist.broadcast(x, 1); return x", [GIVEN[1]] * N, None),
    "reduce": (
        "dist.reduce(x, 2); return x if r == 2 else torch.zeros(6)",
        [torch.zeros(6), torch.zeros(6), SUM],
        None,
    ),
    "all_gather": (
        "o = [torch.empty_like(x) for _ in range(n)]; dist.all_gather(o, x); return torch.cat(o)",
        [CAT] * N,
        96,
    ),
    "all_gather_into_tensor": (
        "o = x.new_empty(18); dist.all_gather_into_tensor(o, x); return o",
        [CAT] * N,
        96,
    ),
    "gather": (
        (
            "o = [torch.empty_like(x) for _ in range(n)] if r == 0 else None; dist.gather(x, o, 0); "
            "return torch.cat(o) if r == 0 else x"
        ),
        [CAT, GIVEN[1], GIVEN[2]],
        None,
    ),
    "scatter": (
        "o = x.new_empty(2); dist.scatter(o, list(x.chunk(3)) if r == 1 else None, 1); return o",
        list(GIVEN[1].chunk(3)),
        None,
    ),
    "reduce_scatter": (
        "o = x.new_empty(2); dist.reduce_scatter(o, list(x.chunk(3))); return o",
        list(SUM.chunk(3)),
        32,
    ),
    "reduce_scatter_tensor": (
        "o = x.new_empty(2); dist.reduce_scatter_tensor(o, x); return o",
        list(SUM.chunk(3)),
        32,
    ),
    "all_to_all_single": (
        "o = torch.empty_like(x); dist.all_to_all_single(o, x); return o",
        [torch.cat([g.chunk(3)[r] for g in GIVEN]) for r in range(N)],
        32,
    ),
    "all_to_all_single, uneven": (
        "o = x.new_empty(3 * (r + 1)); dist.all_to_all_single(o, x, [r + 1] * 3, [1, 2, 3]); return o",
        [torch.cat([g.split([1, 2, 3])[r] for g in GIVEN]) for r in range(N)],
        [40, 32, 24],
    ),
    "a message": (
        "\n    if r == 0: dist.send(x, 2)\n    if r == 2: dist.recv(x, 0)\n    dist.barrier(); return x",
        [GIVEN[0], GIVEN[1], GIVEN[0]],
        None,
    ),
    "a group of two": (
        "g = dist.new_group([0, 2])\n    if r != 1: dist.all_reduce(x, group=g)\n    return x",
        [GIVEN[0] + GIVEN[2], GIVEN[1], GIVEN[0] + GIVEN[2]],
        None,
    ),
    "a broadcast and a reduce in groups of two, asynchronous": (
        "\n    g = [dist.new_group([0, 1]), dist.new_group([1, 2])][r // 2]\n    y = x.clone()\n"
        "    if r < 2:\n        dist.broadcast(x, group=g, group_src=1, async_op=True).wait()\n"
        "        dist.reduce(y, group=g, group_dst=0, async_op=True).wait()\n"
        "    return x + (y if r == 0 else 0)",
        [GIVEN[1] + GIVEN[0] + GIVEN[1], GIVEN[1], GIVEN[2]],
        [0, 96, 0],  # the last of a broadcast sends nothing, nor does the root of a reduce
    ),
    "asynchronous": ("w = dist.all_reduce(x, async_op=True); w.wait(); return x", [SUM] * N, 64),
}


@pytest.mark.parametrize("name", CASES)
def test_operation(name: str):
    body, expected, wire = CASES[name]
    session = Session(N)
    try:
        session.run([({"do": "cells", "cells": [["cell 1", PROGRAM.format(body=body)]]}, [])] * N, 20)
        header = {
            "do": "function",
            "name": "operation",
            "settings": {"names": ["x"], "group": False, "options": {}},
        }
        outcome = session.run([(header, [x]) for x in GIVEN], 20)
    finally:
        session.close()
    assert outcome.fault is None, outcome.fault
    for rank in range(N):
        assert torch.equal(outcome.outputs[rank]["result"], expected[rank])
        sent = sum(m.wire for m in outcome.messages if m.rank == rank)
        assert wire is None or sent == pytest.approx(wire[rank] if isinstance(wire, list) else wire)


def test_a_message_says_among_which_ranks():
    hub, x = Hub(3), torch.ones(2, dtype=torch.float64)
    header = {"id": 0, "op": "all_reduce", "reduce": "sum", "group": [0, 2], "where": ["cell 1", 7]}
    hub.submit(2, {**header, "outputs": [["float64", [2]]]}, [x])
    assert [(m.rank, m.group) for m in hub.messages] == [(2, (0, 2))]


@pytest.mark.parametrize("op", ["broadcast", "scatter"])
def test_more_than_is_counted_cannot_be_sent(op: str):
    """A frame that announces an empty tensor and carries a full one."""
    header = {"id": 0, "op": op, "group": [0, 1], "where": ["cell 1", 7], "root": 0}
    with pytest.raises(ValueError, match=f"{op} sends tensors other than"):
        Hub(2).submit(0, {**header, "outputs": [["float64", [0]]]}, [torch.ones(2, dtype=torch.float64)] * 2)
