"""A ledger as bars: bytes for each operation and phase, measured beside predicted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tpcourse.show.colours import INK
from tpcourse.show.figure import Picture, chart

# Greys, for colours mean ranks; the hatch tells them apart where greys run together.
PHASES = {"forward": ("#4D4D4D", ""), "backward": ("#A6A6A6", "///"), "recomputation": ("#E0E0E0", "...")}
Key = tuple[str, str, int, str]  # operation, mesh dimension, group size, phase
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def ledger(book: Any, predicted: Any = None, title: str = "Bytes that one rank sends") -> Picture:
    """Bars of the wire bytes in a ledger, one for each operation, mesh dimension and phase.

    Args:
        book: what `tp.ledger()` recorded, or anything whose `rows` have the fields of `tpcourse.measure.Row`.
        predicted: the same shape of table; drawn as an empty bar under each measured one.
        title: what stands above the figure.

    Raises:
        ValueError: a book without rows.
    """
    measured, expected = _bytes(book), _bytes(predicted) if predicted is not None else {}
    keys = _ordered({**measured, **expected})
    if not keys:
        raise ValueError("the ledger has no rows, so there is nothing to draw")
    unit = _unit(max([*measured.values(), *expected.values()]))
    figure, axes = chart(8, 1.3 + 0.48 * len(keys), title, f"bytes sent ({UNITS[unit]})", "")
    thick = 0.36 if predicted is not None else 0.6
    for line, key in enumerate(keys):
        shade, hatch = PHASES[key[3]]
        where = line - thick / 2 if predicted is not None else line
        _bar(axes, where, measured.get(key, 0), unit, thick, facecolor=shade, hatch=hatch)
        if predicted is not None:
            _bar(axes, where + thick, expected.get(key, 0), unit, thick, " predicted", fill=False, ls="--")
    axes.set_yticks(range(len(keys)), [f"{op} over {dim} ({size})\n{phase}" for op, dim, size, phase in keys])
    axes.set_ylim(len(keys) - 0.45, -0.55)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.25 if predicted is not None else 0.15)
    return Picture(title, _words(keys, measured, expected if predicted is not None else None), figure)


def bytes_text(count: float) -> str:
    """A number of bytes as a person reads it: 512 B, 1.5 KiB, 24 MiB (1 KiB = 1024 B)."""
    unit = _unit(count)
    return f"{count / 1024 ** unit:,.2f}".rstrip("0").rstrip(".") + f" {UNITS[unit]}"


def _unit(count: float) -> int:
    return next((unit for unit in range(len(UNITS)) if abs(count) < 1024 ** (unit + 1)), len(UNITS) - 1)


def _ordered(seen: Iterable[Key]) -> list[Key]:
    """In order of first appearance, but the phases of one operation together."""
    operations = [key[:3] for key in seen]
    return sorted(seen, key=lambda key: (operations.index(key[:3]), list(PHASES).index(key[3])))


def _bytes(book: Any) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for row in book.rows:
        key = (row.op, row.dim, row.group_size, row.phase)
        found[key] = found.get(key, 0) + row.wire_bytes
    return found


def _bar(axes, where: float, count: float, unit: int, thick: float, note: str = "", **style) -> None:
    axes.barh(where, count / 1024 ** unit, thick, edgecolor=INK, linewidth=0.8, **style)
    axes.annotate(bytes_text(count) + note, (count / 1024 ** unit, where), (4, 0), textcoords="offset points",
                  va="center", fontsize=9.5, color=INK)


def _words(keys: list[Key], measured: dict[Key, float], expected: dict[Key, float] | None) -> str:
    lines = []
    for key in keys:
        op, dim, size, phase = key
        line = f"{op} over {dim} ({size} ranks), {phase}: {bytes_text(measured.get(key, 0))}"
        lines.append(line if expected is None else f"{line}, predicted {bytes_text(expected.get(key, 0))}")
    return "\n".join(lines)
