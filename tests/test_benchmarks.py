"""The benchmarks print what they measured: launch.py reads errors rightly, layers.py times no wrong library."""

import contextlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest
import torch

import tpcourse as tp

FOLDER = Path(__file__).parents[1] / "benchmarks"


@contextlib.contextmanager
def loaded(name):
    sys.path.insert(0, str(FOLDER))  # as it is for a script
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def launch():
    with loaded("launch") as module:
        yield module


@pytest.fixture(scope="module")
def layers():
    with loaded("layers") as module:
        cloudpickle.register_pickle_by_value(module)  # as a script's functions are
        yield module
        cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.parametrize(("verdict", "error"), [
    ("rank 2, its message", "RankRaised: ValueError on rank 2: these shapes do not fit\nranks 0, 1, 3 were waiting"),
    ("rank 2, its message", "ProcessRaisedException: \n\n-- Process 2 terminated:\nValueError: these shapes do not fit"),
    ("wrong rank (0), its message lost", "ChildFailedError: FAILED\n  rank      : 0 (local_rank: 0)\nConnection closed"),
    ("no rank named, its message", "RayTaskError: ray::Rank.call() (pid=23, repr=<Rank object>)\nthese shapes do not fit"),
    ("no error", ""),
], ids=range(5))
def test_an_error_is_judged_by_the_rank_it_names_first_and_by_its_message(launch, error, verdict):
    assert launch.judge(launch.Outcome(1.0, error=error)) == verdict


def test_the_table_shows_medians_ratios_and_what_went_wrong(launch, monkeypatch):
    monkeypatch.setattr(launch, "is_installed", lambda contender: contender.name != "Ray actors")
    results = launch.Results()
    results.seconds = {("tpcourse", 4, "fresh"): [0.9, 0.05, 0.06], ("torch mp.spawn", 4, "fresh"): [3.0],
                       ("tpcourse", 4, "warm"): [0.004], ("ipyparallel", 4, "warm"): [0.026]}
    results.remarks = {("ipyparallel", 4, "fails"): "hangs"}
    rows = {row[1]: row[2:] for row in launch.table(results, [4])}
    assert rows["tpcourse"] == ["-", "60 ms", "4.0 ms", "-"]
    assert rows["torch mp.spawn"] == ["-", "3,000 ms (x50)", "-", "-"]
    assert rows["ipyparallel"] == ["-", "-", "26 ms (x6.5)", "hangs"]
    assert rows["Ray actors"] == ["not installed", "-", "-", "-"]


def test_markdown_goes_between_the_markers_and_nowhere_else(launch, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- benchmark:launch -->\nold\n<!-- /benchmark:launch -->\nafter\n")
    launch.put_into(readme, "launch", launch.markdown([["a", "b"], ["1", "2"]], ["note"]))
    table = "| a | b |\n| --- | --- |\n| 1 | 2 |\n\n- note\n"
    assert readme.read_text() == f"before\n<!-- benchmark:launch -->\n{table}<!-- /benchmark:launch -->\nafter\n"
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="no place for the table"):
        launch.put_into(readme, "launch", "text")


@pytest.mark.parametrize("name", ["launch", "layers"])
def test_the_readme_has_a_place_for_each_table(launch, tmp_path, name):
    readme = tmp_path / "README.md"
    readme.write_text((FOLDER.parent / "README.md").read_text())
    launch.put_into(readme, name, "fresh")
    assert f"<!-- benchmark:{name} -->\nfresh\n<!-- /benchmark:{name} -->" in readme.read_text()


def test_a_cell_that_does_not_end_counts_as_hung(launch):
    with launch.Kernel() as kernel:
        assert kernel.run("1 + 1").error == ""
        assert kernel.run("1 / 0").error == "ZeroDivisionError: division by zero"
        assert kernel.run("import time; time.sleep(60)", limit=0.5).hung


