"""Tensors as data: a list of shapes and dtypes, and raw bytes. Nothing here can run code when it is read."""

import math
from collections.abc import Sequence

import torch

DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
MAX_TENSORS, MAX_DIMS = 64, 8


def spec(tensor: torch.Tensor) -> list:
    """What a header says of one tensor: its dtype's name and its shape."""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def pack(tensors: Sequence[torch.Tensor]) -> tuple[list, bytes]:
    """The specs of ``tensors`` and their bytes, one after the other."""
    plain = [t.detach().as_subclass(torch.Tensor).contiguous() for t in tensors]
    return [spec(t) for t in plain], b"".join(bytes(t.reshape(-1).view(torch.uint8).numpy()) for t in plain)


def unpack(specs: object, payload: bytearray) -> list[torch.Tensor]:
    """The tensors that ``specs`` describe; raises ValueError unless specs are sound and fit ``payload``
    exactly.
    """
    if not isinstance(specs, list) or len(specs) > MAX_TENSORS:
        raise ValueError(f"a list of up to {MAX_TENSORS} tensors was expected")
    sizes = [nbytes(one) for one in specs]
    if sum(sizes) != len(payload):
        raise ValueError(f"{sum(sizes)} bytes of tensors were announced and {len(payload)} came")
    tensors, start = [], 0
    for (name, shape), size in zip(specs, sizes):
        data = payload[start : start + size]
        flat = torch.frombuffer(data, dtype=DTYPES[name]) if size else torch.empty(0, dtype=DTYPES[name])
        tensors.append(flat.reshape(shape))
        start += size
    return tensors


def nbytes(one: object) -> int:
    """Bytes of the tensor that a spec describes; raises ValueError when it describes none."""
    if not (isinstance(one, list) and len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], list)):
        raise ValueError("a tensor's spec is [dtype, shape]")
    name, shape = one
    if (
        name not in DTYPES
        or len(shape) > MAX_DIMS
        or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
    ):
        raise ValueError(f"dtype {name[:20]} with {len(shape)} dimensions is not a tensor that can be sent")
    return math.prod(shape) * DTYPES[name].itemsize
