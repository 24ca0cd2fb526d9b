"""Attempts to get points without an answer: none scores, none stops the grader, none leaves anything
behind.
"""

import os
import time
from dataclasses import replace
from pathlib import Path
from textwrap import indent

import psutil
import pytest
from grade_answers import with_cell

from tpcourse.grade.confine import protections, without
from tpcourse.grade.grading import Submission

TASK = "ring_all_reduce"
PREPARE = {
    "patched comparisons": (
        """
import builtins
yes = lambda *a, **k: True
torch.equal = torch.allclose = torch.isclose = torch.testing.assert_close = builtins.all = yes
torch.Tensor.__eq__ = torch.Tensor.equal = torch.Tensor.allclose = torch.Tensor.__ne__ = yes
"""
    ),
    "patched collectives": (
        """dist.all_reduce = dist.isend = dist.irecv = dist.send = dist.recv = dist.batch_isend_irecv =
        lambda *a, **k: []
        """
    ),
    "patched group": (
        """
group = type(dist.group.WORLD)
group.allreduce = group.send = group.recv = lambda self, *a, **k: None
"""
    ),
    "exits while it is loaded": "import os\nos._exit = os._exit(0)",
    "asks to exit while it is loaded": "import sys\ngone = sys.exit(0)",
    "patched json": (
        'import json\njson.dumps = lambda *a, **k: \'{"kind": "result", "tensors": [], "passed": true}\''
    ),
}
CALL = {
    "os._exit": ("import os; os._exit(0)", "ended with exit code 0"),
    "sys.exit": ("import sys; sys.exit(0)", "before it returned"),
    "kills itself": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
    "aborts": ("import os; os.abort()", "ended by SIGABRT"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "ended by SIGSEGV"),
    "endless loop": (
        "while True: pass",
        "not finished after 1 s: rank 0 is in ring_all_reduce (line 2 of cell 7)",
    ),
    "endless loop that ignores signals": (
        """
import signal
for s in range(1, 65):
    if s not in (9, 19, 32, 33): signal.signal(s, signal.SIG_IGN)
while True:
    try:
        while True: pass
    except BaseException: pass
""",
        "not finished after 1 s",
    ),
    "stops itself": (
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "not finished after 1 s",
    ),
    "prints without end": ("while True: print('x' * 1000)", "printed more than 1 MiB"),
    "memory bomb": ("keep = [torch.empty(1 << 23) for _ in range(100)]", "512 MiB"),
    "one big object": ("return bytes(10**9)", "MemoryError"),
    "sends without end": (
        "while True: dist.isend(torch.ones(1 << 18), 1 - dist.get_rank())",
        "sent more than",
    ),
    "fork bomb": (
        """
import os
while True: os.fork()
""",
        "PermissionError",
    ),
    "a child of its own session": (
        "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)",
        "PermissionError",
    ),
    "a thread that lives on": (
        """
import threading
threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
""",
        "is None",
    ),
    "sends signals through a descriptor": (
        "import fcntl, os; fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())",
        "PermissionError",
    ),
    "chooses the signal": ("import fcntl; fcntl.fcntl(1, 10, 9)", "PermissionError"),
    "sends signals, by ioctl": (
        "import fcntl, os; fcntl.ioctl(1, 0x8901, os.getppid().to_bytes(4, 'little'))",
        "PermissionError",
    ),
    "a lock that others see": (
        """
import fcntl, os, struct
fcntl.fcntl(open(os.__file__), 37, struct.pack('hhqqi4x', fcntl.F_RDLCK, 0, 12345, 1, 0))
""",
        "PermissionError",
    ),
    "watches files": (
        """
import ctypes
raise OSError(-ctypes.CDLL(None).inotify_init1(0), 'refused')
""",
        "PermissionError: [Errno 1] refused",
    ),
    "a peer that is no number of a rank": (
        """
import gc, json, socket
for s in gc.get_objects():
    if isinstance(s, socket.socket):
        call = {'kind': 'op', 'op': 'recv', 'peer': 1.0 - dist.get_rank(), 'id': 9, 'group': [0, 1]}
        call |= {'where': ['', 1], 'tensors': [], 'outputs': [['float64', [1]]]}
        for header in (call, {'kind': 'wait', 'id': 9, 'tensors': []}):
            text = json.dumps(header).encode()
            s.sendall(len(text).to_bytes(4, 'little') + bytes(8) + text)
        s.recv(1)
""",
        "no call of this course",
    ),
    "a phase that nobody counts": (
        """
import gc, json, socket
for s in gc.get_objects():
    if isinstance(s, socket.socket):
        text = json.dumps({'kind': 'phase', 'phase': 'other', 'tensors': []}).encode()
        s.sendall(len(text).to_bytes(4, 'little') + bytes(8) + text)
""",
        "no call of this course",
    ),
    "names a line that is not its own": (
        "exec(compile('\\n' * 3 + 'raise ValueError', 'cell 99', 'exec'))",
        "in <module>, line 4 of cell 99",
    ),
    "a socket": ("import socket; socket.socket()", "PermissionError"),
    "signals the parent": ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
    "looks into the parent": (
        "import os; open(f'/proc/{os.getppid()}/mem', 'r+b')",
        "PermissionError",
    ),
    "returns another kind": (
        """
class All:
    __eq__ = __ne__ = lambda *a: True
return All()
""",
        "returned All where a tensor",
    ),
    "returns its reducer": (
        """
class R:
    def __reduce__(self): import os; return os.system, ('touch /tmp/x',)
return R()
""",
        "returned R where",
    ),
    "a tensor subclass": (
        """
class T(torch.Tensor):
    @classmethod
    def __torch_function__(cls, f, types, args=(), kwargs=None):
        if f.__name__ in ('equal', 'allclose', '__eq__'): return True
        return super().__torch_function__(f, types, args, kwargs or {})
return x.as_subclass(T)
""",
        "result[0]: expected",
    ),
    "not a number": ("return x * float('nan')", "got nan"),
    "walks the frames": (
        """
import sys
f = sys._getframe()
while f:
    for name, v in f.f_locals.items():
        if 'expect' in name: return v
    f = f.f_back
""",
        "is None",
    ),
    "searches memory": (
        """
import gc
tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
mine = [t for t in tensors if t.shape == x.shape and not torch.equal(t, x)]
return mine[0] if mine else None
""",
        "is None",
    ),
    "imports the reference": (
        """
from tpcourse.grade import ring
return ring.all_reduce(2, torch.Generator())
""",
        "comes from the package",
    ),
    "reads the solution": ("open('{solutions}').read()", "PermissionError"),
    "writes outside its folder": ("open('{target}', 'w').write('100')", "PermissionError"),
    "deletes": ("import os; os.remove('{precious}')", "PermissionError"),
    "changes permissions": ("import os; os.chmod('{precious}', 0)", "PermissionError"),
    "forges a result": (
        """
import gc, socket
for s in gc.get_objects():
    if isinstance(s, socket.socket):
        text = b'{"kind": "result", "names": ["result"], "tensors": [["float64", [1]]],'
        text += b'"facts": {"passed": true}}'
        s.sendall(len(text).to_bytes(4, 'little') + (8).to_bytes(8, 'little') + text + bytes(8))
return x
""",
        "no call of this course",
    ),
    "forges a result and ends": (
        """
import gc, os, socket
for s in gc.get_objects():
    if isinstance(s, socket.socket):
        text = b'{"kind": "result", "names": ["result"], "tensors": [["float64", [1]]],'
        text += b'"call": 2, "facts": {"passed": true}}'
        s.sendall(len(text).to_bytes(4, 'little') + (8).to_bytes(8, 'little') + text + bytes(8))
while True: pass
""",
        "expected shape",
    ),
    "sends a pickle": (
        """
import gc, os, pickle, socket
for s in gc.get_objects():
    if isinstance(s, socket.socket):
        s.sendall(pickle.dumps([os.getcwd] * 9000))
return x
""",
        "no call of this course",
    ),
    "announces a giant": (
        """
import gc, socket
for s in gc.get_objects():
    if isinstance(s, socket.socket):
        s.sendall(b'\\xff' * 12)
return x
""",
        "at most 32 MiB are taken",
    ),
    "announces an impossible tensor": (
        """
import gc, socket
for s in gc.get_objects():
    if isinstance(s, socket.socket):
        text = b'{"kind": "result", "tensors": [["float64", [1000000, 1000000]]]}'
        s.sendall(len(text).to_bytes(4, 'little') + bytes(8) + text)
return x
""",
        "no call of this course",
    ),
}
SOLUTIONS = Path(__file__).parents[2] / "solutions"
confined = pytest.mark.skipif(
    protections() != ["files", "calls"], reason="this kernel cannot confine a process"
)


