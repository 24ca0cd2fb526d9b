"""A machine as it was measured: by hand on a small one, on disk, and measured on real ranks."""

import importlib
import json
from dataclasses import replace

import numpy as np
import pytest

import tpcourse as tp
from tpcourse import predict
from tpcourse.measure import Row
from tpcourse.predict import calibration, timing, work
from tpcourse.predict.calibrate import SHAPES, fit_line
from tpcourse.predict.calibration import Calibration, fit_products

SMALL = Calibration(
    gpus=2, e=4, memory=1e9, overlap=0.0, products=(1e-5, 1e-7, 1e-11, 1e-10),
    kernels=(("gelu", ((1e3, 1e-5), (1e5, 1e-3))), ("sum", ((1e3, 1e-6),))),
    messages=(("all_reduce", 2, 1e-3, 1e-9), ("send", 2, 2e-3, 3e-9)))


def test_a_product_by_hand():
    """A call, six more matrices, 7 x 2 x 3 x 4 x 5 flop, 7 x 4 x 47 bytes."""
    assert SMALL.product(3, 4, 5, 4) == pytest.approx(1e-5 + 1e-11 * 120 + 1e-10 * 4 * 47)
    assert SMALL.product(3, 4, 5, 4, batch=7) == pytest.approx(1e-5 + 6e-7 + 1e-11 * 840 + 1e-10 * 28 * 47)
    with pytest.raises(ValueError, match="numbers of 2 bytes, where the calibration is of 4"):
        SMALL.product(3, 4, 5, 2)


@pytest.mark.parametrize("nbytes, seconds", [(1, 1e-5), (1e3, 1e-5), (1e4, 1e-4), (1e5, 1e-3), (3e6, 3e-2)])
def test_a_kernel_between_and_beyond_what_was_measured(nbytes, seconds):
    assert SMALL.kernel("gelu", nbytes) == pytest.approx(seconds)
    assert SMALL.kernel("sum", 5e3) == pytest.approx(5e-6)


def test_what_was_not_measured():
    with pytest.raises(ValueError, match="no kernel 'norm' was measured; there are gelu, sum"):
        SMALL.kernel("norm", 8)
    with pytest.raises(ValueError, match="no reduce of 2 ranks was measured; there are all_reduce of 2, send of 2"):
        SMALL.message(Row("reduce", "tp", 2, 1, 8, 8), 2)
    with pytest.raises(ValueError, match="no all_reduce of 4 ranks .* calibrate on a multiple of 4 ranks"):
        SMALL.message(Row("all_reduce", "tp", 4, 1, 8, 8), 4)


def test_messages_are_affine_in_bytes():
    """So rows of equal operations can be added up before they are priced."""
    one, two = Row("all_reduce", "tp", 2, 3, 100, 100), Row("all_reduce", "tp", 2, 1, 5e6, 5e6)
    both = Row("all_reduce", "tp", 2, 4, 5000100, 5000100)
    assert SMALL.message(one, 2) == pytest.approx(3e-3 + 1e-7)
    assert SMALL.message(one, 2) + SMALL.message(two, 2) == pytest.approx(SMALL.message(both, 2))


def test_it_comes_back_from_disk(tmp_path):
    SMALL.save(tmp_path / "machine.json")
    loaded = Calibration.load(tmp_path / "machine.json")
    assert loaded == SMALL and hash(loaded) == hash(SMALL)
    assert (loaded.gpus, loaded.node, loaded.memory) == (2, 2, 1e9)


@pytest.mark.parametrize("change, words", [
    ({"gpus": 0}, "gpus=0"), ({"e": 3}, "e=3"), ({"products": [1, 2, 3]}, r"products=\(1, 2, 3\)"),
    ({"products": [1, 2, 3, -4]}, "-4"), ({"messages": [["send", 2, -1e-3, 0]]}, "-0.001"),
    ({"messages": [["send", 2]]}, "send"), ({"kernels": [["gelu", [[1e3, 0]]]]}, "gelu"),
    ({"kernels": [["gelu", []]]}, "gelu"), ({"overlap": 2}, "overlap=2"), ({"more": 1}, "more")])
