"""What a person gets when ranks fail: the table of failures, each with its time bound, and nothing left behind.

Bounds are generous, for machines at work on other things too; benchmarks/launch.py has the figures.
"""

import gc
import os
import pickle
import re
import resource
import signal
import socket
import tempfile
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

import tpcourse as tp
from tpcourse.launch import CollectiveMismatch, RankDied, RankRaised, RanksStuck, Unsendable, processes

SOON_S = 8.0


@pytest.fixture(scope="module", autouse=True)
def own_helper(tmp_path_factory):
    """A helper of this module's own, so that what it leaves behind is easy to see."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    before, processes._helper = processes._helper, None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        tp.spawn(lambda mesh: None, ranks=1)
        yield folder
        processes._helper.stop()
    processes._helper = before


@pytest.fixture(autouse=True)
def nothing_left(own_helper):
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    assert psutil.Process(processes.helper().process.pid).children(recursive=True) == []
    assert [name for name in os.listdir(own_helper) if name.startswith("tpcourse-")] == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert tp.spawn(lambda mesh: dist.get_rank(), ranks=2) == [0, 1], "the next cell works"


def fails(function, error, ranks=4, within=SOON_S, **options):
    begun = time.monotonic()
    with pytest.raises(error) as caught:
        tp.spawn(function, ranks=ranks, **options)
    assert time.monotonic() - begun < within
    return str(caught.value), caught.value


def line_of(text: str, after: int = 0) -> int:
    lines = open(__file__).read().split("\n")
    return next(i for i, line in enumerate(lines, 1) if text in line and i > after)


def test_one_rank_raises():
    def work(mesh):
        if dist.get_rank() == 2:
            raise ValueError("only rank two is wrong")
        dist.barrier()

    text, error = fails(work, RankRaised)
    assert text.startswith("rank 2 raised ValueError: only rank two is wrong\n")
    assert error.ranks == [2] and error.error_type == "ValueError"
    assert f"test_failures.py, line {line_of('only rank two is wrong')}, in work\n    raise ValueError" in text
    assert "Connection" not in text and "tpcourse/launch" not in text


def test_the_traceback_holds_only_the_persons_own_lines():
    def inner():
        torch.ones(2) @ torch.ones(3)

    def work(mesh):
        inner()

    text, _ = fails(work, RankRaised, ranks=2)
    assert re.findall(r", in (\w+)", text) == ["work", "inner"]


def test_every_rank_raises_the_same():
    text, error = fails(lambda mesh: 1 / 0, RankRaised)
    assert text.count("ZeroDivisionError") == 1 and text.startswith("ranks 0-3 raised") and error.ranks == [0, 1, 2, 3]


def test_ranks_raise_differently():
    def work(mesh):
        raise KeyError(f"mine is {dist.get_rank() // 2}")

    text, error = fails(work, RankRaised)
    assert text.startswith("ranks 0, 1 raised KeyError: 'mine is 0'") and "ranks 2, 3 KeyError: 'mine is 1'" in text


def test_a_rank_that_raises_beats_the_echoes_of_its_death():
    def work(mesh):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(3))

    for _ in range(5):
        text, error = fails(work, RankDied)
        assert error.ranks == [1] and text.startswith("rank 1 was ended by SIGKILL") and "memory" in text


def different_collectives(mesh):
    x = torch.ones(4)
    if dist.get_rank() == 1:
        dist.all_gather_into_tensor(torch.empty(16), x)
    else:
        dist.all_reduce(x)


def single_names(mesh):
    x = torch.ones(4)
    if dist.get_rank() == 1:
        dist.reduce_scatter_single(torch.empty(1), x)
    else:
        dist.all_reduce(x)


def shapes(mesh):
    dist.all_reduce(torch.ones(4 + (dist.get_rank() == 3)))


def dtypes(mesh):
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if dist.get_rank() == 1 else torch.float32))


def operations(mesh):
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if dist.get_rank() == 0 else dist.ReduceOp.SUM)


def roots(mesh):
    dist.broadcast(torch.ones(4), src=dist.get_rank() % 2)


def messages(mesh):
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(8), 0)


def functional_shapes(mesh):
    from torch.distributed import _functional_collectives as functional

    functional.all_reduce(torch.ones(4 + (dist.get_rank() == 3)), "sum", mesh).sum()


def caught_and_ignored(mesh):
    try:
        dtypes(mesh)
    except Exception:
        pass


@pytest.mark.parametrize("function, differ, odd, words", [
    (different_collectives, "operation", [1], ["all_gather", "all_reduce(SUM)"]),
    (single_names, "operation", [1], ["reduce_scatter(SUM)", "all_reduce(SUM)"]),
    (shapes, "shape", [3], ["[4]", "[5]"]), (dtypes, "dtype", [1], ["float64", "float32"]),
    (operations, "reduce operation", [0], ["all_reduce(MAX)", "all_reduce(SUM)"]), (roots, "root", [], ["root 0", "root 1"]),
    (messages, "shape", [1], ["send(to 1)", "recv(from 0)", "[4]", "[8]"]), (functional_shapes, "shape", [3], ["[4]", "[5]"]),
    (caught_and_ignored, "dtype", [1], ["float64", "float32"]),
])
def test_calls_that_do_not_fit_are_shown_as_a_table(function, differ, odd, words):
    text, error = fails(function, CollectiveMismatch)
    assert differ in text.split("\n")[0] and set(odd) <= set(error.ranks)
    assert text.split("\n")[1].split() == ["ranks", "call", "operation", "shape", "dtype", "group", "line"]
    assert all(word in text for word in words) and "test_failures.py, line" in text and "#1" in text


def test_a_mismatch_in_a_sub_group_names_the_dimension():
    def work(mesh):
        group = mesh.get_group("tp")
        dist.all_reduce(torch.ones(3), group=group)
        dist.all_reduce(torch.ones(2 if dist.get_rank() == 3 else 1), group=group)

    with pytest.raises(CollectiveMismatch) as caught:
        tp.spawn(work, mesh={"dp": 2, "tp": 2})
    assert "tp: ranks 2, 3" in str(caught.value) and "#2" in str(caught.value) and caught.value.ranks == [2, 3]


def test_a_rank_returns_while_others_wait():
    def work(mesh):
        if dist.get_rank() != 2:
            dist.all_reduce(torch.ones(4))

    text, error = fails(work, RanksStuck)
    assert "rank 0 waits in all_reduce(SUM) for rank 2" in text and "rank 2 returned without" in text
    assert f"line {line_of('dist.all_reduce(torch.ones(4))', line_of('def test_a_rank_returns_while'))}: dist.all_reduce" in text
    assert error.ranks == [0, 1, 3]


def test_everyone_sends_first():
    def work(mesh):
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.send(torch.ones(1_000_000), (rank + 1) % size)
        dist.recv(torch.ones(1_000_000), (rank - 1) % size)

    text, _ = fails(work, RanksStuck, ranks=3)
    assert text.startswith("deadlock") and "rank 2 waits in send(to 0) for rank 0" in text


def test_sub_groups_entered_in_another_order():
    def work(mesh):
        groups = [mesh.get_group("dp"), mesh.get_group("tp")]
        for group in groups if dist.get_rank() in (0, 3) else groups[::-1]:
            dist.all_reduce(torch.ones(1), group=group)

    begun = time.monotonic()
    with pytest.raises(RanksStuck, match="rank 0 waits in all_reduce"):
        tp.spawn(work, mesh={"dp": 2, "tp": 2})
    assert time.monotonic() - begun < SOON_S


def test_a_wait_for_an_asynchronous_receive_that_never_comes():
    def work(mesh):
        if dist.get_rank() == 0:
            request = dist.irecv(torch.ones(3), 1)
            request.wait()

    text, _ = fails(work, RanksStuck, ranks=2)
    assert "rank 0 waits in irecv(from 1) for rank 1" in text


def test_work_that_goes_on_is_not_taken_for_a_deadlock():
    def work(mesh):
        if dist.get_rank() == 0:
            time.sleep(1.0)
        x = torch.full((4,), float(dist.get_rank()))
        dist.all_reduce(x)
        requests = [dist.isend(x, 1 - dist.get_rank()), dist.irecv(torch.empty(4), 1 - dist.get_rank())]
        for request in requests:
            request.wait()
        return x.sum().item()

    assert tp.spawn(work, ranks=2) == [4.0, 4.0]


def test_an_endless_loop_ends_at_the_timeout_with_every_ranks_line():
    def work(mesh):
        if dist.get_rank() == 0:
            dist.barrier()
        while True:
            pass

    text, error = fails(work, RanksStuck, ranks=2, timeout=1, within=1 + SOON_S)
    assert "timeout=1 s" in text and "rank 0 waits in barrier for rank 1" in text and "rank 1 is still at work" in text
    assert f"line {line_of('dist.barrier()', line_of('def test_an_endless'))}" in text and "in work: pass" in text.replace(
        "while True:", "pass")


@pytest.mark.parametrize("end, says", [
    (lambda: os.kill(os.getpid(), signal.SIGSEGV), "SIGSEGV.*crash in native code"),
    (lambda: __import__("ctypes").string_at(0), r"SIGSEGV(.|\n)*It was at:\n.*test_failures.py, line \d+"),
    (lambda: os.abort(), "SIGABRT"), (lambda: os._exit(0), r"left with exit code 0.*os\._exit\(0\)"),
    (lambda: os._exit(3), "left with exit code 3"), (lambda: exit(4), r"sys.exit\(4\)"),
    (lambda: os.kill(os.getpid(), signal.SIGTERM), "SIGTERM"),
], ids=["kill -SEGV", "null pointer", "abort", "_exit(0)", "_exit(3)", "sys.exit", "SIGTERM"])
def test_a_rank_that_ends_is_named_with_the_way_it_ended(end, says):
    def work(mesh):
        if dist.get_rank() == 1:
            end()
        dist.barrier()

    text, error = fails(work, RankDied, ranks=3)
    assert error.ranks == [1] and re.search(says, text), text


def test_memory_that_runs_out_is_an_ordinary_error_or_a_kill_with_its_meaning():
    def work(mesh):
        if dist.get_rank() == 1:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
            torch.ones(8 << 30)
        dist.barrier()

    text, _ = fails(work, RankRaised, ranks=2)
    assert text.startswith("rank 1 raised RuntimeError") and "memory" in text


def test_a_world_survives_what_all_ranks_answered_and_ends_with_what_they_did_not():
    with tp.World(ranks=2) as world:
        with pytest.raises(RankRaised):
            world.run(lambda mesh: undefined_name)  # noqa: F821
        assert world.alive and world.run(lambda mesh: 1) == [1, 1]
        with pytest.raises(RanksStuck):
            world.run(lambda mesh: dist.get_rank() or dist.barrier())
        assert not world.alive
        with pytest.raises(tp.RankError, match="has ended.*wait for ever.*make a new one"):
            world.run(lambda mesh: 1)


def test_an_exception_whose_message_cannot_be_made_is_still_told():
    def work(mesh):
        class Odd(Exception):
            def __str__(self):
                raise KeyError

        raise Odd

    text, _ = fails(work, RankRaised, ranks=2)
    assert text.startswith("ranks 0, 1 raised Odd: (its message cannot be shown: KeyError)")


def test_an_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(RankRaised("rank 1 raised", [1], "KeyError")))
    assert (str(error), error.ranks, error.error_type) == ("rank 1 raised", [1], "KeyError")


def test_a_fork_that_returns_from_the_function_does_not_answer_for_its_rank():
    with tp.World(ranks=2) as world:
        world.run(lambda mesh: os.fork() and None)
        time.sleep(0.3)
        assert world.run(lambda mesh: "next") == world.run(lambda mesh: "next") == ["next"] * 2


def test_a_result_that_only_the_rank_can_read_is_named():
    def work(mesh):
        import sys
        import types

        module = sys.modules["only_there"] = types.ModuleType("only_there")
        exec("class Thing: pass", vars(module))
        return module.Thing()

    text, _ = fails(work, Unsendable, ranks=2)
    assert re.match("the result of rank . cannot be read outside of the rank: ModuleNotFoundError: .*'only_there'", text)


@pytest.mark.parametrize("error, told", [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(24, "Too many open files"), tp.RankError)])
def test_a_start_that_breaks_off_leaves_nothing(monkeypatch, error, told):
    start = processes.Processes._start

    def break_off(self, rank, setting):
        if rank == 2:
            raise error
        start(self, rank, setting)

    monkeypatch.setattr(processes.Processes, "_start", break_off)
    with pytest.raises(told):
        tp.spawn(lambda mesh: None, ranks=3)
    monkeypatch.undo()


def test_too_few_descriptors_for_so_many_ranks():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 25, hard))
    try:
        with pytest.raises(tp.RankError, match="rank . could not be started.*Too many open files.*fewer ranks"):
            tp.spawn(lambda mesh: None, ranks=20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_helper_lives_on_when_it_has_no_descriptors_left():
    limit = resource.prlimit(processes.helper().process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(processes.helper().process.pid, resource.RLIMIT_NOFILE, (12, limit[1]))
    try:
        with pytest.raises(tp.RankError, match="could not be started: .*Too many open files"):
            tp.spawn(lambda mesh: None, ranks=20)
    finally:
        resource.prlimit(processes.helper().process.pid, resource.RLIMIT_NOFILE, limit)


def test_an_interrupt_comes_through_while_the_helper_starts():
    helper = object.__new__(processes.Helper)
    helper.socket, theirs = socket.socketpair()  # nobody will answer
    helper.lock, helper.busy, helper.ready, helper.put_off = threading.RLock(), False, False, []
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begun = time.monotonic()
    with helper.socket, theirs, pytest.raises(KeyboardInterrupt):
        helper.ask("open")
    assert time.monotonic() - begun < SOON_S


def test_a_world_collected_in_the_middle_of_a_request_does_not_block_it(monkeypatch):
    cycle = [tp.World(ranks=1)]
    cycle.append(cycle)
    send_fds, cycle = socket.send_fds, None

    def collect_and_send(*args):
        gc.collect()
        return send_fds(*args)

    monkeypatch.setattr(processes.socket, "send_fds", collect_and_send)
    begun = time.monotonic()
    assert tp.spawn(lambda mesh: 1, ranks=1) == [1] and time.monotonic() - begun < SOON_S
    monkeypatch.undo()


def test_spawn_inside_a_rank_says_so():
    text, _ = fails(lambda mesh: tp.spawn(lambda mesh: None, ranks=2), RankRaised, ranks=2)
    assert "already a rank, one of 2" in text


def test_ranks_that_cannot_start_say_why():
    text, _ = fails(lambda mesh: None, RankRaised, ranks=2, threads=0)
    assert text.startswith("ranks 0, 1 raised RuntimeError: set_num_threads expects a positive integer")


def test_children_of_ranks_end_with_them_also_in_a_session_of_their_own():
    def work(mesh):
        import subprocess

        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    for pid in tp.spawn(work, ranks=2):
        assert not psutil.pid_exists(pid)


def test_the_helper_killed_is_told_and_replaced():
    with pytest.raises(tp.RankError):
        with tp.World(ranks=2) as world:
            os.kill(processes.helper().process.pid, signal.SIGKILL)
            world.run(lambda mesh: time.sleep(30))
    for name in os.listdir(tempfile.gettempdir()):  # only who kills the helper has to clean up after it
        __import__("shutil").rmtree(os.path.join(tempfile.gettempdir(), name))


def test_nothing_listens_beyond_loopback():
    def work(mesh):
        dist.all_reduce(torch.ones(3))
        return os.getpid()

    with tp.World(ranks=3) as world:
        pids = world.run(work) + [processes.helper().process.pid]
        listening = [c for pid in pids for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN]
        assert all(connection.laddr.ip in ("127.0.0.1", "::1") for connection in listening)
