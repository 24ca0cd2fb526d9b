"""Activation memory: the bytes that autograd keeps for backward, each storage once, parameters apart."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .table import aligned

_TORCH = os.path.dirname(torch.__file__)


@dataclass(frozen=True)
class Saved:
    """A storage kept for backward: shape, dtype of the first tensor saved on it, its bytes, the line."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    where: str


@dataclass
class SavedActivations:
    """What autograd kept: `tensors`, and apart from them the `parameters`, which exist anyway."""

    tensors: list[Saved] = field(default_factory=list)
    parameters: list[Saved] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes kept for backward, without parameters."""
        return sum(saved.bytes for saved in self.tensors)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters that backward reads."""
        return sum(saved.bytes for saved in self.parameters)

    def __str__(self) -> str:
        lines = [
            (s.where, str(list(s.shape)), str(s.dtype).removeprefix("torch."), count, count * s.bytes)
            for s, count in Counter(self.tensors).items()
        ]
        lines.append(("kept for backward", "", "", len(self.tensors), self.bytes))
        lines.append(("parameters, not counted", "", "", len(self.parameters), self.parameter_bytes))
        return aligned(("saved at", "shape", "dtype", "storages", "bytes"), lines)


@contextlib.contextmanager
def saved_activations() -> Iterator[SavedActivations]:
    """Count the bytes that autograd keeps for backward of what runs inside the `with`.

    Yields a `SavedActivations`: `mem.bytes`, `mem.tensors`, `mem.parameter_bytes`; `print(mem)` shows where
    each was saved. Run the forward inside; backward may follow inside or outside and subtracts nothing.

    Counted is the whole storage under each saved tensor, once: two views share one, and a view of one row
    keeps all rows alive. A parameter (`nn.Parameter`, or a view of one) stands apart; all else counts, also
    inputs, masks and buffers. Under `torch.utils.checkpoint` its inputs count and what a selective policy
    caches, not what backward computes again. Not seen: tensors that a custom function keeps as plain
    attributes of `ctx`, and what other saved-tensor hooks inside the `with` take (so nested, the innermost
    counts alone). A DTensor counts with its local shard. Works on meta tensors.

    Source: the quantity is that of Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models", 2022, section 4, measured instead of derived.
    """
    mem, seen = SavedActivations(), set()

    def keep(tensor: object, frame: FrameType) -> None:
        if not isinstance(tensor, Tensor) or torch._C._current_graph_task_id() != -1:
            return  # saved while backward runs: a recomputation, which frees it again
        apart = isinstance(tensor._base if tensor._is_view() else tensor, nn.Parameter)
        for part in _plain(tensor):
            storage = part.untyped_storage()
            key = StorageWeakRef(storage)  # lets the data go, yet no later storage can take this identity
            if storage.nbytes() and key not in seen:
                seen.add(key)
                saved = Saved(tuple(part.shape), part.dtype, storage.nbytes(), _where(frame))
                (mem.parameters if apart else mem.tensors).append(saved)

    def pack(tensor: Tensor) -> tuple[Tensor, int]:
        keep(tensor, sys._getframe(1))
        # Detached, because a node that holds its own output would never be freed.
        return tensor.detach(), tensor._version

    with saved_tensors_hooks(pack, _unpack), _selective_cache(keep):
        yield mem


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    """Give the tensor back; with hooks autograd leaves the check for in-place changes to us."""
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            f"a {list(tensor.shape)} tensor needed for gradient computation has been modified by an inplace "
            f"operation: it is at version {tensor._version}, saved was version {version}; "
            "clone it before the change"
        )
    return tensor


@contextlib.contextmanager
def _selective_cache(keep) -> Iterator[None]:
    """Show `keep` what a selective checkpoint's policy caches: that goes past autograd's hooks."""
    original = torch.utils.checkpoint._VersionWrapper

    class Shown(original):
        def __init__(self, value: object) -> None:
            super().__init__(value)
            keep(value, sys._getframe(1))

    torch.utils.checkpoint._VersionWrapper = Shown
    try:
        yield
    finally:
        torch.utils.checkpoint._VersionWrapper = original


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the data: the tensor itself, or what a sparse one, a DTensor or the like is made of."""
    if tensor.layout == torch.sparse_coo:
        yield from (tensor._values(), tensor._indices())
        return
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    for part in inner:
        if isinstance(part, Tensor):
            yield from _plain(part)


def _where(frame: FrameType) -> str:
    """The torch.nn function, if any, and the line outside torch that called it: "softmax in f:12"."""
    layer = ""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        if not layer and frame.f_code.co_filename.startswith(os.path.join(_TORCH, "nn")):
            layer = f"{_name(frame)} in "
        frame = frame.f_back
    return f"{layer}{_name(frame)}:{frame.f_lineno}"


def _name(frame: FrameType) -> str:
    return frame.f_code.co_qualname.rpartition("<locals>.")[2]
