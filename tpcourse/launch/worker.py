"""What a rank does: join its group, then run one job after another until the parent hangs up."""

import contextlib
import datetime
import faulthandler
import linecache
import os
import signal
import socket
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpcourse.launch import wire
from tpcourse.launch.places import is_own
from tpcourse.launch.record import HEADER_BYTES, SLOT_BYTES, SLOTS, Log
from tpcourse.launch.recorder import Recorder

PLACE_OFFSET = HEADER_BYTES + SLOTS * SLOT_BYTES  # in the log, behind the record: where a stuck rank writes its stack
current: DeviceMesh | None = None  # the mesh of the rank that this process is; None in every other process
recorder = Recorder()


def main(control: socket.socket, log: int, config: dict) -> int:
    """Serve jobs on ``control``; the entry point of a rank (see `processes.Processes`)."""
    global current
    recorder.log = Log(log, create=True)
    faulthandler.register(signal.SIGUSR1, file=_end_of(log), all_threads=False)
    faulthandler.enable(file=_end_of(log))
    try:
        current = join(config)
    except Exception as error:
        wire.receive_frame(control)  # the first job, which cannot run
        wire.send_frame(control, _failure(error))
        return 1
    rank = os.getpid()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            header, payload = wire.receive_frame(control)
            recorder.on = header["record"]
            frame = _run(payload)
            if os.getpid() != rank:  # the function has forked; only the rank itself answers
                return 0
            wire.send_frame(control, *frame)
    return 0


def prepare() -> None:
    """What the helper does once for all ranks that it will fork."""
    recorder.install()
    is_own(__file__)  # finds out once where Python's own files are


def join(config: dict) -> DeviceMesh:
    """Set this process up as ``config["rank"]`` of its world and return the mesh."""
    rank, shape, names = config["rank"], config["shape"], config["names"]
    count = config["count"]
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(count),
                      GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
    torch.set_num_threads(config["threads"])
    if config["device"] == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))
    store = dist.FileStore(os.path.join(config["folder"], "store"), count)
    dist.init_process_group(config["backend"], store=store, rank=rank, world_size=count, timeout=datetime.timedelta(days=1))
    with warnings.catch_warnings(action="ignore"):
        return init_device_mesh(config["device"], tuple(shape), mesh_dim_names=tuple(names))


def _run(payload: bytearray) -> tuple[dict, bytes]:
    """Run one job; returns the frame that answers it."""
    try:
        function, args = wire.unpack(payload)
        value = function(current, *args)
        header, data = {"kind": "result"}, wire.pack_result(value)
    except SystemExit as error:
        header, data = {"kind": "exit", "code": str(error.code)}, b""
    except BaseException as error:
        header, data = _failure(error), b""
        traceback.clear_frames(error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return header, data


def _failure(error: BaseException) -> dict:
    """An exception as data: its type, its message, and the frames of the person's own code, innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if is_own(f.filename)] or list(frames[-1:])
    if isinstance(error, wire.Unsendable):
        own = []
    if isinstance(error, SyntaxError):
        own = [traceback.FrameSummary(error.filename or "", error.lineno or 0, "", line=error.text or "")]
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    try:
        message = str(error) + notes
    except Exception as second:
        message = f"(its message cannot be shown: {type(second).__name__})"
    return {"kind": "error", "type": type(error).__name__, "message": message,
            "frames": [[f.filename, f.lineno or 0, f.name, (f.line or linecache.getline(f.filename, f.lineno)).strip()] for f in own]}


def _end_of(log: int):
    """The log as a file positioned behind the record, for stacks that must be written even when Python is stuck."""
    file = os.fdopen(os.dup(log), "wb", buffering=0)
    file.seek(PLACE_OFFSET)
    return file
