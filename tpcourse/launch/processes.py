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

PIPE_BYTES = 1 << 20
_helper: "Helper | None" = None
_starting = threading.Lock()


class Helper:
    """The parent's end of the helper process (`tpcourse.launch.helper`); one per process, started when first needed."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.lock, self.busy = threading.RLock(), False
        self.put_off: list[dict] = []
        self.ready = False
        self.socket, theirs = socket.socketpair()
        path = [*filter(None, sys.path), str(Path(__file__).parents[2])]  # without "": files beside a notebook hide no module
        tunables = [os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1"]  # fewer pages to copy: forks 3 times faster
        env = {**os.environ, "GLIBC_TUNABLES": ":".join(filter(None, tunables)),
               "OPENBLAS_NUM_THREADS": "1",  # numpy's import starts threads otherwise
               "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir()}  # torch._dynamo's import makes this folder
        with theirs:
            program = f"import sys; sys.path[:] = {path!r}; from tpcourse.launch.helper import main; main({theirs.fileno()})"
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, "tpcourse.launch.helper"],  # the last word names it in lists of processes
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True, env=env)

    def usable(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def ask(self, do: str, fds: list[int] = (), **request) -> dict:
        """Send one request and wait for its answer. Raises RankError when it could not be done or the helper has died."""
        if not self.ready:
            self.socket.recv(1, socket.MSG_PEEK)  # a second or more: here an interrupt may come through
        with self.lock, _no_interrupt():
            if self.busy:  # a world is collected as garbage in the middle of another request of this thread
                self.put_off.append({"do": do, **request})
                return {}
            self.busy = True
            try:
                answer = self._exchange({"do": do, **request}, fds)
                while self.put_off:
                    self._exchange(self.put_off.pop())
            except (BrokenPipeError, ConnectionResetError):
                raise RankError("the process from which ranks are forked has died; run the cell again, and look whether "
                                "this machine ran out of memory" if self.ready else "the process from which ranks are "
                                "forked could not start; it says why on the terminal, or in the log of Jupyter") from None
            finally:
                self.busy = False
        if "error" in answer:
            raise RankError(f"ranks could not be started: {answer['error']}. Use fewer, or allow more open files (ulimit -n) "
                            "and processes (ulimit -u)")
        return answer

    def _exchange(self, request: dict, fds: list[int] = ()) -> dict:
        if not self.ready:
            self._read_line()
            self.ready = True
        message = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(self.socket, [message], list(fds))
        self.socket.sendall(message[sent:])
        return json.loads(self._read_line())

    def _read_line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            chunk = self.socket.recv(1 << 16)
            if not chunk:
                raise ConnectionResetError
            line += chunk
        return line

    def stop(self) -> None:
        if self.owner == os.getpid():
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # also for copies of it in forks of this process
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
        try:
            for rank in range(self.count):
                self._start(rank, setting)
        except BaseException as error:
            self.end()
            if isinstance(error, OSError):
                raise RankError(f"rank {len(self.members)} could not be started: {error}. Use fewer ranks, or allow more open "
                                "files (ulimit -n)") from None
            raise

    def _start(self, rank: int, setting: dict) -> None:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            control, their_control = socket.socketpair()
            ours.enter_context(control)
            theirs.enter_context(their_control)
            output, their_output = _pipe(ours, theirs)
            status, their_status = _pipe(ours, theirs)
            _widen(output)
            os.set_blocking(output, False)
            with tempfile.TemporaryFile() as file:
                log = os.dup(file.fileno())
            ours.callback(os.close, log)
            pid = self.helper.ask("fork", [their_control.fileno(), their_output, log, their_status], world=self.world,
                                  entry=self.entry, setting=setting, config={**self.config, "rank": rank, "folder": self.folder})["pid"]
            ours.pop_all()
        self.members.append(Process(rank, pid, control, output, status, log))

    def end(self) -> None:
        """Kill every process and what it started, and release all descriptors; once is enough, twice does no harm."""
        self._end()

    @property
    def alive(self) -> bool:
        return self._end.alive and self.helper.usable()


def _end(helper: Helper, world: int, members: list[Process]) -> None:
    if helper.owner == os.getpid():  # a fork of this process must not end what is not its own
        try:
            helper.ask("close", world=world)
        except (RankError, OSError):
            _end_without_helper(helper, members)
    for member in members:
        member.close()


def _end_without_helper(helper: Helper, members: list[Process]) -> None:
    """Kill the ranks of a helper that has died, or is about to: the system may not do it, or not yet."""
    for member in members:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(member.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        helper.process.wait(5)


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe()
    ours.callback(os.close, reader)
    theirs.callback(os.close, writer)
    return reader, writer


def _widen(pipe: int) -> None:
    """A larger pipe lets a rank print on while the parent is busy; where it cannot be had, the small one does."""
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
