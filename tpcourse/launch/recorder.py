"""The recorder: hooks in torch.distributed that note each call of a rank in its record, and which call it waits in.

Calls of the Python functions of torch.distributed and of its functional collectives are noted, hence DTensor's too. What
C++ calls by itself (DistributedDataParallel's reducer, the backward of functional collectives) is not.
"""

import contextlib
import functools
import inspect
import threading
from collections import Counter

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tpcourse.launch.describe import describe, queue_of
from tpcourse.launch.record import Log

_PLAIN = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all", "all_to_all_single", "barrier",
    "broadcast", "gather", "irecv", "isend", "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scatter", "send",
)
_FUNCTIONAL = (
    "all_reduce", "all_gather_single", "all_gather_single_autograd", "all_gather_tensor", "all_gather_tensor_autograd",
    "all_to_all_single", "all_to_all_single_autograd", "broadcast", "reduce_scatter_single", "reduce_scatter_single_autograd",
    "reduce_scatter_tensor", "reduce_scatter_tensor_autograd",
)


class _Thread(threading.local):
    inside = False  # whether this thread is in a call that is noted already


class Recorder:
    """Notes this rank's calls in ``log`` while ``on``; installed once, before ranks are forked."""

    def __init__(self) -> None:
        self.log: Log | None = None
        self.on = False
        self.thread = _Thread()
        self.noting = threading.Lock()
        self.turns: Counter = Counter()
        self.works = WeakIdKeyDictionary()  # what an asynchronous call gave -> the call's number

    def install(self) -> None:
        """Wrap the collectives of torch.distributed, its functional collectives, and the waits for both."""
        import torch.distributed as dist
        from torch.distributed import _functional_collectives as functional
        from torch.distributed import distributed_c10d as c10d

        for name in filter(lambda name: hasattr(c10d, name), _PLAIN):
            wrapped = self._wrap(name, getattr(c10d, name))
            setattr(c10d, name, wrapped)
            setattr(dist, name, wrapped)
        for name in filter(lambda name: hasattr(functional, name), _FUNCTIONAL):
            setattr(functional, name, self._wrap(name, getattr(functional, name), returns_at_once=True))
        functional.wait_tensor = self._wrap_wait(functional.wait_tensor)
        dist.Work.wait = self._wrap_wait(dist.Work.wait)

    def _wrap(self, name: str, function, returns_at_once: bool = False):
        names = tuple(inspect.signature(function).parameters)
        returns_at_once = returns_at_once or name in ("isend", "irecv")

        @functools.wraps(function)
        def call(*args, **kwargs):
            if torch.compiler.is_compiling() or not self.on or self.thread.inside:
                return function(*args, **kwargs)
            number, waits = None, False
            with contextlib.suppress(Exception):  # a call too odd to note must fail in its own way
                given = {**dict(zip(names, args)), **kwargs}
                number, waits = self._note(name, given), not (returns_at_once or given.get("async_op"))
            with self._inside(number if waits else None):
                result = function(*args, **kwargs)
            if number is not None and not waits:
                with contextlib.suppress(TypeError):  # what cannot be referred to weakly cannot be waited for either
                    self.works[result.elem if type(result).__name__ == "AsyncCollectiveTensor" else result] = number
            return result

        return call

    def _wrap_wait(self, wait):
        @functools.wraps(wait)
        def call(work, *args, **kwargs):
            if torch.compiler.is_compiling() or not self.on or self.thread.inside:
                return wait(work, *args, **kwargs)
            with self._inside(self.works.get(work)):
                return wait(work, *args, **kwargs)

        return call

    def _note(self, name: str, given: dict) -> int:
        fields = describe(name, given)
        with self.noting:
            line = queue_of(fields)
            turn = self.turns[line]
            number = self.log.add([fields[0], str(turn), *fields[1:]])
            self.turns[line] += 1
        return number

    @contextlib.contextmanager
    def _inside(self, number: int | None):
        """While in a call: what it calls in turn is not noted, and the rank waits in call ``number`` if that is given."""
        self.thread.inside = True
        if number is not None and not _crowded():
            self.log.wait_in(number)
        try:
            yield
        finally:
            self.thread.inside = False
            if number is not None:
                self.log.wait_in(None)


def _crowded() -> bool:
    """Whether other threads may also talk to ranks, so that this one's wait does not mean that the rank is stuck.

    Daemons are taken for helpers (a progress bar's monitor, a data loader's queue) that do not.
    """
    return threading.active_count() > 1 and any(
        not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate())
