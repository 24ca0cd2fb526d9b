"""N processes forked from the helper, seen from the parent: a control socket, an output pipe and an exit status each."""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path

from tpcourse.launch.failures import RankError

_PIPE_BYTES = 1 << 20
_helper: "Helper | None" = None
_starting = threading.Lock()


class Helper:
    """The parent's end of the helper process (`tpcourse.launch.helper`); one per process, started when first needed."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.lock = threading.Lock()
        self.socket, theirs = socket.socketpair()
        path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
        tunables = [os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1"]  # fewer pages to copy: forks 3 times faster
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "GLIBC_TUNABLES": ":".join(filter(None, tunables)),
               "OPENBLAS_NUM_THREADS": "1",  # numpy's import starts threads otherwise
               "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir()}  # torch._dynamo's import makes this folder
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tpcourse.launch.helper", str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True, env=env)

    def usable(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def ask(self, do: str, fds: list[int] = (), **request) -> dict:
        """Send one request and wait for its answer. Raises RankError when the helper has died."""
        with self.lock, _no_interrupt():
            try:
                message = json.dumps({"do": do, **request}).encode() + b"\n"
                sent = socket.send_fds(self.socket, [message], list(fds))
                self.socket.sendall(message[sent:])
                reply = b""
                while not reply.endswith(b"\n"):
                    chunk = self.socket.recv(1 << 16)
                    if not chunk:
                        raise ConnectionResetError
                    reply += chunk
            except (BrokenPipeError, ConnectionResetError):
                raise RankError("the process from which ranks are forked has died; run the cell again, and look whether "
                                "this machine ran out of memory") from None
        return json.loads(reply)

    def stop(self) -> None:
        if self.owner == os.getpid():
            self.socket.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)


def helper() -> Helper:
    """The live helper of this process; starts one (about a second, it imports torch) if there is none."""
    global _helper
    with _starting:
        if _helper is None or not _helper.usable():
            if _helper is not None:
                atexit.unregister(_helper.stop)
                _helper.stop()
            _helper = Helper()
            atexit.register(_helper.stop)
        return _helper


@contextlib.contextmanager
def _no_interrupt():
    """Hold Ctrl-C back for the few milliseconds of a request, so that request and answer stay in step."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    held = []
    previous = signal.signal(signal.SIGINT, lambda *_: held.append(1))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if held:
            os.kill(os.getpid(), signal.SIGINT)


@dataclass
class Process:
    """One rank's process: its pid, control socket, output pipe, exit-status pipe and shared log file."""

    rank: int
    pid: int
    control: socket.socket
    output: int
    status: int
    log: int

    def close(self) -> None:
        self.control.close()
        for fd in (self.output, self.status, self.log):
            os.close(fd)


@dataclass
class Processes:
    """``count`` processes running ``entry(control, log, config)``, where entry is "module:function".

    The function runs in a process of its own session, forked from the helper, with this process's environment, import
    path and working directory. ``config`` is JSON; it also gets "rank" and "folder" (a private folder, deleted at the end).
    """

    count: int
    entry: str
    config: dict
    members: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.helper = helper()
        opened = self.helper.ask("open")
        self.world, self.folder = opened["world"], opened["folder"]
        self._end = weakref.finalize(self, _end, self.helper, self.world, self.members)
        setting = {"env": dict(os.environ), "path": [p or os.getcwd() for p in sys.path], "cwd": os.getcwd()}
        for rank in range(self.count):
            self._start(rank, setting)

    def _start(self, rank: int, setting: dict) -> None:
        control, their_control = socket.socketpair()
        output, their_output = os.pipe()
        status, their_status = os.pipe()
        _widen(output)
        os.set_blocking(output, False)
        with tempfile.TemporaryFile() as file:
            log = os.dup(file.fileno())
        theirs = [their_control.detach(), their_output, log, their_status]
        config = {**self.config, "rank": rank, "folder": self.folder}
        try:
            pid = self.helper.ask("fork", theirs, world=self.world, entry=self.entry, setting=setting, config=config)["pid"]
        finally:
            for fd in (theirs[0], their_output, their_status):
                os.close(fd)
        self.members.append(Process(rank, pid, control, output, status, log))

    def end(self) -> None:
        """Kill every process and what it started, and release all descriptors; once is enough, twice does no harm."""
        self._end()

    @property
    def alive(self) -> bool:
        return self._end.alive and self.helper.usable()


def _end(helper: Helper, world: int, members: list[Process]) -> None:
    if helper.owner == os.getpid():  # a fork of this process must not end what is not its own
        with contextlib.suppress(RankError, OSError):
            helper.ask("close", world=world)
    for member in members:
        member.close()


def _widen(pipe: int) -> None:
    """A larger pipe lets a rank print on while the parent is busy; where it cannot be had, the small one does."""
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
