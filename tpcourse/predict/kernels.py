"""The kernels that are not matrix products, as modules run them, to be timed on a rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from tpcourse.comm import Group, RandomStates
from tpcourse.layers import apply_rotary, vocab_parallel_cross_entropy
from tpcourse.layers.dropout import Dropout
from tpcourse.layers.norm import rms_norm
from tpcourse.layers.split_norm import _Normalize
from tpcourse.predict.training import ADAM_BYTES
from tpcourse.predict.work import OPTIMIZER, SUM

FEATURES, HEADS, SEQUENCE, EPS = 256, 4, 64, 1e-5
_WIDTHS = {"swiglu": 2, "heads": 3}  # of x, in FEATURES
_TOUCHED = {"swiglu": 3, "heads": 6, "residual": 3, "residual, dropout": 3, "softmax, dropout": 4, SUM: 3}


def row_bytes(kind: str, e: int) -> float:
    """Bytes that a kernel reads and writes for each row of FEATURES numbers, as `work` counts them."""
    if kind == OPTIMIZER:
        return ADAM_BYTES * FEATURES
    return FEATURES * (e + max(e, 4) if kind == "loss" else e * _TOUCHED.get(kind, 2))


def runs(kind: str, rows: int, dtype: torch.dtype, alone: Group) -> tuple[Callable[[], object], ...]:
    """Forward of a kernel on so many rows and, where there is one, backward; `alone`: this rank as a group."""
    width = _WIDTHS.get(kind, 1) * FEATURES
    x = torch.linspace(-1, 1, rows * width, dtype=dtype).view(rows, width).requires_grad_()
    if kind == OPTIMIZER:
        x.grad = torch.ones_like(x)
        return (torch.optim.AdamW([x]).step,)
    if kind == SUM:
        return (lambda: x.detach() + x.detach(),)
    function, inputs = _made(kind, x, alone)
    y = function()
    gradients = [torch.ones_like(part) for part in y] if isinstance(y, tuple) else torch.ones_like(y)
    return function, lambda: torch.autograd.grad(y, inputs, gradients, retain_graph=True)


def _made(kind: str, x: Tensor, alone: Group) -> tuple[Callable[[], object], list[Tensor]]:
    """What computes y, and what gets gradients."""
    w, b = (torch.randn(FEATURES, dtype=x.dtype, requires_grad=True) for _ in range(2))
    table = torch.randn(FEATURES, FEATURES, dtype=x.dtype, requires_grad=True)
    stream, ids = x.detach().clone(), torch.randint(FEATURES, (len(x),))
    elsewhere, later = (ids < 9)[:, None], torch.zeros(FEATURES, dtype=x.dtype)
    drop = Dropout(0.1, RandomStates(0, None), sharded=False)
    return {
        "layer norm": (lambda: F.layer_norm(x, (FEATURES,), w, b, EPS), [x, w, b]),
        "rms norm": (lambda: rms_norm(x, w, EPS), [x, w]),
        "split layer norm": (lambda: _Normalize.apply(x, w, b, alone, EPS), [x, w, b]),
        "split rms norm": (lambda: _Normalize.apply(x, w, None, alone, EPS), [x, w]),
        "gelu": (lambda: F.gelu(x), [x]),
        "swiglu": (lambda: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], [x]),
        "residual": (lambda: stream + (x + b), [x, b]),
        "residual, dropout": (lambda: stream + drop(x + b), [x, b]),
        "heads": (lambda: _heads(x), [x]),
        "rotary": (lambda: apply_rotary(x[None], torch.arange(len(x))), [x]),
        "softmax": (lambda: (x + later).softmax(-1), [x]),
        "softmax, dropout": (lambda: drop((x + later).softmax(-1)), [x]),
        "embedding": (lambda: stream + F.embedding(ids, table).masked_fill(elsewhere, 0), [table]),
        "loss": (lambda: vocab_parallel_cross_entropy(x, ids, alone, FEATURES), [x]),
    }[kind]


def _heads(x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values apart, head by head; and what has the shape of queries, together again."""
    s = min(SEQUENCE, len(x))
    q, k, v = (rearrange(part[:len(x) // s * s], "(b s) (h d) -> (b h) s d", s=s, h=HEADS).contiguous()
               for part in x.split(FEATURES, -1))
    return rearrange(q, "(b h) s d -> (b s) (h d)", h=HEADS).contiguous(), k, v