def test_files_that_are_no_calibration(tmp_path, change, words):
    path = tmp_path / "machine.json"
    SMALL.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=f"machine.json is no calibration .*{words}"):
        Calibration.load(path)


def test_files_that_are_nothing(tmp_path):
    with pytest.raises(ValueError, match="is no calibration .*FileNotFoundError"):
        Calibration.load(tmp_path / "none.json")
    for text in ("{", "[]", "{}"):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(ValueError, match="is no calibration"):
            Calibration.load(tmp_path / "wrong.json")


def test_the_fit_of_products_recovers_its_numbers():
    numbers = (1e-5, 2e-7, 1e-11, 3e-11)
    seconds = [np.dot(numbers, calibration.features(n, k, m, 4, batch)) for n, k, m, batch in SHAPES]
    assert fit_products(SHAPES, seconds, 4) == pytest.approx(numbers)


def test_the_fit_of_products_gives_no_negative_seconds():
    """Large products that are faster than in proportion would pull a call's seconds below zero."""
    seconds = [1e-11 * 2 * n * k * m * b * (1 if n < 200 else 0.5) for n, k, m, b in SHAPES]
    assert min(fit_products(SHAPES, seconds, 4)) >= 0


def test_a_line_of_messages_never_falls():
    sizes = np.array(timing.MESSAGE_BYTES)
    assert fit_line(1e-3 + 1e-9 * sizes) == pytest.approx((1e-3, 1e-9))
    assert fit_line([4e-3, 3e-3, 2e-3, 1e-3]) == (2.5e-3, 0.0)
    assert fit_line(1e-9 * sizes - 5e-7)[0] >= 0.0 and min(fit_line([-1e-3] * 4)) >= 0.0


@pytest.mark.parametrize("kind", (*work.KINDS, work.SUM, work.OPTIMIZER))
def test_every_kernel_of_a_step_can_be_timed(kind, two):
    """Forward and backward of each kind, in 32 and 16 bits; what a row touches grows with its numbers."""
    def body(mesh, kind, timing):
        timing.KERNEL_BYTES, timing.WINDOW_S = [2**14, 2**17], 1e-4
        return [timing.time_kernel(mesh, kind, e) for e in (4, 2)]

    for outs in two.run(body, kind, timing, record=False):
        phases = 1 if kind in (work.SUM, work.OPTIMIZER) else 2
        assert [len(found) for found in outs] == [2 * phases] * 2 and min(map(min, outs)) > 0


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Quickly: one pass over few shapes."""
    path = tmp_path_factory.mktemp("calibration") / "machine.json"
    module = importlib.import_module("tpcourse.predict.calibrate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PASSES", 1)
        patch.setattr(module, "SHAPES", SHAPES[:8])
        yield tp.calibrate(2, path), path


def test_a_calibration_is_a_machine_for_every_scheme(measured):
    machine, path = measured
    assert Calibration.load(path) == machine
    assert machine.gpus == 2 and machine.e == 4 and 0 <= machine.overlap <= 1 and machine.memory > 1e8
    assert machine.product(64, 64, 64, 4) > 0
    model = predict.Transformer(48, 6, 24, 2, 12, dropout=0.1)
    llama = replace(model, norm="rms", activation="swiglu", positions="rotary", tied=False, dropout=0.0)
    for own in (model, llama):
        for scheme in (predict.OneD(2), predict.OneD(2, True), predict.ThreeD(2, 1, 1), predict.ThreeD(1, 1, 2)):
            for recompute in ("none", "full"):
                times = predict.step_time(own, scheme, machine, 4, e=4, recompute=recompute)
                assert all(time.total > 0 for time in times.values())


def test_numbers_that_nobody_multiplies():
    with pytest.raises(ValueError, match="e=3 bytes a number is not one of 2, 4, 8"):
        tp.calibrate(2, e=3)
