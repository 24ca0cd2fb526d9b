"""What grading leaves: rows on the terminal, a CSV file, a feedback page per learner."""

import csv
import html
from dataclasses import dataclass, field
from pathlib import Path

from tpcourse.grade.grading import Result

COLUMNS = ("learner", "notebook", "task", "points", "max_points", "passed", "reason", "seed")
STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:46em;margin:2em auto;padding:0 1em;
color:#222;background:#fff}
pre{white-space:pre-wrap;background:#f4f4f4;padding:.7em;border-radius:4px}
.ok{color:#00664d} .no{color:#a33d00}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#1b1b1b}pre{background:#2a2a2a}
.ok{color:#4cc9a3}.no{color:#f59a5c}}"""


@dataclass
class Graded:
    """All that is known of one submitted notebook; ``problem`` says why it could not be graded at all."""

    learner: str
    notebook: str
    results: list[Result] = field(default_factory=list)
    problem: str = ""

    def has(self, task: str) -> bool:
        return any(result.task == task for result in self.results)


def write_csv(path: Path, graded: list[Graded]) -> None:
    """One row per task; a notebook that could not be graded has one row with the reason."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for one in graded:
            who = [_cell(one.learner), _cell(one.notebook)]
            if one.problem:
                rows.writerow([*who, "", 0, "", False, _cell(one.problem), ""])
            for r in one.results:
                rows.writerow(
                    [
                        *who,
                        r.task,
                        r.points,
                        r.maximum,
                        r.passed,
                        "" if r.passed else _cell(" ".join(r.lines)),
                        r.seed,
                    ]
                )


def _cell(text: str) -> str:
    """A spreadsheet takes a text that begins like this for a formula."""
    return "'" + text if text.lstrip().startswith(("=", "+", "-", "@")) else text


def feedback_page(learner: str, graded: list[Graded]) -> str:
    """The HTML page that one learner gets back; everything a learner wrote is escaped."""
    parts = []
    for one in graded:
        got, of = sum(r.points for r in one.results), sum(r.maximum for r in one.results)
        parts.append(f"<h2>{html.escape(one.notebook)}: {got:g} of {of:g} points</h2>")
        if one.problem:
            parts.append(f"<p class=no>{html.escape(one.problem)}</p>")
        parts += [_section(r) for r in one.results]
    title = f"Feedback for {html.escape(learner)}"
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>{''.join(parts)}</html>\n"
    )


def _section(result: Result) -> str:
    mark = "<span class=ok>✓</span>" if result.passed else "<span class=no>✗</span>"
    lines = html.escape("\n".join(result.lines))
    note = (
        ""
        if result.passed
        else f"<p>To see the same numbers again, pass <code>seed={result.seed}</code> to the check.</p>"
    )
    return (
        f"<h3>{mark} {html.escape(result.task)}: {result.points:g} of"
        f" {result.maximum:g}</h3><pre>{lines}</pre>{note}"
    )
