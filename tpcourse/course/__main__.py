"""`python -m tpcourse.course run` and `... store [NOTEBOOK ...]`: what `make course` and `make notebooks` call."""

import argparse
import sys
from pathlib import Path

from tpcourse.course.execute import run_all, store
from tpcourse.course.lessons import START, lessons, write_table


def main() -> None:
    """Run every lesson and print a table, or store fresh outputs in the lessons and the start page."""
    parser = argparse.ArgumentParser(prog="python -m tpcourse.course", description=main.__doc__)
    parser.add_argument("task", choices=["run", "store"])
    parser.add_argument("notebooks", nargs="*", type=Path, help="store only these; all lessons and the start page if none")
    arguments = parser.parse_args()
    root = Path.cwd()
    if not (root / "notebooks" / START).exists():
        sys.exit(f"There is no notebooks/{START} in {root}; run this in the clone of the course.")
    if arguments.task == "run":
        sys.exit(not run_all(root))
    write_table(root)
    for path in arguments.notebooks or [lesson.path for lesson in lessons(root)] + [root / "notebooks" / START]:
        print(path.name, flush=True)
        try:
            store(path)
        except RuntimeError as failure:
            sys.exit(f"{path}: {failure}The file is as it was.")


if __name__ == "__main__":
    main()
