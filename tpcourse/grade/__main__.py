"""Grade notebooks: `python -m tpcourse.grade SUBMISSION...`, each a notebook or a folder of them."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from tpcourse.grade.checking import SECONDS
from tpcourse.grade.confine import protections
from tpcourse.grade.grading import Sources, Submission, plain
from tpcourse.grade.notebook import read
from tpcourse.grade.report import Graded, feedback_page, write_csv

NEEDED = {
    "files": "Landlock (Linux 5.13 or newer), without which a submission can write files",
    "calls": "seccomp on x86-64 or arm64, without which a submission can start processes and open sockets",
}


def main(arguments: list[str] | None = None) -> int:
    """Grade what the command line names; prints as it goes and writes the CSV and the feedback pages."""
    options = _parser().parse_args(arguments)
    missing = [text for name, text in NEEDED.items() if name not in protections()]
    if missing and not options.unprotected:
        sys.exit(
            f"this machine lacks {'; and '.join(missing)}. Grade on one that has it, or pass --unprotected if"
            " you trust every submission"
        )
    try:
        sources = Sources(options.solutions)
    except ValueError as error:
        sys.exit(str(error))
    found = list(submissions(options.submission, set(sources.notebooks)))
    if not found:
        sys.exit(f"no notebook in {', '.join(map(str, options.submission))}")
    found.sort(key=lambda one: (one[0], one[1].stem not in sources.notebooks))
    width = min(40, max(len(learner) for learner, _ in found))
    graded = []
    for i, (learner, path) in enumerate(found):
        print(f"[{i + 1}/{len(found)}] {learner:{width}}  {plain(path.name)}", flush=True)
        graded.append(_grade(learner, path, sources, options, graded))
        _write(options.out, graded)
    print(f"\n{options.out / 'grades.csv'}; a feedback page per learner in {options.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tpcourse.grade", description=__doc__)
    parser.add_argument(
        "submission", nargs="+", type=Path, help="a notebook, or a folder that holds notebooks"
    )
    parser.add_argument(
        "--solutions", type=Path, default=Path("solutions"), help="the source notebooks (default: solutions)"
    )
    parser.add_argument("--out", type=Path, default=Path("grades"), help="where to write (default: grades)")
    parser.add_argument(
        "--seed", type=int, help="draw these inputs instead of fresh ones; the CSV has the seed of each task"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="the time one call may take (default: %(default)s)"
    )
    parser.add_argument(
        "--unprotected", action="store_true", help="grade although the kernel cannot confine submissions"
    )
    return parser


def submissions(paths: list[Path], exercises: set[str]) -> Iterator[tuple[str, Path]]:
    """Pairs of learner and notebook.

    The learner is the first of these names that is no exercise's: folders below the one given, the file,
    folders above.
    """
    for path in map(Path.resolve, paths):
        inside = (found for found in path.rglob("*.ipynb") if not found.is_dir())
        for notebook in [path] if path.is_file() else sorted(inside):
            below = notebook.relative_to(path.parent if path.is_file() else path).with_suffix("")
            above = [folder.name for folder in (path.parent if path.is_file() else path, *path.parents)]
            if ".ipynb_checkpoints" not in below.parts:
                yield plain(next(name for name in (*below.parts, *above) if name not in exercises)), notebook


def _grade(
    learner: str, path: Path, sources: Sources, options: argparse.Namespace, before: list[Graded]
) -> Graded:
    """Grade one notebook, unless one of those ``before`` is the same learner's for the same exercise."""
    graded = Graded(learner, plain(path.name))
    try:
        notebook = read(path)
        tasks = sources.tasks_of(notebook, path)
        same = [one for one in before if one.learner == learner and one.has(tasks[0].task)]
        if same:
            raise ValueError(f"{path.name} is not graded: {same[0].notebook} is, for the same exercise")
    except (OSError, ValueError) as error:
        graded.problem = plain(str(error))
        print(f"    0  {graded.problem}", flush=True)
        return graded
    for result in Submission(notebook, tasks, options.seed, options.seconds).graded():
        graded.results.append(result)
        reason = "" if result.passed else "  " + " ".join(result.lines)[:150]
        print(f"    {result.points:g}/{result.maximum:g}  {result.task:24}{reason}", flush=True)
    return graded


def _write(folder: Path, graded: list[Graded]) -> None:
    """Written after every notebook, so that an interrupted run leaves what it knows."""
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "grades.csv", graded)
    learner = graded[-1].learner
    page = feedback_page(learner, [one for one in graded if one.learner == learner])
    name = learner.encode()[:200].decode(errors="ignore")  # a file's name has at most 255 bytes
    (folder / f"{name}.html").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
