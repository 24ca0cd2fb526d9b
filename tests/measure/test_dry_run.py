"""Meta tensors on a fake process group: the same books as real ranks, and thousands of ranks at once."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tpcourse.measure import ledger, saved_activations


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
