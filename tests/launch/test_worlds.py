"""Worlds and spawn when all goes well: values, arguments, results, output."""

import os
import random
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

import tpcourse as tp
from tpcourse.launch import Unsendable, WorldClosed
from tpcourse.launch.output import Tape, merged, name_ranks


@pytest.fixture(scope="module")
def world():
    with tp.World(ranks=3) as ranks:
        yield ranks


def test_the_function_gets_the_mesh_and_the_arguments_and_results_come_in_rank_order():
    def place(mesh, offset):
        return mesh.mesh_dim_names, list(mesh.get_coordinate()), dist.get_rank() + offset

    outs = tp.spawn(place, 10, mesh={"dp": 2, "tp": 2})
    assert outs == [(("dp", "tp"), [r // 2, r % 2], 10 + r) for r in range(4)]


def test_ranks_really_exchange_data(world):
    def total(mesh, x):
        y = x + dist.get_rank()
        dist.all_reduce(y)
        return y

    outs = world.run(total, torch.ones(3, dtype=torch.float64))
    assert all(torch.equal(out, torch.full((3,), 6.0, dtype=torch.float64)) for out in outs)


def test_ranks_are_processes_of_their_own_that_stay(world):
    first = world.run(lambda mesh: os.getpid())
    assert len({*first, os.getpid()}) == 4
    assert world.run(lambda mesh: os.getpid()) == first


def test_closures_lambdas_and_local_classes_travel(world):
    factor = 7

    class Pair:
        def __init__(self, left):
            self.left = left

    assert [pair.left for pair in world.run(lambda mesh: Pair(factor * dist.get_rank()))] == [0, 7, 14]


def test_tensors_come_back_plain(world):
    def make(mesh):
        base = torch.arange(6.0, requires_grad=True)
        return {"grad": base * 2, "view": base[1:3].t(), "parameter": torch.nn.Parameter(torch.ones(2)),
                "half": torch.ones(2, dtype=torch.bfloat16), "empty": torch.empty(0, 3), "scalar": torch.tensor(5),
                "strided": torch.arange(6).reshape(2, 3).T, "flag": torch.tensor([True, False]), "complex": torch.ones(1) * 1j}

    out = world.run(make)[1]
    assert all(type(t) is torch.Tensor and not t.requires_grad and t.device.type == "cpu" for t in out.values())
    assert out["view"].untyped_storage().nbytes() == 8, "a view must not bring its base along"
    assert out["strided"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert out["half"].dtype == torch.bfloat16 and out["empty"].shape == (0, 3) and out["complex"].item() == 1j


def test_arguments_keep_requires_grad_and_modules_stay_modules(world):
    def check(mesh, x, layer):
        layer(x).sum().backward()
        return x.requires_grad, isinstance(layer.weight, torch.nn.Parameter), x.grad

    layer = torch.nn.Linear(2, 3)
    for needs, is_parameter, grad in world.run(check, torch.ones(1, 2, requires_grad=True), layer):
        assert needs and is_parameter
        assert torch.allclose(grad, layer.weight.sum(0, keepdim=True))


@pytest.mark.parametrize("make, hint", [
    (lambda: torch.nn.Linear(2, 2), "state_dict"),
    (lambda: (i for i in range(3)), "generator"),
    (lambda: __import__("threading").Lock(), "lock"),
], ids=["module", "generator", "lock"])
def test_a_result_that_cannot_travel_is_named_with_its_place(world, make, hint):
    with pytest.raises(Unsendable, match=r"result\['deep'\]\[1\].*" + hint):
        world.run(lambda mesh: {"fine": 1, "deep": [2, make()]})
    assert world.run(lambda mesh: "next") == ["next"] * 3


def test_a_dtensor_result_says_what_to_return_instead(world):
    def make(mesh):
        from torch.distributed.tensor import Shard, distribute_tensor

        return distribute_tensor(torch.ones(6), mesh, [Shard(0)])

    with pytest.raises(Unsendable, match="to_local"):
        world.run(make)


def test_an_argument_that_cannot_travel_is_named(world):
    with pytest.raises(Unsendable, match="argument 2 .*lock"):
        world.run(lambda mesh, a, b: None, 1, __import__("threading").Lock())
    assert world.run(lambda mesh: "next") == ["next"] * 3


def test_output_is_in_rank_order_and_equal_outputs_are_merged(world, capfd):
    def speak(mesh):
        rank = dist.get_rank()
        if rank == 0:
            __import__("time").sleep(0.1)
        print("same" if rank != 1 else "other\nlines")
        os.system("echo from a child process")

    world.run(speak)
    assert capfd.readouterr().out == ("[ranks 0, 2] same\n             from a child process\n"
                                      "[rank 1] other\n         lines\n         from a child process\n")


def test_a_progress_bar_leaves_its_last_state(world, capfd):
    def progress(mesh):
        for i in range(0, 101, 50):
            print(f"\r{i}%" + "#" * (i // 50), end="", file=sys.stderr, flush=True)

    world.run(progress)
    assert capfd.readouterr().out == "[ranks 0-2] 100%##\n"


def test_much_output_is_cut_in_the_middle_and_counted():
    tape = Tape()
    tape.add(b"first\n")
    for _ in range(300):
        tape.add(b"x" * 1_000_000)
    tape.add(b"\nlast")
    text = tape.text()
    assert text.startswith("first\n") and text.endswith("last") and "300.0 MB left out" in text and len(text) < 60_000


def test_names_of_ranks():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([1, 0]) == "ranks 0, 1"
    assert name_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7, 8"
    assert merged(["a", "b", "a", ""]) == "[ranks 0, 2] a\n[rank 1] b"


def test_environment_folder_and_path_are_the_parents_of_now(world, tmp_path, monkeypatch):
    (tmp_path / "beside_the_notebook.py").write_text("VALUE = 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPCOURSE_TEST_VARIABLE", "seen")
    monkeypatch.syspath_prepend(str(tmp_path))

    def look(mesh):
        import beside_the_notebook

        return beside_the_notebook.VALUE, os.environ["TPCOURSE_TEST_VARIABLE"], os.getcwd(), "GLIBC_TUNABLES" in os.environ

    assert tp.spawn(look, ranks=1) == [(42, "seen", str(tmp_path), "GLIBC_TUNABLES" in os.environ)]


def test_each_rank_has_one_thread_unless_told_otherwise():
    assert tp.spawn(lambda mesh: torch.get_num_threads(), ranks=1) == [1]
    assert tp.spawn(lambda mesh: torch.get_num_threads(), ranks=1, threads=2) == [2]


def test_fresh_ranks_draw_the_same_random_numbers_each_time():
    random.seed()
    one, two = (tp.spawn(lambda mesh: torch.rand(2), ranks=2) for _ in range(2))
    assert torch.equal(torch.stack(one), torch.stack(two)) and torch.equal(one[0], one[1])


@pytest.mark.parametrize("function, args", [(lambda: 3, ()), (lambda mesh: 3, (1,)), (lambda mesh, x: 3, ())])
def test_a_function_that_cannot_take_the_mesh_and_the_arguments_is_refused_at_once(world, function, args):
    with pytest.raises(TypeError, match=r"<lambda>\(.*\) is called on each rank with the mesh and then your \d arg"):
        world.run(function, *args)
    assert world.run(lambda *everything, **options: len(everything), 1) == [2, 2, 2]


def test_a_closed_world_says_so():
    world = tp.World(ranks=1)
    world.close()
    world.close()
    assert not world.alive and "ended" in repr(world)
    with pytest.raises(WorldClosed, match="closed.*make a new one"):
        world.run(lambda mesh: 1)


def test_worlds_live_side_by_side():
    with tp.World(ranks=2) as one, tp.World(mesh={"a": 1, "b": 2}) as two:
        assert one.run(lambda mesh: mesh.mesh_dim_names) == [("tp",)] * 2
        assert two.run(lambda mesh: mesh.mesh_dim_names) == [("a", "b")] * 2


@pytest.mark.parametrize("asked, error, says", [
    ({"ranks": 0}, ValueError, "from 1 to"), ({"ranks": -1}, ValueError, "not -1"), ({"ranks": 2.5}, ValueError, "not 2.5"),
    ({"ranks": 10**6}, ValueError, "1,000,000.*at most"), ({"ranks": True}, ValueError, "not True"),
    ({"mesh": {"tp": 2}, "ranks": 2}, ValueError, "one way"), ({}, ValueError, "how many ranks"),
    ({"mesh": [2, 2]}, TypeError, "name its dimensions"), ({"mesh": {2: 2}}, ValueError, "named by a word"),
    ({"mesh": {"a": 500, "b": 500}}, ValueError, "250,000"), ({"ranks": 2, "backend": "mpi"}, ValueError, "'nccl' or 'gloo'"),
])
def test_impossible_worlds_are_refused_at_once(asked, error, says):
    with pytest.raises(error, match=says):
        tp.spawn(lambda mesh: None, **asked)


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="this machine has the GPUs")
def test_nccl_without_gpus_says_what_is_possible():
    with pytest.raises(ValueError, match=r"2 ranks.*has [01].*backend='gloo'"):
        tp.spawn(lambda mesh: None, ranks=2, backend="nccl")


def test_the_backend_can_be_forced_for_a_session(monkeypatch):
    monkeypatch.setenv("TPCOURSE_BACKEND", "gloo")
    assert tp.spawn(lambda mesh: dist.get_backend(), ranks=1) == ["gloo"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_on_a_gpu_the_default_device_is_the_ranks_own_and_tensors_come_back_on_the_cpu():
    def f(mesh, x):
        y = x + torch.ones(2)
        dist.all_reduce(y)
        return y.device.type, y

    assert tp.spawn(f, torch.ones(2), ranks=1)[0][0] == "cuda"
    assert tp.spawn(f, torch.ones(2), ranks=1)[0][1].device.type == "cpu"


@pytest.mark.parametrize("start", [["script"], ["-c"]], ids=["script", "python -c"])
def test_scripts_need_no_main_guard(tmp_path, start):
    program = textwrap.dedent("""
        import torch, torch.distributed as dist, tpcourse as tp
        def twice(mesh, x):
            return 2 * x + dist.get_rank()
        print(tp.spawn(twice, 5, ranks=2))
    """)
    (tmp_path / "script.py").write_text(program)
    command = [sys.executable, *(["-c", program] if start == ["-c"] else [str(tmp_path / "script.py")])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("[10, 11]\n") and done.returncode == 0, done.stderr


def test_files_beside_a_script_hide_no_module_and_a_fork_of_it_holds_up_nothing(tmp_path):
    (tmp_path / "queue.py").write_text("raise SystemExit('a file of the learner')")
    program = textwrap.dedent("""
        import sys
        sys.path.remove("")  # as in a notebook, where modules are looked for elsewhere first
        import os, time, tpcourse as tp
        tp.spawn(lambda mesh: 1, ranks=1)
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                time.sleep(0.1)
            os._exit(0)
        print(time.time())
    """)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert __import__("time").time() - float(done.stdout.split()[-1]) < 4


def test_a_long_script_prints_lines_as_they_come(tmp_path):
    program = "import time, tpcourse as tp\ndef f(mesh):\n    for i in range(3):\n        print('step', i); time.sleep(0.5)\ntp.spawn(f, ranks=2)"
    process = subprocess.Popen([sys.executable, "-uc", program], stdout=subprocess.PIPE, text=True)
    seen = [line for line in iter(process.stdout.readline, "") if "step" in line and (process.poll() is None)]
    assert process.wait(30) == 0
    assert seen[0] == "[ranks 0, 1] step 0\n" and "step 2" in seen[-1]


def test_the_same_script_runs_under_torchrun(tmp_path):
    program = "import torch, torch.distributed as dist, tpcourse as tp\nouts = tp.spawn(lambda mesh: mesh.get_local_rank('tp') + 10, ranks=2)\n" \
              "view = tp.spawn(lambda mesh: torch.ones(99, requires_grad=True)[:2], ranks=2)[1]\n" \
              "print(f'{outs} {view.requires_grad} {view.untyped_storage().nbytes()}\\n', end='')\ndist.destroy_process_group()"
    (tmp_path / "script.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.count("[10, 11] False 8") == 2, done.stdout + done.stderr
