"""The clock: a fit that recovers known numbers, and times that every rank agrees on."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tpcourse.measure import fit_alpha_beta, time_collective

SIZES = 2.0 ** np.arange(10, 27)


def test_the_fit_recovers_an_exact_line():
    assert fit_alpha_beta(SIZES, 2e-5 + 1e-10 * SIZES) == pytest.approx((2e-5, 1e-10))


def test_noise_on_the_largest_message_does_not_drown_the_latency():
    noise = np.where(np.arange(len(SIZES)) % 2, 1.05, 0.95)
    alpha, beta = fit_alpha_beta(SIZES, (2e-5 + 1e-10 * SIZES) * noise)
    assert alpha == pytest.approx(2e-5, rel=0.06) and beta == pytest.approx(1e-10, rel=0.06)


def test_a_fit_that_cannot_be():
    with pytest.raises(ValueError, match="2 sizes and 1 times"):
        fit_alpha_beta([1, 2], [1.0])
    for sizes, seconds in ([[8, 8], [1.0, 1.1]], [[1, 2], [1.0, 0.0]]):
        with pytest.raises(ValueError, match="two different sizes and positive times"):
            fit_alpha_beta(sizes, seconds)


def test_the_slowest_rank_s_time_on_every_rank(two):
    """Of an ordinary call: one that takes half a second among the three does not count."""

    def body(mesh):
        calls = []

        def fn():
            calls.append(1)
            time.sleep(0.02 * dist.get_rank() + 0.5 * (len(calls) == 4))

        return time_collective(fn, repeats=3), len(calls)

    (first, calls), second = two.run(body, record=False)
    assert (first, calls) == second and calls == 5
    assert 0.02 <= first < 0.4


def test_nobody_pays_for_a_late_arrival(two):
    def body(mesh):
        barrier, passed = dist.barrier, []

        def slow_barrier():
            time.sleep(0.2 * dist.get_rank())
            barrier()
            passed.append(1)

        dist.barrier = slow_barrier
        try:
            seconds = time_collective(lambda: dist.all_reduce(torch.ones(3)), repeats=3)
        finally:
            dist.barrier = barrier
        return seconds, len(passed)

    for seconds, passed in two.run(body, record=False):
        assert seconds < 0.2 and passed == 5  # one before each call, the two that warm up included


def test_repeats_must_be_at_least_one():
    with pytest.raises(ValueError, match="repeats=0"):
        time_collective(lambda: None, repeats=0)
