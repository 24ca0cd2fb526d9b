"""Frames between parent and ranks, and how values are packed into them.

A frame is a JSON header and raw bytes. Tensors travel as plain CPU bytes: never as shared memory, never with the whole
storage behind a view.
"""

import io
import json
import marshal
import pickle
import socket
import struct
import types

import cloudpickle
import torch

from tpcourse.launch.failures import Unsendable

_SIZES = struct.Struct("<IQ")


def send_frame(sock: socket.socket, header: dict, payload: bytes = b"") -> None:
    """Write one frame."""
    text = json.dumps(header).encode()
    sock.sendall(_SIZES.pack(len(text), len(payload)) + text)
    sock.sendall(payload)


def receive_frame(sock: socket.socket) -> tuple[dict, bytearray]:
    """Read one frame; raises EOFError when the other side has closed."""
    header_size, payload_size = _SIZES.unpack(_read(sock, _SIZES.size))
    return json.loads(_read(sock, header_size)), _read(sock, payload_size)


def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        got = sock.recv_into(view[have:])
        if not got:
            raise EOFError
        have += got
    return data


def pack_call(fn, args: tuple) -> bytes:
    """Pickle a function (by value where it lives in a cell or script) and its arguments; the parent's side.

    Raises Unsendable naming the argument that cannot be sent.
    """
    try:
        return _dumps(_Arguments, (fn, args))
    except Exception as error:
        for name, value in [("the function", fn)] + [(f"argument {i + 1}", a) for i, a in enumerate(args)]:
            try:
                _dumps(_Arguments, value)
            except Exception as cause:
                raise Unsendable(f"{name} cannot be sent to the ranks: {_describe(value)}: {cause}. Make it inside the "
                                 "function, or send the plain data it is made from") from None
        raise Unsendable(str(error)) from None


def pack_result(value) -> bytes:
    """Pickle what a rank returns, tensors as plain CPU tensors; the rank's side.

    Raises Unsendable naming the part that cannot be sent and what to return instead.
    """
    try:
        return _dumps(_Results, value)
    except Exception as error:
        path, part = _first_unsendable(value)
        why = str(error) if isinstance(error, Unsendable) else f"{error}. Return plain data: tensors, numbers, strings, dicts"
        raise Unsendable(f"the result{path} cannot be sent back: {_describe(part)}: {why}") from None


unpack = pickle.loads


def unpack_result(rank: int, data: bytearray):
    """Read what `pack_result` wrote; the parent's side. Raises Unsendable when what it needs is known on the rank only."""
    try:
        return unpack(data)
    except Exception as error:
        raise Unsendable(f"the result of rank {rank} cannot be read outside of the rank: {type(error).__name__}: {error}. "
                         "Return plain data: tensors, numbers, strings, dicts", [rank]) from None


def _dumps(pickler, value) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):
    """Code keeps the name of its file (cloudpickle drops it), so that tracebacks show the line in the cell."""

    def reducer_override(self, obj):
        if isinstance(obj, types.CodeType):
            return marshal.loads, (marshal.dumps(obj),)
        return super().reducer_override(obj)


class _Arguments(_Pickler):
    """Tensors keep requires_grad and land on the rank's own device."""

    def reducer_override(self, obj):
        if type(obj) in (torch.Tensor, torch.nn.Parameter) and _is_plain(obj):
            return _rebuild_argument, (*_tensor_bytes(obj), obj.requires_grad, isinstance(obj, torch.nn.Parameter))
        return super().reducer_override(obj)


class _Results(_Pickler):
    """Every tensor becomes a plain one on the CPU, outside of any graph."""

    def reducer_override(self, obj):
        if isinstance(obj, torch.nn.Module):
            raise Unsendable("a module stays on its rank; return its state_dict() or the tensors you need")
        if type(obj).__name__ == "DTensor":
            raise Unsendable("a DTensor lives on its mesh; return x.to_local() for this rank's shard or x.full_tensor()")
        if isinstance(obj, torch.Tensor) and _is_plain(obj):
            return _rebuild, _tensor_bytes(obj)
        return super().reducer_override(obj)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


def _tensor_bytes(tensor: torch.Tensor) -> tuple[bytearray, torch.dtype, tuple[int, ...]]:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return bytearray(plain.reshape(-1).view(torch.uint8).numpy()), plain.dtype, tuple(plain.shape)


def _rebuild(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _rebuild_argument(data, dtype, shape, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    tensor = _rebuild(data, dtype, shape).to(torch.get_default_device())
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _first_unsendable(value) -> tuple[str, object]:
    """Walk dicts, lists and tuples down to the first part that does not pickle: its path and the part."""
    if isinstance(value, dict):
        parts = [(f"[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(f"[{i}]", part) for i, part in enumerate(value)]
    else:
        parts = []
    for step, part in parts:
        try:
            _dumps(_Results, part)
        except Exception:
            path, deepest = _first_unsendable(part)
            return step + path, deepest
    return "", value


def _describe(value) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
