"""Meta tensors on a fake process group: the same books as real ranks, and thousands of ranks at once."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import tpcourse as tp
from tpcourse.measure import dry_run, ledger, saved_activations


@pytest.fixture
def fake_mesh():
    def start(shape, names):
        dist.init_process_group(
            "cpu:fake,meta:fake", store=FakeStore(), rank=0, world_size=torch.Size(shape).numel()
        )
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    yield start
    dist.destroy_process_group()


def train(mesh, device):
    from tpcourse.comm import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter, ring_shift

    x = torch.ones(8, 12, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = torch.nn.Parameter(torch.ones(12, 12, device=device, dtype=torch.bfloat16))

    def block(x):
        x = all_gather(x, mesh["dp"], 1) @ torch.cat([w, w])
        x = reduce_scatter(torch.sin(x), mesh["tp"], 0)
        return broadcast(all_to_all(ring_shift(x, mesh["tp"]), mesh["tp"], 1, 0), mesh["dp"], 1)

    with ledger(mesh) as book, saved_activations() as mem:
        y = block(x) + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        all_reduce(y, mesh["dp"]).sum().backward()
    return book, mem


def test_the_same_as_real_ranks(square, fake_mesh):
    book, mem = square.run(train, "cpu")[0]
    dry_book, dry_mem = train(fake_mesh((2, 2), ("dp", "tp")), "meta")
    assert dry_book.calls == book.calls
    assert dry_mem == mem
    assert {row.phase for row in book.rows} == {"forward", "backward", "recomputation"} and mem.bytes > 0


def test_four_thousand_ranks(fake_mesh):
    mesh = fake_mesh((16, 16, 16), ("i", "j", "l"))
    x = torch.empty(2048, 12288 // 16, device="meta", dtype=torch.bfloat16)
    with ledger(mesh) as book:
        dist.all_reduce(x, group=mesh.get_group("l"))
        dist.all_reduce(x, group=mesh.get_group("j"))
        dist.all_reduce(x)
    size = 2048 * 768 * 2
    expected = [("l", size * 2 * 15 / 16), ("j", size * 2 * 15 / 16), ("world", size * 2 * 4095 / 4096)]
    assert [(row.dim, row.wire_bytes) for row in book.rows] == expected


def test_uneven_lists(fake_mesh):
    """Lists that NCCL takes and gloo does not: rank 0 of 3 keeps 1 row of 6; all_gather gives the mean."""
    fake_mesh((3,), ("tp",))
    rows = [torch.empty(n, 4, device="meta") for n in (1, 2, 3)]
    with ledger() as book:
        dist.all_to_all([torch.empty_like(row) for row in rows], rows)
        dist.all_gather([torch.empty_like(row) for row in rows], rows[0])
    assert [(row.op, row.message_bytes, row.wire_bytes) for row in book.rows] == [
        ("all_to_all", 6 * 16, 5 * 16),
        ("all_gather", 6 * 16, 4 * 16),
    ]


def gpt_step(mesh, sequence_parallel, recompute, batch, sizes):
    """One step of a GPT; without a clause about values, so that it runs dry."""
    from tpcourse.models import GPT
    from tpcourse.schemes import OneD

    model = GPT(OneD(mesh["tp"], sequence_parallel), **sizes, recompute=recompute, dropout=0.1).to(torch.bfloat16)
    ids = torch.zeros(batch, sizes["context"], dtype=torch.long)
    model.loss(ids, ids).backward()
    return sum(p.numel() for p in model.parameters())


def real_step(mesh, step, *args):
    with ledger(mesh) as book, saved_activations() as mem:
        value = step(mesh, *args)
    return book, mem, value


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_gpt_runs_dry_as_on_real_ranks(two, sequence_parallel, recompute):
    """Message by message. Of the kept bytes only the norms' statistics differ: meta keeps them in float32."""
    sizes = dict(vocab_size=12, context=6, dim=8, num_layers=2, num_heads=4)
    args = (sequence_parallel, recompute, 2, sizes)
    book, mem, value = two.run(real_step, gpt_step, *args)[0]
    dry = dry_run(gpt_step, *args, mesh={"tp": 2})
    tokens = 12 // (2 if sequence_parallel else 1)
    norms = 5 if recompute != "full" else 1
    assert dry.book.calls == book.calls and len(book.calls) > 10 and dry.value == value
    assert dry.activations.bytes - mem.bytes == norms * tokens * 2 * (4 - 2)
    assert not torch.distributed.is_initialized()


def test_a_layer_of_gpt3_on_4096_ranks():
    """Two all-reduces forward and two backward of s b h numbers in 16 bit, and those of embedding and head."""
    sizes = dict(vocab_size=51200, context=2048, dim=12288, num_layers=1, num_heads=96)
    dry = tp.dry_run(gpt_step, False, "none", 1, sizes, mesh={"dp": 512, "tp": 8})
    message = 2048 * 12288 * 2
    rows = {phase: dry.book.total("message_bytes", op="all_reduce", dim="tp", phase=phase)
            for phase in ("forward", "backward")}
    loss = 2048 * 4 * 3  # greatest logit; sum of exponentials and target's logit: in float32
    assert rows == {"forward": 3 * message + loss, "backward": 3 * message}


def test_refuses_what_cannot_be(two):
    def inside(mesh):
        with pytest.raises(RuntimeError, match="real process group"):
            dry_run(print, mesh={"tp": 2})

    with pytest.raises(ValueError, match="rank 4 is not one of the 4 ranks"):
        dry_run(print, mesh={"dp": 2, "tp": 2}, rank=4)
    two.run(inside)
    with pytest.raises(ZeroDivisionError):
        dry_run(lambda mesh: 1 / 0, mesh={"tp": 2})
    assert not torch.distributed.is_initialized()
