"""Worlds: ranks that run one function after another, and `spawn`, a world for a single call."""

import inspect
import threading

from tpcourse.launch import devices, torchrun, wire, worker
from tpcourse.launch.failures import RankError, WorldClosed, show_without_frames
from tpcourse.launch.processes import Processes
from tpcourse.launch.run import Run
from tpcourse.launch.verdict import Verdict


class World:
    """Ranks that stay alive between calls.

    Args:
        mesh: sizes of the mesh's named dimensions, the last varying fastest, e.g. ``{"dp": 2, "tp": 2}``.
        ranks: short for ``mesh={"tp": ranks}``.
        backend, device: "nccl" or "gloo", "cuda" or "cpu"; chosen from what the machine has when not given.
        threads: CPU threads per rank.

    Raises ValueError or TypeError at once when such a world cannot be had here. Use it in a ``with`` block, or close it.
    """

    def __init__(self, mesh: dict[str, int] | None = None, *, ranks: int | None = None, backend: str | None = None,
                 device: str | None = None, threads: int = 1) -> None:
        _refuse_inside_rank()
        self.mesh = devices.mesh_shape(mesh, ranks)
        count = self.size
        backend, device = devices.choose(count, backend, device)
        devices.announce(backend, device)
        self._ended = ""
        self._free = threading.Lock()
        self._processes = Processes(count, "tpcourse.launch.worker:main", {
            "count": count, "shape": list(self.mesh.values()), "names": list(self.mesh), "backend": backend,
            "device": device, "threads": threads})
        self._verdict = Verdict([member.log for member in self._processes.members])

    @property
    def size(self) -> int:
        """The number of ranks."""
        count = 1
        for size in self.mesh.values():
            count *= size
        return count

    @property
    def alive(self) -> bool:
        """Whether the world can still run something."""
        return not self._ended and self._processes.alive

    def run(self, function, *args, timeout: float = 60.0, record: bool = True) -> list:
        """Run ``function(mesh, *args)`` on every rank; returns the list of their results, in rank order.

        Args:
            function: anything callable; where it lives in a cell or script it is sent by value.
            args: anything that pickles; tensors arrive on the rank's own device.
            timeout: seconds after which ranks that are not done are stopped, and their lines shown.
            record: keep the record of calls that explains mistakes; switch it off to time something very short.

        Results come back as plain data, tensors on the CPU. Raises a RankError that says what happened when a rank fails;
        the world survives when every rank answered, and is closed when one died or had to be stopped.
        """
        if not self.alive:
            raise WorldClosed(f"this world has ended ({self._ended or 'its processes are gone'}); make a new one")
        _check_call(function, args)
        run = Run(self._processes, self._verdict, timeout, record)
        if not self._free.acquire(blocking=False):
            raise RankError("this world is at work for another thread; wait for it, or make a world of your own")
        try:
            return run.results(wire.pack_call(function, args))
        except BaseException as error:
            if run.begun and not run.settled:
                self._end("interrupted" if isinstance(error, KeyboardInterrupt) else str(error).partition("\n")[0])
            if isinstance(error, KeyboardInterrupt):
                show_without_frames(error)
            raise
        finally:
            self._free.release()

    def close(self) -> None:
        """End every rank; what they hold is gone."""
        self._end("it was closed")

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._verdict.close()
        self._processes.end()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        return f"World({sizes}{'' if self.alive else ', ended'})"


def spawn(function, *args, mesh: dict[str, int] | None = None, ranks: int | None = None, backend: str | None = None,
          device: str | None = None, threads: int = 1, timeout: float = 60.0, record: bool = True) -> list:
    """Run ``function(mesh, *args)`` on fresh ranks and return the list of their results, in rank order.

    The arguments are those of `World` and `World.run`; the ranks are gone when the call returns or raises. In a script
    that torchrun started, the function runs on torchrun's ranks instead, and every one of them gets the list.
    """
    if torchrun.is_launcher() and worker.current is None:
        return torchrun.run_here(function, args, devices.mesh_shape(mesh, ranks), backend, device, threads)
    with World(mesh, ranks=ranks, backend=backend, device=device, threads=threads) as world:
        return world.run(function, *args, timeout=timeout, record=record)


def _check_call(function, args: tuple) -> None:
    """Refuse a function that cannot be called as function(mesh, *args), before it fails on every rank."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not to be had, as for some built-in functions: the ranks will tell
        return
    try:
        signature.bind(None, *args)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(f"{name}{signature} is called on each rank with the mesh and then your {len(args)} arguments: {error}. "
                        "Its first parameter takes the mesh") from None


def _refuse_inside_rank() -> None:
    if worker.current is not None:
        raise RuntimeError(f"this is already a rank, one of {worker.current.size()}: ranks do not start ranks of their own. "
                           "Start them from the notebook or script, or use this rank's mesh")
    if torchrun.is_launcher():
        raise RuntimeError("torchrun has started the ranks already; run a function on them with tp.spawn")
