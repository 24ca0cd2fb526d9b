"""The cost formulas against what must travel: every receiver gets its bytes once, and no more."""

import pytest

from tpcourse.measure import bus_bandwidth, wire_bytes

SIZE = 840  # divides by every n here


def everyone(op, n):
    return [wire_bytes(op, SIZE, n, from_root=rank) for rank in range(n)]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_sums_over_the_ranks(n):
    must_arrive = {
        "all_reduce": 2 * (n - 1) * SIZE,  # n-1 additions and n-1 copies of each byte
        "all_gather": (n - 1) * SIZE,
        "reduce_scatter": (n - 1) * SIZE,
        "all_to_all": (n - 1) * SIZE,
        "broadcast": (n - 1) * SIZE,
        "reduce": (n - 1) * SIZE,
        "gather": (n - 1) * SIZE // n,
        "scatter": (n - 1) * SIZE // n,
        "recv": 0,
        "barrier": 0,
    }
    assert {op: sum(everyone(op, n)) for op in must_arrive} == must_arrive


def test_who_sends():
    assert everyone("broadcast", 4) == [SIZE, SIZE, SIZE, 0]
    assert everyone("reduce", 4) == [0, SIZE, SIZE, SIZE]
    assert everyone("gather", 4) == [0, SIZE // 4, SIZE // 4, SIZE // 4]
    assert everyone("scatter", 4) == [SIZE * 3 // 4, 0, 0, 0]
    assert wire_bytes("all_to_all", SIZE, 4, kept_bytes=40) == 800
    assert wire_bytes("send", SIZE, 4) == SIZE


def test_whole_bytes_are_ints_and_parts_are_not_lost():
    assert isinstance(wire_bytes("all_reduce", 12, 4), int)
    assert wire_bytes("all_gather", 8, 3) == 16 / 3


def test_the_ring_of_all_reduces_named_by_its_halves():
    for n in (2, 3, 8):
        halves = wire_bytes("reduce_scatter", SIZE, n) + wire_bytes("all_gather", SIZE, n)
        assert wire_bytes("all_reduce", SIZE, n) == halves


def test_an_unknown_operation():
    with pytest.raises(ValueError, match="unknown operation 'allreduce'; it must be one of all_reduce"):
        wire_bytes("allreduce", SIZE, 4)


@pytest.mark.parametrize("op", "all_reduce all_gather reduce_scatter all_to_all broadcast reduce".split())
def test_bus_bandwidth_is_the_busiest_rank_s_rate(op):
    for n in (2, 3, 4):
        assert bus_bandwidth(op, SIZE, 0.5, n) == pytest.approx(max(everyone(op, n)) / 0.5)


def test_bus_bandwidth_of_the_nccl_tests_page():
    assert bus_bandwidth("all_reduce", 8e9, 2.0, 8) == pytest.approx(4e9 * 14 / 8)
    assert bus_bandwidth("gather", 8e9, 2.0, 8) == pytest.approx(4e9 * 7 / 8)  # the root receives that much
    assert bus_bandwidth("send", 8e9, 2.0, 2) == pytest.approx(4e9)
    with pytest.raises(ValueError, match="no bus bandwidth for 'barrier'"):
        bus_bandwidth("barrier", 0, 1.0, 4)
