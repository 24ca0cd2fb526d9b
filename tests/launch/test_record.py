"""The record's judgement: odd but legal programs pass, and what hides in them is still found."""

import os
import tempfile
import threading
import time

import pytest
import torch
import torch.distributed as dist

import tpcourse as tp
from tpcourse.launch import CollectiveMismatch, RanksStuck
from tpcourse.launch.record import SLOTS, Log
from tpcourse.launch.verdict import Verdict


def a_group_that_only_its_members_make(mesh):
    if dist.get_rank() < 2:
        group = dist.new_group([1, 0], use_local_synchronization=True)
        dist.all_reduce(torch.ones(2), group=group)
    dist.all_reduce(torch.ones(3))


def collected_calls(mesh):
    from torch.distributed.distributed_c10d import _coalescing_manager

    x = [torch.ones(2), torch.ones(3)]
    with _coalescing_manager(group=dist.group.WORLD, async_ops=True) as manager:
        for part in x:
            dist.all_reduce(part, async_op=True)
    manager.wait()
    assert x[1].tolist() == [3.0] * 3


def receives_from_anyone(mesh):
    if dist.get_rank() == 1:
        dist.send(torch.ones(3), 0)
        dist.send(torch.full((5,), 2.0), 0)
    elif dist.get_rank() == 0:
        first, second = torch.zeros(3), torch.zeros(5)
        assert dist.recv(first) == 1
        dist.recv(second, 1)
        assert second.sum() == 10


def calls_of_two_threads(mesh):
    group = dist.new_group()

    def other():
        for _ in range(60):
            dist.all_reduce(torch.ones(7), group=group)

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(60):
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(4), 0)
    thread.join()


def a_thread_that_sends_later(mesh):
    rank, size, x = dist.get_rank(), dist.get_world_size(), torch.zeros(2)

    def later():
        time.sleep(0.4)
        dist.send(torch.ones(2), (rank + 1) % size)

    thread = threading.Thread(target=later)
    thread.start()
    dist.recv(x, (rank - 1) % size)
    thread.join()
    assert x.tolist() == [1, 1]


def works_waited_for_in_another_order(mesh):
    works = [dist.all_reduce(torch.ones(n), async_op=True) for n in range(1, 5)]
    for work in works if dist.get_rank() else works[::-1]:
        work.wait()


def a_batch_of_messages(mesh):
    rank, size, x, y = dist.get_rank(), dist.get_world_size(), torch.ones(5), torch.zeros(5)
    batch = [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, y, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()


def objects(mesh):
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [None] * size
    dist.all_gather_object(gathered, "x" * rank * 100)
    scattered = [None]
    dist.scatter_object_list(scattered, [[1], "2" * 500, {3}] if rank == 0 else None, 0)
    dist.gather_object("y" * rank, gathered if rank == 1 else None, dst=1)


def an_uneven_distributed_tensor(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = distribute_tensor(torch.arange(35.0).reshape(5, 7), mesh, [Shard(0)])
    assert torch.equal((x @ x.T).redistribute(mesh, [Replicate()]).to_local(), x.full_tensor() @ x.full_tensor().T)


def an_operation_made_from_a_constant(mesh):
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp(dist.ReduceOp.SUM))


def a_data_loader_with_workers(mesh):
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=1):
        dist.all_reduce(batch)


def compiled_code(mesh):
    from torch.distributed import _functional_collectives as functional

    twice = torch.compile(lambda x: functional.all_reduce(x * 2, "sum", mesh) + 1, backend="eager", fullgraph=True)
    assert twice(torch.ones(2)).tolist() == [7.0, 7.0]


@pytest.mark.parametrize("program", [
    a_group_that_only_its_members_make, collected_calls, receives_from_anyone, calls_of_two_threads, a_thread_that_sends_later,
    works_waited_for_in_another_order, a_batch_of_messages, objects, an_uneven_distributed_tensor,
    an_operation_made_from_a_constant, a_data_loader_with_workers, compiled_code,
])
def test_a_legal_program_passes(program):
    tp.spawn(program, ranks=3)


