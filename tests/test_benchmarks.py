"""benchmarks/launch.py reads errors rightly and prints what it measured, and tpcourse's cells do what they say."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "launch.py"


@pytest.fixture(scope="module")
def launch():
    spec = importlib.util.spec_from_file_location("benchmark_launch", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


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
    launch.put_into(readme, launch.markdown([["a", "b"], ["1", "2"]], ["note"]))
    table = "| a | b |\n| --- | --- |\n| 1 | 2 |\n\n- note\n"
    assert readme.read_text() == f"before\n<!-- benchmark:launch -->\n{table}<!-- /benchmark:launch -->\nafter\n"
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="no place for the table"):
        launch.put_into(readme, "text")


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