def test_tpcourse_takes_part(launch, monkeypatch):
    monkeypatch.setattr(launch, "FRESH", 1)
    monkeypatch.setattr(launch, "WARM", 2)
    monkeypatch.setattr(launch, "SETTLE_S", 0)
    results = launch.Results()
    launch.session(launch.CONTENDERS[0], 3, results)
    assert {name: len(results.seconds["tpcourse", 3, name]) for name in launch.COLUMNS} == \
        {"first": 1, "fresh": 1, "warm": 2, "fails": 1}
    assert results.remarks == {("tpcourse", 3, "fails"): "rank 2, its message"}


TOKENS, DIM = 2 * 3, 8
TINY = {"batch": 2, "sequence": 3, "dim": DIM, "heads": 2, "vocab": 10, "rounds": 2, "steps": 1}
SENT = {  # calls and numbers that one of two ranks puts on the wire; calls with sequence parallelism
    "MLP": (2, 2 * TOKENS * DIM, 5),
    "attention": (2, 2 * TOKENS * DIM, 5),
    "embedding + loss": (4, 2 * TOKENS * DIM + 3 * TOKENS, 7),
    "block": (4, 4 * TOKENS * DIM, 12),
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("layer", SENT)
def test_layers_of_tpcourse_and_dtensor_are_compared_and_timed(layers, two, layer, sequence_parallel):
    outs = two.run(layers.compare, layer, layers.Size(**TINY), sequence_parallel, ["tpcourse", "DTensor"])
    assert [set(out) for out in outs] == [{"tpcourse", "DTensor"}] * 2
    assert all(len(seconds) == 2 and min(seconds) > 0 for out in outs for seconds, *_ in out.values())
    calls, numbers, calls_of_sequence_parallel = SENT[layer]
    if sequence_parallel:
        assert outs[0]["tpcourse"][1] == calls_of_sequence_parallel
    else:
        assert outs[0]["tpcourse"][1:] == (calls, 4 * numbers)


def test_a_library_whose_gradients_are_wrong_is_not_timed(layers, two, monkeypatch):
    def doubled(*args):
        contender = layers.tpcourse(*args)
        return replace(contender, finish=lambda model: model.up.bias.grad.mul_(2))

    monkeypatch.setitem(layers.LIBRARIES, "DTensor", ("torch", doubled))
    with pytest.raises(tp.RankError, match="DTensor: up.bias differs from one process' by 1e"):
        two.run(layers.compare, "MLP", layers.Size(**TINY), False, ["tpcourse", "DTensor"])


@pytest.mark.parametrize("wrong", [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, torch.nan], [1.0, 2.0, 3.001]], ids=str)
def test_results_of_another_shape_or_value_are_refused(layers, wrong):
    right = torch.tensor([1.0, 2.0, 3.0])
    layers.check("library", {"output": right + 1e-6}, {"output": right})
    with pytest.raises(ValueError, match="library: output"):
        layers.check("library", {"output": torch.tensor(wrong)}, {"output": right})


def test_the_layers_table_takes_ratios_round_by_round_on_the_slowest_rank(layers, monkeypatch):
    monkeypatch.setitem(layers.LIBRARIES, "fairscale", ("no_such_package", None))
    monkeypatch.setitem(layers.LIBRARIES, "megatron-core", ("torch", None))
    outs = [{"tpcourse": ([1e-3, 4e-3, 9e-3], 2, 3e3), "DTensor": ([2e-3, 2e-3, 2e-3], 4, 5e3)},
            {"tpcourse": ([2e-3, 2e-3, 2e-3], 2, 3e3), "DTensor": ([4e-3, 6e-3, 3e-3], 4, 5e3)}]
    rows = layers.table({layers.Row(2, "small", "MLP", True): outs})
    assert rows[1] == ["2", "small", "MLP, sequence parallel", "4.0 ms; 2 calls, 3 kB",
                       "4.0 ms (x1.50); 4 calls, 5 kB", "not installed", "-"]
