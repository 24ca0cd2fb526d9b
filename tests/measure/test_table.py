"""Tables: adding up, filters that cannot be mistyped, subtraction, print."""

from dataclasses import replace

import pytest

from tpcourse.measure import Row, Table, wire_bytes

FORWARD = Row("all_reduce", "tp", 4, 1, 4096, 6144, "forward")
BACKWARD = Row("all_reduce", "tp", 4, 1, 4096, 6144, "backward")
GATHER = Row("all_gather", "dp", 3, 1, 16, 32 / 3, "forward")


def test_equal_calls_become_one_row_in_order_of_appearance():
    table = Table([BACKWARD, FORWARD, BACKWARD, GATHER])
    both = Row("all_reduce", "tp", 4, 2, 8192, 12288, "backward")
    assert table.rows == [both, FORWARD, GATHER] and len(table) == 3
    assert table.calls == [BACKWARD, FORWARD, BACKWARD, GATHER]


def test_totals():
    table = Table([BACKWARD, FORWARD, BACKWARD, GATHER])
    assert table.total("calls") == 4
    assert table.total("wire_bytes", op="all_reduce", phase="backward") == 12288
    assert table.total(phase="backward") == 12288
    assert table.total("message_bytes", dim="tp", group_size=4) == 3 * 4096
    assert table.total("message_bytes", dim="nobody") == 0


def test_a_mistyped_filter_does_not_read_as_zero():
    table = Table([FORWARD])
    for column, where, message in [
        ("bytes", {}, "no column 'bytes' to add up; there are calls, message_bytes, wire_bytes"),
        ("calls", {"operation": "send"}, "no filter 'operation'; there are op, dim, group_size, phase"),
        ("calls", {"op": "allreduce"}, "no op 'allreduce'; there are all_reduce, "),
        ("calls", {"phase": "recompute"}, "no phase 'recompute'; there are forward, backward, recomputation"),
    ]:
        with pytest.raises(ValueError, match=message):
            table.total(column, **where)


def test_comparing_is_subtraction():
    measured = Table([FORWARD, GATHER, GATHER, GATHER, BACKWARD])
    predicted = Table([Row("all_gather", "dp", 3, 3, 48, 32), BACKWARD, FORWARD])
    assert measured == predicted and len(measured - predicted) == 0
    twice, once = Table([FORWARD, FORWARD]), Table([FORWARD, BACKWARD])
    assert twice != once
    assert (twice - once).rows == [FORWARD, Row("all_reduce", "tp", 4, -1, -4096, -6144, "backward")]


@pytest.mark.parametrize("number", ["calls", "message_bytes", "wire_bytes"])
def test_one_more_is_a_difference(number):
    many = Table([replace(FORWARD, calls=10**6, message_bytes=10**10, wire_bytes=10**10)])
    more = Table([replace(many.calls[0], **{number: getattr(many.calls[0], number) + 1})])
    assert more != many and (more - many).total(number) == 1


@pytest.mark.parametrize("n", [3, 6, 7])
def test_rounding_is_no_difference(n):
    """A thousand messages, none of which divides by n, added up one by one, and predicted as one."""
    size = 10**8 + 1
    one = Row("all_reduce", "tp", n, 1, size, wire_bytes("all_reduce", size, n))
    sums = Row("all_reduce", "tp", n, 1000, 1000 * size, wire_bytes("all_reduce", 1000 * size, n))
    assert Table([one] * 1000) == Table([sums])
    assert Table([one] * 1000) != Table([replace(sums, wire_bytes=sums.wire_bytes + 1)])


def test_print():
    assert str(Table()) == "no communication"
    assert str(Table([FORWARD])).splitlines() == [
        "operation   dim  ranks  phase    calls  message bytes  wire bytes",
        "all_reduce  tp       4  forward      1          4,096       6,144",
    ]
    assert str(Table([FORWARD, GATHER])).splitlines()[2:] == [
        "all_gather  dp       3  forward      1             16        10.7",
        "total                                2          4,112     6,154.7",
    ]
