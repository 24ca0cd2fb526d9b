"""Messages as rows of the ledger's table: the vocabulary in which the schemes' formulas are written."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tpcourse.measure import Row, wire_bytes


@dataclass(frozen=True)
class Axis:
    """A mesh dimension, or several as one group: its name in the ledger and its ranks."""

    name: str
    size: int


def message(op: str, axis: Axis, size: float, phase: str, calls: int = 1) -> list[Row]:
    """`calls` equal messages of `size` bytes each on one rank; none in a group of one.

    Of a broadcast or reduce the calls go through all roots in turn, so that they add up to (n - 1) / n each.
    """
    n = axis.size
    if n == 1 or not size:
        return []
    if op in ("broadcast", "reduce"):
        wire = calls * (n - 1) / n * size
    else:
        wire = calls * wire_bytes(op, size, n)
    return [Row(op, axis.name, n, calls, calls * size, wire, phase)]


def times(rows: Iterable[Row], n: int) -> list[Row]:
    """The same n times over."""
    return [Row(row.op, row.dim, row.group_size, n * row.calls, n * row.message_bytes, n * row.wire_bytes,
                row.phase) for row in rows]


def again(rows: Iterable[Row]) -> list[Row]:
    """What forward sends, as a recomputation sends it again."""
    return [replace(row, phase="recomputation") for row in rows if row.phase == "forward"]
