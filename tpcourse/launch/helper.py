"""The helper: a small process with torch imported and nothing else done, from which every rank is forked.

Forking the kernel itself deadlocks once it has used threads or CUDA; the helper never has. It answers one request at a
time over a socket pair that only its parent holds, so nobody else can ask it for anything. It dies with its parent, and
every rank dies with it.
"""

import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile

PRELOAD = (
    "torch", "torch.distributed.device_mesh", "torch.distributed.tensor.parallel", "torch.utils.checkpoint", "torch.utils._device",
    "cloudpickle", "einops", "tpcourse.launch.worker", "tpcourse.comm", "tpcourse.measure",
)
WHEN_IDLE = "torch._dynamo"  # 0.7 s that no first cell should wait for; every optimizer and DTensor imports it in each rank
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(fd: int) -> None:
    """Serve fork requests on the socket ``fd`` until the parent closes it or dies."""
    parent = os.getppid()
    requests = socket.socket(fileno=fd)
    wake, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit() if os.getppid() != parent else None)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # heard also in the middle of an import
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of a rank come to us, so that none is lost
    for name in PRELOAD:
        importlib.import_module(name)
    sys.modules["tpcourse.launch.worker"].prepare()
    _settle()
    server = _Server(requests, private=[wake, wake_writer])
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, SystemExit):
        try:
            _serve(server, parent)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing may break off the cleaning up
    server.end_all()


def _serve(server: "_Server", parent: int) -> None:
    """Answer and reap until the parent is gone; import what can wait in a quiet moment."""
    requests, wake = server.requests, server.private[0]
    later = [WHEN_IDLE]
    requests.sendall(b"ready\n")
    while os.getppid() == parent:
        ready, _, _ = select.select([requests, wake], [], [], 0.5)
        if wake in ready:
            os.read(wake, 4096)
            server.reap()
        if requests in ready and not server.answer():
            break
        if not ready and later:
            importlib.import_module(later.pop(0))
            _settle()


class _Server:
    """The worlds that are alive: for each, its folder and its ranks' processes."""

    def __init__(self, requests: socket.socket, private: list[int]) -> None:
        self.requests, self.private = requests, private
        self.folders: dict[int, str] = {}
        self.ranks: dict[int, tuple[int, int]] = {}  # pid -> (world, descriptor that takes the exit status)
        self.worlds = 0

    def answer(self) -> bool:
        """Read one request and answer it; False when the parent has gone."""
        message, fds, _, _ = socket.recv_fds(self.requests, 1 << 20, 8)
        while not message.endswith(b"\n"):
            more = self.requests.recv(1 << 20) if message else b""
            if not more:
                return False
            message += more
        request = json.loads(message)
        try:
            reply = getattr(self, "do_" + request.pop("do"))(fds, **request)
        except OSError as error:  # no more descriptors, processes, disk: the next request may well be possible
            reply = {"error": str(error)}
        self.requests.sendall(json.dumps(reply).encode() + b"\n")
        return True

    def do_open(self, fds: list[int]) -> dict:
        self.worlds += 1
        self.folders[self.worlds] = tempfile.mkdtemp(prefix="tpcourse-")
        return {"world": self.worlds, "folder": self.folders[self.worlds]}

    def do_fork(self, fds: list[int], world: int, entry: str, setting: dict, config: dict) -> dict:
        try:
            if len(fds) < 4:  # the system hands over as many as there is room for
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            pid = os.fork()
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        control, output, log, status = fds
        if pid == 0:
            self._become_rank(control, output, log, status, entry, setting, config)
        for fd in (control, output, log):
            os.close(fd)
        self.ranks[pid] = (world, status)
        return {"pid": pid}

    def do_close(self, fds: list[int], world: int) -> dict:
        members = [pid for pid, (owner, _) in self.ranks.items() if owner == world]
        for pid in members:
            _kill_group(pid)
        for pid in members:
            self._report(*os.waitpid(pid, 0))
        self._kill_orphans()
        shutil.rmtree(self.folders.pop(world, ""), ignore_errors=True)
        return {}

    def reap(self) -> None:
        """Collect the children that ended by themselves and tell their worlds how."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] in self.ranks:
                    self._report(*found)

    def end_all(self) -> None:
        for world in list(self.folders):
            self.do_close([], world)

    def _report(self, pid: int, status: int) -> None:
        _, fd = self.ranks.pop(pid)
        with contextlib.suppress(OSError):
            os.write(fd, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(fd)

    def _kill_orphans(self) -> None:
        """Kill what ranks left behind, also when it had started a session of its own."""
        while orphans := _children() - self.ranks.keys():
            for pid in orphans:
                _kill_group(pid)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _become_rank(self, control: int, output: int, log: int, status: int, entry: str, setting: dict, config: dict):
        code = 1
        try:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for fd in [self.requests.fileno(), status, *self.private, *(fd for _, fd in self.ranks.values())]:
                os.close(fd)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            _adopt(setting)
            module, function = entry.split(":")
            code = getattr(importlib.import_module(module), function)(socket.socket(fileno=control), log, config) or 0
        except BaseException:  # whatever it was, it must not run on in a copy of the server
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(code)


def _adopt(setting: dict) -> None:
    """Take over the parent's environment, import path and working directory as they are now."""
    os.environ.clear()
    os.environ.update(setting["env"])
    sys.path[:] = setting["path"]
    with contextlib.suppress(OSError):
        os.chdir(setting["cwd"])
    sys.argv = [""]
    sys.stdin = open(os.devnull)
    os.dup2(sys.stdin.fileno(), 0)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


def _settle() -> None:
    """Make forks cheap: ranks neither walk, nor touch and so copy, what is in memory now."""
    gc.collect()
    gc.freeze()


def _children() -> set[int]:
    """Our own children as the kernel lists them; on systems without /proc, none are found."""
    found = set()
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
                if int(stat.read().rpartition(")")[2].split()[1]) == os.getpid():
                    found.add(int(name))
    return found


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the group may not exist yet, or not be led by this process
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
