"""Build the learners' archive: `python -m tpcourse.grade.release [FILE]`.

It holds the files that git tracks, less the solutions, their hidden tests and the graders' own tests.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

WITHHELD = ("solutions/", "tests/grade/", ".ci/", "nbgrader_config.py")
MARKS = ("### BEGIN " + "HIDDEN TESTS", "### BEGIN " + "SOLUTION")


def main(target: str = "dist/tpcourse-exercises.zip") -> int:
    """Write the learners' archive to ``target`` and say what is in it."""
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    names = released(Path("."))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.write(name, f"tpcourse/{name}")
    print(f"{path}: {len(names)} files, {path.stat().st_size >> 10} KiB, no solutions, no hidden tests")
    return 0


def released(root: Path) -> list[str]:
    """The tracked files that learners get. Raises ValueError when a notebook among them still holds a
    solution.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True
    ).stdout
    names = [
        name
        for name in listed.split("\0")
        if name and not name.startswith(WITHHELD) and (root / name).is_file()
    ]
    for name in names:
        if name.endswith(".ipynb") and any(mark in (root / name).read_text() for mark in MARKS):
            raise ValueError(f"{name} holds a solution or a hidden test")
    return names


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
