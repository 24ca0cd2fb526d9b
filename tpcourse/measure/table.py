"""Traffic as plain rows: what a ledger measures and what a prediction states have the same shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .wire import OPERATIONS

PHASES = ("forward", "backward", "recomputation")
_NUMBERS = ("calls", "message_bytes", "wire_bytes")
_KEY = ("op", "dim", "group_size", "phase")


@dataclass(frozen=True)
class Row:
    """Equal operations of one rank, added up.

    `op` is a name from `wire.OPERATIONS`, `dim` the mesh dimension (or the group) it ran over, `group_size`
    that group's ranks, `message_bytes` and `wire_bytes` the sums over `calls` (defined in `wire.wire_bytes`),
    `phase` one of forward, backward, recomputation.
    """

    op: str
    dim: str
    group_size: int
    calls: int
    message_bytes: int | float
    wire_bytes: int | float
    phase: str = "forward"


class Table:
    """Rows of traffic: `calls` in the order they came, `rows` with equal ones added up.

    Equal means the same op, dim, group_size and phase. `a - b` is a table of what differs, row by row, so
    that comparing a measurement with a prediction is subtraction; the difference of equal tables is empty,
    and `a == b`. A table is plain data and pickles.
    """

    def __init__(self, calls: Iterable[Row] = ()) -> None:
        self.calls: list[Row] = list(calls)

    @property
    def rows(self) -> list[Row]:
        """The calls with equal ones added up, in order of first appearance."""
        merged: dict[tuple, Row] = {}
        for call in self.calls:
            key = call.op, call.dim, call.group_size, call.phase
            merged[key] = _add(merged[key], call) if key in merged else call
        return list(merged.values())

    def total(self, column: str = "wire_bytes", **where: object) -> int | float:
        """Sum of `column` (calls, message_bytes, wire_bytes) where the filters match, e.g. `op="all_reduce"`.

        Raises ValueError for a column, a filter, an operation or a phase that does not exist.
        """
        if column not in _NUMBERS:
            raise ValueError(f"no column {column!r} to add up; there are {', '.join(_NUMBERS)}")
        _check(where)
        return sum(
            getattr(c, column) for c in self.calls if all(getattr(c, k) == v for k, v in where.items())
        )

    def __sub__(self, other: Table) -> Table:
        negative = [replace(c, **{name: -getattr(c, name) for name in _NUMBERS}) for c in other.calls]
        rows = Table(self.calls + negative).rows
        # Wire bytes come in n-ths, so long sums of them round: in proportion to what was added up.
        noise = 1e-13 * sum(abs(call.wire_bytes) for call in self.calls + other.calls)
        return Table(row for row in rows if any(abs(getattr(row, name)) > noise for name in _NUMBERS))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and len(self - other) == 0

    __hash__ = None  # it grows while a ledger is open

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        if not self.calls:
            return "no communication"
        lines = [
            (r.op, r.dim, r.group_size, r.phase, r.calls, r.message_bytes, r.wire_bytes) for r in self.rows
        ]
        if len(lines) > 1:
            lines.append(("total", "", "", "", *(self.total(name) for name in _NUMBERS)))
        return aligned(("operation", "dim", "ranks", "phase", "calls", "message bytes", "wire bytes"), lines)


def aligned(header: Sequence[str], lines: Iterable[Sequence]) -> str:
    """Lines under a header as text: words to the left, numbers to the right with thousands separated."""
    lines = list(lines)
    cells = [tuple(header)] + [tuple(_text(value) for value in line) for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells)]
    justify = [str.ljust if all(isinstance(v, str) for v in column) else str.rjust for column in zip(*lines)]
    rendered = ["  ".join(side(cell, w) for cell, w, side in zip(row, widths, justify)) for row in cells]
    return "\n".join(line.rstrip() for line in rendered)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _add(a: Row, b: Row) -> Row:
    return Row(a.op, a.dim, a.group_size, a.calls + b.calls, a.message_bytes + b.message_bytes,
               a.wire_bytes + b.wire_bytes, a.phase)


def _check(where: dict[str, object]) -> None:
    for name, value in where.items():
        if name not in _KEY:
            raise ValueError(f"no filter {name!r}; there are {', '.join(_KEY)}")
        allowed = {"op": OPERATIONS, "phase": PHASES}.get(name)
        if allowed and value not in allowed:
            raise ValueError(f"no {name} {value!r}; there are {', '.join(allowed)}")
