"""The cell magic in a real Jupyter kernel: output, errors with the cell's real lines, interrupt, and a killed kernel."""

import os
import re
import signal
import time

import psutil
import pytest
from kernels import Kernel

from tpcourse.launch.magic import parse


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    assert not kernel.run("%load_ext tpcourse").error
    kernel.run("%%ranks tp=4\npass")
    yield kernel
    kernel.close()


def ranks_of(kernel) -> list[psutil.Process]:
    return psutil.Process(kernel.manager.provisioner.pid).children(recursive=True)


def test_the_namespace_lasts_and_equal_outputs_are_merged(kernel):
    kernel.run("%%ranks tp=4\nx = torch.ones(2) * rank\ndist.all_reduce(x)")
    assert kernel.run("%%ranks tp=4\nx").text == "[ranks 0-3] tensor([6., 6.])\n"
    assert kernel.run("%%ranks tp=4\nprint(rank % 2)\nworld_size").text == (
        "[ranks 0, 2] 0\n             4\n[ranks 1, 3] 1\n             4\n")


def test_the_mesh_has_the_named_dimensions_the_last_varying_fastest(kernel):
    text = kernel.run("%%ranks dp=2 tp=2\nmesh.get_local_rank('dp'), mesh.get_local_rank('tp')").text
    assert text == "[rank 0] (0, 0)\n[rank 1] (0, 1)\n[rank 2] (1, 0)\n[rank 3] (1, 1)\n"


def test_what_a_cell_defines_pickles_by_name(kernel):
    cell = "%%ranks tp=4\nimport pickle\nclass Pair: pass\ntype(pickle.loads(pickle.dumps(Pair()))) is Pair"
    assert kernel.run(cell).text == "[ranks 0-3] True\n"


def test_values_can_be_kept(kernel):
    kernel.run("%%ranks tp=4 out=squares\nrank ** 2")
    assert kernel.run("squares").text == "[0, 1, 4, 9]\n"


def test_an_error_shows_the_cells_real_line_and_nothing_of_ours(kernel):
    outcome = kernel.run("%%ranks tp=4\n\nif rank == 2:\n    raise ValueError('no')\ndist.barrier()")
    lines = outcome.traceback.split("\n")
    assert lines[0] == "RankRaised: rank 2 raised ValueError: no"
    assert re.fullmatch(r"  this cell, line 4", lines[1]) and lines[2] == "    raise ValueError('no')"
    assert "tpcourse" not in outcome.traceback
    assert outcome.seconds < 8


def test_a_function_of_an_earlier_cell_shows_that_cells_line(kernel):
    kernel.run("import tpcourse as tp, torch, torch.distributed as dist\ndef broken(mesh):\n    return [][mesh.get_rank()]")
    outcome = kernel.run("tp.spawn(broken, ranks=2)")
    assert re.search(r"cell In\[\d+\], line 3, in broken\n    return \[\]\[mesh.get_rank\(\)\]", outcome.traceback)


def test_after_a_failure_fresh_ranks_say_what_is_lost(kernel):
    kernel.run("%%ranks tp=4\nkept = 1")
    assert "NameError" in kernel.run("%%ranks tp=4\nundefined").error
    assert kernel.run("%%ranks tp=4\nkept").text == "[ranks 0-3] 1\n"
    assert "RanksStuck" in kernel.run("%%ranks tp=4\nif rank: dist.barrier()").error
    outcome = kernel.run("%%ranks tp=4\nkept")
    assert "fresh ranks" in outcome.text and "NameError" in outcome.error


def test_a_syntax_error_is_shown_once_with_its_line(kernel):
    outcome = kernel.run("%%ranks tp=4\nx = 1\ndef f(:")
    assert re.search(r"SyntaxError: invalid syntax\n  this cell, line 3\n    def f\(:\n          \^", outcome.traceback)


def test_a_wrong_line_shows_the_right_form(kernel):
    outcome = kernel.run("%%ranks four\npass")
    assert "write name=value, as in: %%ranks tp=4" in outcome.traceback and "tpcourse/launch" not in outcome.traceback


@pytest.mark.parametrize("line", ["", "tp", "tp=four", "=4", "timeout=3", "tp=0", "tp=-1", "tp=4 timout=3", "tp=4 recrod=2", "tp=2 timeout=soon", "tp=2 record=of", "tp=2 out=2x"])
def test_lines_that_make_no_world(line):
    with pytest.raises(ValueError):
        parse(line)


def test_the_line_of_the_magic():
    assert parse("dp=2 tp=3 timeout=10 record=off out=y") == ({"dp": 2, "tp": 3}, {"timeout": "10", "record": "off", "out": "y"})


def test_output_comes_live_where_somebody_watches_and_ends_the_same(kernel):
    cell = "%%ranks tp=2\nimport time\nfor step in range(6):\n    print('step', step)\n    time.sleep(0.3)"
    watched, unattended = kernel.run(cell, watched=True), kernel.run(cell)
    assert watched.updates >= 2 and unattended.updates == 0
    assert watched.text == unattended.text and watched.text.startswith("[ranks 0, 1] step 0\n")
    assert unattended.messages.count("display_data") == 1


def test_an_interrupt_stops_the_ranks_and_not_the_notebook(kernel):
    started = kernel.start("%%ranks tp=2\nwhile True: pass")
    time.sleep(1.5)
    begun = time.monotonic()
    kernel.manager.interrupt_kernel()
    outcome = kernel.finish(started)
    assert outcome.error.startswith("KeyboardInterrupt") and time.monotonic() - begun < 8
    assert outcome.traceback == "KeyboardInterrupt"
    assert kernel.run("%%ranks tp=2\nrank").text.endswith("[rank 0] 0\n[rank 1] 1\n")


def test_a_kernel_that_has_used_threads_still_starts_ranks(kernel):
    kernel.run("a = torch.randn(600, 600); (a @ a).sum()")
    assert kernel.run("tp.spawn(lambda mesh: mesh.size(), ranks=2)").text.endswith("[2, 2]\n")


def test_kernels_side_by_side_do_not_meet(kernel):
    other = Kernel()
    try:
        other.run("%load_ext tpcourse")
        other.run("%%ranks tp=4\nmine = 'other'")
        kernel.run("%%ranks tp=4\nmine = 'first'")
        assert other.run("%%ranks tp=4\nmine").text.endswith("[ranks 0-3] 'other'\n")
        assert kernel.run("%%ranks tp=4\nmine").text.endswith("[ranks 0-3] 'first'\n")
    finally:
        other.close()


@pytest.mark.parametrize("at_work", [True, False], ids=["busy ranks", "idle ranks"])
def test_no_rank_outlives_a_killed_kernel(at_work):
    kernel = Kernel()
    try:
        kernel.run("%load_ext tpcourse")
        kernel.run("%%ranks tp=3\nimport subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)")
        if at_work:
            kernel.start("%%ranks tp=3\nimport signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass")
            time.sleep(0.5)
        family = ranks_of(kernel)
        assert len(family) >= 7  # the helper, three ranks, their three children
        os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)
        _, left = psutil.wait_procs(family, timeout=8)
        assert [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        kernel.close()
