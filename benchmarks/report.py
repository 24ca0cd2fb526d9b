"""What the benchmarks share: their tables, as text and in README.md, and the machine they ran on."""

import os
import platform
from pathlib import Path

import torch


def machine() -> str:
    return (f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, "
            f"Python {platform.python_version()}, torch {torch.__version__}")


def aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def markdown(rows: list[list[str]], notes: list[str]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)])


def put_into(readme: Path, name: str, text: str) -> None:
    """Replace what stands between the markers of benchmark `name`. Raises ValueError when they are not there."""
    begin, end = f"<!-- benchmark:{name} -->", f"<!-- /benchmark:{name} -->"
    before, opened, rest = readme.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise ValueError(f"{readme} has no place for the table: put {begin} and {end} where it belongs")
    readme.write_text(f"{before}{begin}\n{text}\n{end}{after}")
