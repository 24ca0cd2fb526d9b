"""The benchmark of predictions: what it runs, how it counts errors, and that its step is the real one."""

import cloudpickle
import pytest
from test_benchmarks import FOLDER, loaded

from tpcourse import predict


@pytest.fixture(scope="module")
def bench():
    with loaded("predict") as module:
        cloudpickle.register_pickle_by_value(module)  # as a script's functions are
        yield module
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="module")
def tiny(bench):
    return bench.Shape("tiny", predict.Transformer(32, 6, 16, 1, 4), 4)


class Constant:
    """A machine on which everything takes a millisecond."""

    gpus, node, memory, overlap = 2, 2, 1e9, 0.0

    def product(self, n, k, m, e, batch=1):
        assert e == 4
        return 1e-3

    def kernel(self, kind, nbytes):
        return 1e-3

    def message(self, row, here):
        return 1e-3 * row.calls


def test_it_runs_every_kind_of_scheme_with_every_shape_and_mode(bench):
    cases = [case for ranks in bench.SCHEMES for case in bench.cases(ranks, bench.SHAPES)]
    assert len(set(cases)) == len(cases) >= 40 and len(bench.SHAPES) >= 4
    for recompute in bench.RECOMPUTE:
        assert sum(case.recompute == recompute for case in cases) >= 12
    schemes = {case.scheme for case in cases}
    assert {predict.OneD(4), predict.OneD(2, True), predict.TwoD(2), predict.ThreeD(4, 1, 1),
            predict.ThreeD(1, 2, 2, "all_reduce")} < schemes
    for case in cases:
        assert case.predicted(Constant()) > 0  # every size splits


def test_errors_are_relative_to_what_was_measured(bench, tiny):
    case = bench.Case(tiny, predict.OneD(2), "none")
    outcomes = [bench.Outcome(ranks, case, predicted, 0.1)
                for ranks, predicted in [(1, 0.11), (2, 0.07), (2, 0.12), (2, 0.1), (2, 0.15)]]
    assert outcomes[1].row == ["2", "1D 2", "tiny", "none", "70.0 ms", "100.0 ms", "-30%"]
    assert bench.summary(outcomes) == [
        "5 combinations: median error 20.0%, 90th percentile 50.0%",
        "1 on 1 ranks: median error 10.0%, 90th percentile 10.0%",
        "4 on 2 ranks: median error 25.0%, 90th percentile 50.0%"]


@pytest.mark.parametrize("scheme", [predict.OneD(2, True), predict.ThreeD(2, 1, 1, keep_gathered=False)])
def test_a_step_is_timed_on_real_ranks(bench, tiny, two, scheme):
    for seconds in two.run(bench.steps, bench.Case(tiny, scheme, "full"), 3):
        assert len(seconds) == 3 and min(seconds) > 0


def test_quick(bench, tiny, monkeypatch, capsys, tmp_path):
    """From the calibration to the table, on two ranks; with --markdown it goes between the markers."""
    readme = tmp_path / "README.md"
    readme.write_text((FOLDER / "README.md").read_text())
    monkeypatch.setattr(bench, "README", readme)
    monkeypatch.setattr(bench, "SHAPES", [tiny])
    monkeypatch.setattr(bench.tp, "calibrate", lambda ranks: Constant(), raising=False)
    bench.main(["--quick", "--rounds", "1", "--markdown"])
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split()[:3] == ["ranks", "scheme", "shape"]
    assert "6 combinations: median error" in printed
    begin, end = "<!-- benchmark:predict -->", "<!-- /benchmark:predict -->"
    table = readme.read_text().partition(begin)[2].partition(end)[0]
    assert table.count("| 2 |") == 6 and "- 6 combinations: median error" in table
