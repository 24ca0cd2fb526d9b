"""`python -m tpcourse.grade` and `check` as people run them."""

import csv
import json
import linecache
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from grade_answers import with_cell

from tpcourse.grade import CheckFailed, check
from tpcourse.grade.__main__ import main, submissions
from tpcourse.grade.hub import Hub, Misuse


def test_a_class_of_submissions(tmp_path, sources):
    """A good one, one that exits, one that is no notebook, one without metadata: each gets its row, page and
    reason.
    """
    notebook, _ = sources["ring_all_reduce"]
    plain = {"cells": [{**cell, "metadata": {}} for cell in notebook["cells"]]}
    texts = {
        "ada": json.dumps(notebook),
        "ben": json.dumps(plain),
        "cyd": "{",
        "dan": json.dumps(
            with_cell(notebook, "ring_all_reduce", "import os\n\ndef ring_all_reduce(x):\n    os._exit(0)\n")
        ),
        "eve": json.dumps(
            with_cell(notebook, "ring_all_reduce", "def ring_all_reduce(x):\n    print('\\x1b[2J<script>')\n")
        ),
    }
    for name, text in texts.items():
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "01_ranks_and_collectives.ipynb").write_text(text)
    run = subprocess.run(
        [sys.executable, "-m", "tpcourse.grade", str(tmp_path / "in"), "--out", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stderr
    rows = list(csv.DictReader((tmp_path / "out" / "grades.csv").open()))
    total = {name: sum(float(row["points"]) for row in rows if row["learner"] == name) for name in texts}
    assert total == {"ada": 8, "ben": 8, "cyd": 0, "dan": 6, "eve": 6}
    assert "exit code 0" in next(
        row["reason"] for row in rows if row["learner"] == "dan" and row["points"] == "0"
    )
    assert "is not a notebook" in next(row["reason"] for row in rows if row["learner"] == "cyd")
    assert "[5/5] eve" in run.stdout and "\x1b" not in run.stdout
    page = (tmp_path / "out" / "eve.html").read_text()
    assert "&lt;script&gt;" in page and "<script>" not in page and "6 of 8 points" in page


def test_whose_submission(tmp_path):
    for name in ("ada/01/01.ipynb", "ben.ipynb", "01/cyd.ipynb"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert {learner for learner, _ in submissions([tmp_path], {"01"})} == {"ada", "ben", "cyd"}
    assert [learner for learner, _ in submissions([tmp_path / "ada" / "01" / "01.ipynb"], {"01"})] == ["ada"]


def test_odd_files_and_names(tmp_path, sources, capsys):
    """Links to other people's answers, names that a spreadsheet or a terminal would run, files that are none,
    two notebooks for one exercise: each has its row, and the honest one its points.
    """
    notebook, _ = sources["ring_all_reduce"]
    inside, text = tmp_path / "in", json.dumps(notebook)
    odd = [{**c, "metadata": {"nbgrader": {"grade_id": []}}} for c in notebook["cells"]]
    folders = [b"ada", b"link", b"fifo", b"=1+1", b"esc\x1b[2J", b"L" * 255, b"\xff", b"list", b"twice"]
    for name in folders:
        os.makedirs(os.path.join(os.fsencode(inside), name))
    (inside / "ada" / "01_ranks_and_collectives.ipynb").write_text(text)
    (inside / "link" / "01.ipynb").symlink_to("../ada/01_ranks_and_collectives.ipynb")
    os.mkfifo(inside / "fifo" / "01.ipynb")
    for name in (
        b"=1+1/=2.ipynb",
        b"esc\x1b[2J/\x1b.ipynb",
        b"L" * 255 + b"/" + b"n" * 249 + b".ipynb",
        b"\xff/\xff.ipynb",
    ):
        with open(os.path.join(os.fsencode(inside), name), "w") as file:
            file.write("{")
    (inside / "list" / "01.ipynb").write_text(json.dumps({"cells": odd[:2]}))
    for name in ("a copy", "01_ranks_and_collectives"):
        (inside / "twice" / f"{name}.ipynb").write_text(text)
    assert main([str(inside), "--out", str(tmp_path / "out"), "--solutions", str(ROOT / "solutions")]) == 0
    rows = list(csv.DictReader((tmp_path / "out" / "grades.csv").open(newline="")))
    points = {row["learner"]: 0 for row in rows}
    for row in rows:
        points[row["learner"]] += float(row["points"])
    names = ["ada", "twice", "link", "fifo", "list", "'=1+1", "esc?[2J", "L" * 255, "?"]
    assert points == dict.fromkeys(names, 0) | {"ada": 8, "twice": 8}
    reasons = {row["learner"]: row["reason"] for row in rows}
    assert "is a link" in reasons["link"] and "is a link" in reasons["fifo"]
    assert (
        "a copy.ipynb is not graded: 01_ranks_and_collectives.ipynb is"
        in [r["reason"] for r in rows if r["learner"] == "twice"][-1]
    )
    assert not any(value.startswith("=") for row in rows for value in row.values())
    assert "\x1b" not in capsys.readouterr().out and len(os.listdir(tmp_path / "out")) == 1 + len(names)


def test_no_submission_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match="no notebook in"):
        main([str(tmp_path)])


def test_check_prints_what_it_saw(capsys):
    check("ring_all_gather", gather_on_a_ring(), ranks=[3])
    out = capsys.readouterr().out
    assert out.startswith("✓ ring_all_gather is right on 3 ranks.") and "2 messages of one chunk" in out


def test_check_is_repeatable_by_its_seed():
    texts = set()
    for _ in range(2):
        with pytest.raises(CheckFailed) as failure:
            check("ring_all_gather", lambda x: x * 2, ranks=[2], seed=3)
        texts.add(str(failure.value))
    [text] = texts
    assert "expected shape" in text and "seed=3" in text


def test_check_shows_the_line_of_the_right_cell():
    """A function calls a helper of another cell, and both cells define something called `forward`."""
    cells = {
        "/tmp/ipykernel_1/1.py": "class A:\n    def forward(x):\n        return x + undefined\n",
        "/tmp/ipykernel_1/2.py": "class B:\n    def forward(x):\n        return A.forward(x)\n",
    }
    namespace = {"__name__": "__main__"}
    for file, text in cells.items():
        exec(compile(text, file, "exec"), namespace)
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    with pytest.raises(CheckFailed) as failure:
        check("ring_all_gather", namespace["B"].forward, ranks=[1])
    assert "line 3 of its cell: return A.forward(x)\n" in str(failure.value)
    assert "line 3 of its cell: return x + undefined\n" in str(failure.value)


def test_check_with_a_task_that_is_none():
    with pytest.raises(ValueError, match="no task is called 'ring'; there are ring_reduce_scatter,"):
        check("ring", len)


def test_check_with_what_cannot_be_sent():
    lock = __import__("threading").Lock()
    with pytest.raises(CheckFailed, match="cannot be sent to the ranks"):
        check("ring_all_gather", lambda x: lock)


def test_hub_names_what_does_not_fit():
    """The same operation with another reduction, and a receive of another size: gloo passes over both in
    silence.
    """
    one = [torch.ones(2)]
    hub = Hub(2)
    call = {"group": [0, 1], "where": ["cell 1", 7], "outputs": [["float32", [2]]]}
    assert hub.submit(0, {**call, "id": 0, "op": "all_reduce", "reduce": "sum"}, one) == []
    with pytest.raises(
        Misuse, match="rank 0 calls all_reduce of float32 .2. with SUM, rank 1 calls .* with MAX"
    ):
        hub.submit(1, {**call, "id": 0, "op": "all_reduce", "reduce": "max"}, one)
    hub = Hub(2)
    hub.submit(0, {**call, "id": 0, "op": "send", "peer": 1, "outputs": []}, one)
    with pytest.raises(Misuse, match="rank 0 sends float32 .2. to rank 1, which receives into float32 .3."):
        hub.submit(1, {**call, "id": 0, "op": "recv", "peer": 0, "outputs": [["float32", [3]]]}, [])


def gather_on_a_ring():
    def ring_all_gather(x):
        rank, n = dist.get_rank(), dist.get_world_size()
        chunks = [x.clone() if i == rank else torch.empty_like(x) for i in range(n)]
        for step in range(n - 1):
            work = dist.isend(chunks[(rank - step) % n], (rank + 1) % n)
            dist.recv(chunks[(rank - step - 1) % n], (rank - 1) % n)
            work.wait()
        return torch.cat(chunks)

    return ring_all_gather