def distributed_tensor(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(torch.ones(6), mesh, [Shard(0)])
    if dist.get_rank() == 0:
        x.full_tensor()


def one_computes_on(mesh):
    if dist.get_rank() == 2:
        time.sleep(30)
    if dist.get_rank() == 0:
        dist.all_gather_into_tensor(torch.empty(3), torch.ones(1))


def from_anyone(mesh):
    if dist.get_rank() == 0:
        dist.recv(torch.ones(3))


@pytest.mark.parametrize("program, says", [
    (distributed_tensor, "rank 0 waits in all_gather for ranks 1, 2"), (one_computes_on, "rank 0 waits in all_gather for ranks 1, 2"),
    (from_anyone, r"rank 0 waits in recv\(from any\) for ranks 1, 2"),
])
def test_a_wait_for_who_returned_is_found_at_once(program, says):
    begun = time.monotonic()
    with pytest.raises(RanksStuck, match=says) as caught:
        tp.spawn(program, ranks=3, timeout=25)
    assert "rank 0 will wait for ever" in str(caught.value) and time.monotonic() - begun < 10


def test_ranks_that_call_on_different_groups_are_shown_as_a_table():
    def work(mesh):
        dist.all_reduce(torch.ones(2), group=mesh.get_group("dp" if dist.get_rank() in (0, 3) else "tp"))

    with pytest.raises(RanksStuck) as caught:
        tp.spawn(work, mesh={"dp": 2, "tp": 2})
    text = str(caught.value)
    assert "dp: ranks 0, 2" in text and "tp: ranks 2, 3" in text and "ranks  call  operation" in text


def test_different_groups_to_make_are_named():
    with pytest.raises(CollectiveMismatch, match=r"new_group  all ranks(.|\n)*new_group  \[0\]"):
        tp.spawn(lambda mesh: dist.new_group([0] if dist.get_rank() else None) and None, ranks=2)


def test_a_call_that_returns_at_once_is_not_a_wait():
    def work(mesh):
        from tpcourse.launch.worker import recorder

        seen = []
        for name in ("isend", "all_reduce"):
            call = recorder._wrap(name, lambda tensor, dst=0, group=None, async_op=False: seen.append(recorder.log.waiting()))
            call(torch.ones(1), async_op=True)
        call(torch.ones(1))
        return seen

    assert tp.spawn(work, ranks=1) == [[None, None, 2]]


def test_a_place_too_long_for_the_record_does_no_harm():
    def work(mesh):
        names = {"torch": torch, "dist": dist}
        exec(compile("def f(): dist.all_reduce(torch.ones(2))", f"/{'long/' * 200}file.py", "exec"), names)
        if dist.get_rank():
            names["f"]()

    with pytest.raises(RanksStuck, match="rank 1 waits in all_reduce"):
        tp.spawn(work, ranks=2)


def test_a_record_that_went_round_between_two_looks_is_matched_rightly():
    files = [tempfile.TemporaryFile() for _ in range(2)]
    logs = [Log(file.fileno(), create=True) for file in files]
    verdict = Verdict([file.fileno() for file in files])

    def note(rank, turns, shape=None):
        for turn in turns:
            logs[rank].add(["all_reduce", str(turn), "0", "0:2:1", "tp", f"[{shape or turn}]", "float32", "SUM", "", "0", "f.py:1"])

    note(0, range(SLOTS + 500))
    note(1, range(300))
    verdict.update()
    note(1, range(300, SLOTS + 400))
    verdict.update()
    note(1, range(SLOTS + 400, SLOTS + 499))
    verdict.update()
    assert not verdict.mismatch() and len(verdict.open) == 1
    logs[1].wait_in(SLOTS + 498)
    assert verdict.waits()[1][1] == []
    note(1, [SLOTS + 499], shape=7)
    verdict.update()
    assert [call.shape for call in verdict.mismatch()] == [f"[{SLOTS + 499}]", "[7]"]
    verdict.close()


def test_a_slot_being_written_over_is_not_read():
    with tempfile.TemporaryFile() as file:
        log = Log(file.fileno(), create=True)
        for turn in range(SLOTS + 1):
            log.add(["barrier", str(turn), "0", "0:2:1", "", "", "", "", "", "0", os.devnull])
        assert log.read(0, 1) is None and log.read(0, 2).turn == 2
        assert [call.number for call in log.since(0, 0)] == list(range(2, SLOTS + 1))