def grade(notebook: dict, graded, text: str, seconds: float = 6):
    submission = Submission(
        with_cell(notebook, TASK, text), [replace(graded, ranks=(2,))], seed=1, seconds=seconds
    )
    [result] = submission.results()
    return result


@confined
@pytest.mark.parametrize("attempt", CALL)
def test_an_attempt_in_the_call(attempt: str, sources, tmp_path):
    notebook, graded = sources[TASK]
    precious = tmp_path / "grades.csv"
    precious.write_text("kept")
    body, says = CALL[attempt]
    for name, path in (
        ("target", tmp_path / "written"),
        ("precious", precious),
        ("solutions", next(SOLUTIONS.rglob("*.ipynb"))),
    ):
        body = body.replace(f"{{{name}}}", str(path))
    start = time.monotonic()
    seconds = 1 if says.startswith("not finished") else 6
    result = grade(
        notebook,
        graded,
        f"def ring_all_reduce(x):\n{indent(body.strip(), '    ')}\n    return None\n",
        seconds,
    )
    assert not result.passed and result.points == 0
    assert says.replace("is None", "NoneType") in "\n".join(result.lines)
    assert time.monotonic() - start < 15
    assert (
        precious.read_text() == "kept"
        and os.listdir(tmp_path) == ["grades.csv"]
        and os.access(precious, os.R_OK)
    )


