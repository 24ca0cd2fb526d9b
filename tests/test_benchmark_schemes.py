"""benchmarks/schemes.py times every scheme on the same numbers, and none that computes others."""

import importlib.util
import sys
from pathlib import Path

import cloudpickle
import pytest

import tpcourse as tp

FOLDER = Path(__file__).parents[1] / "benchmarks"
TOKENS, DIM = 4 * 3, 8


@pytest.fixture(scope="module")
def schemes():
    sys.path.insert(0, str(FOLDER))  # as it is for a script
    spec = importlib.util.spec_from_file_location("benchmark_schemes", FOLDER / "schemes.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # as a script's functions are
    yield module
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules[spec.name]
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def four():
    with tp.World(ranks=4) as world:
        yield world


def tiny(schemes):
    return schemes.Size(batch=4, sequence=3, dim=DIM, heads=4, rounds=2)


def test_every_scheme_is_checked_and_timed(schemes, four):
    outs = four.run(schemes.compare, tiny(schemes))
    assert all(list(out) == list(schemes.schemes(4)) for out in outs)
    assert all(len(seconds) == 2 and min(seconds) > 0 for out in outs for seconds, *_ in out.values())
    calls, sent = outs[0]["1D"][1:3]
    assert (calls, sent) == (4, 4 * 4 * TOKENS * DIM * 2 * 3 / 4)  # two all-reduces each way
    assert outs[0]["2D"][3] < outs[0]["1D"][3]  # kept for backward


def test_a_scheme_that_computes_something_else_is_not_timed(schemes, four, monkeypatch):
    def other(mesh):
        scheme = schemes.OneD(mesh["a"])
        scheme.norm = lambda dim, kind: schemes.OneD.norm(scheme, dim, "rms")
        return scheme

    monkeypatch.setattr(schemes, "schemes", lambda ranks: {"other": ((4,), other)})
    with pytest.raises(tp.RankError, match="other: output differs from one process' by"):
        four.run(schemes.compare, tiny(schemes))


def test_the_table_takes_the_slowest_rank_of_each_round(schemes):
    rest = 2, 3e3, 4e3, 5e3
    outs = [{"1D": ([1e-2, 4e-2, 9e-2], *rest), "2D": ([2e-2, 2e-2, 2e-2], *rest)},
            {"1D": ([2e-2, 2e-2, 2e-2], *rest), "2D": ([4e-2, 6e-2, 3e-2], *rest)}]
    assert schemes.rows_of(4, outs) == [
        ["4", "1D", "4", "40 ms", "x1.00", "2", "3 kB", "4 kB", "5 kB"],
        ["4", "2D", "2 x 2", "40 ms", "x1.50", "2", "3 kB", "4 kB", "5 kB"]]