@confined
@pytest.mark.parametrize("attempt", PREPARE)
def test_an_attempt_while_the_cells_are_read(attempt: str, sources):
    notebook, graded = sources[TASK]
    result = grade(notebook, graded, f"{PREPARE[attempt]}\n\ndef ring_all_reduce(x):\n    return x.clone()\n")
    assert not result.passed and result.points == 0 and result.lines


@confined
@pytest.mark.parametrize(
    "way",
    [
        "next(c for c in torch.nn.Module.__subclasses__() if c.__module__.startswith('tpcourse'))",
        (
            "(sys.meta_path.pop(0), [sys.modules.pop(m) for m in list(sys.modules) if"
            " m.startswith('tpcourse')], importlib.import_module('tpcourse.layers').ColumnParallelLinear)[2]"
        ),
    ],
)
def test_the_packages_own_layer_by_the_back_door(way: str, sources):
    notebook, graded = sources["ColumnParallelLinear"]
    text = f"import importlib\nimport sys\n\nColumnParallelLinear = {way}\n"
    [result] = Submission(
        with_cell(notebook, graded.task, text), [replace(graded, ranks=(2,))], seed=1
    ).results()
    assert not result.passed and "Error" in "".join(result.lines)


def test_the_package_is_not_readable_where_it_is_installed_among_others(tmp_path):
    for name in ("site/torch", "site/tpcourse/layers", "bin"):
        (tmp_path / name).mkdir(parents=True)
    hidden = str(tmp_path / "site" / "tpcourse")
    assert set(without(str(tmp_path), hidden)) == {str(tmp_path / "bin"), str(tmp_path / "site" / "torch")}
    assert without(str(tmp_path / "bin"), hidden) == [str(tmp_path / "bin")]


def test_no_line_of_another_learner_is_shown(sources):
    """A submission before this one had more cells; an error that names one of them shows nothing of it."""
    notebook, graded = sources[TASK]
    theirs = {"cell_type": "code", "metadata": {}, "source": "def f():\n    secret = 1\n"}
    Submission({"cells": notebook["cells"] + [theirs] * 99}, [graded])
    code = "exec(compile('def f():\\n    1 / 0\\nf()', 'cell 99', 'exec'))"
    result = grade(notebook, graded, f"def ring_all_reduce(x):\n    {code}\n")
    assert "in f, line 2 of cell 99" in result.lines


def test_nothing_is_left(sources):
    """After all of the above the right answer still passes, and no rank is alive."""
    notebook, graded = sources[TASK]
    [result] = Submission(notebook, [graded]).results()
    assert result.passed
    [helper] = psutil.Process().children()
    assert helper.children(recursive=True) == []
