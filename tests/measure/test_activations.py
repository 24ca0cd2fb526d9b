"""What autograd keeps for backward, against closed forms; float64 and odd sizes, one process."""

import gc
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tpcourse.measure import saved_activations

T, D, H = 5, 3, 7  # tokens, width, hidden width
BYTES = 8  # of a float64


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def kept(fn, *args):
    with saved_activations() as mem:
        out = fn(*args)
    del out
    return mem


def tokens(*shape, grad=True):
    return torch.randn(*(shape or (T, D)), requires_grad=grad)


def frozen(module):
    return module.requires_grad_(False)


def mlp(activation):
    return nn.Sequential(nn.Linear(D, H), activation, nn.Linear(H, D))


def sines(x):
    return x.sin().sin()


def chunks(x):
    q, k, v = x.chunk(3, -1)
    return q * k + v


FORMS = {  # name: makes the function, makes its input, the numbers kept (each 8 bytes)
    "a linear layer keeps its input": (lambda: nn.Linear(D, H), lambda: tokens(grad=False), T * D),
    "also one with a batch dimension, a view": (lambda: nn.Linear(D, H), lambda: tokens(2, T, D), 2 * T * D),
    "a frozen one keeps nothing but its weight": (lambda: frozen(nn.Linear(D, H)), tokens, 0),
    "GELU keeps its input": (nn.GELU, tokens, T * D),
    "linear, GELU, linear": (lambda: mlp(nn.GELU()), tokens, T * D + 2 * T * H),
    "linear, ReLU, linear: one output serves both": (lambda: mlp(nn.ReLU()), tokens, T * D + T * H),
    "LayerNorm keeps its input and two numbers a token": (lambda: nn.LayerNorm(D), tokens, T * D + 2 * T),
    "softmax keeps its output": (lambda: nn.Softmax(-1), tokens, T * D),
    "dropout keeps its mask": (lambda: nn.Dropout(0.3), tokens, T * D),
    "a sum keeps nothing": (lambda: lambda x: x + x, tokens, 0),
    "a square keeps x once": (lambda: lambda x: x * x, tokens, T * D),
    "an embedding keeps its indices": (lambda: nn.Embedding(9, D), lambda: torch.arange(T), T),
    "two views of one storage keep it once, whole": (lambda: chunks, lambda: tokens(T, 3 * D), 3 * T * D),
    "a view of one row keeps all rows": (lambda: lambda x: x[:1].sin(), tokens, T * D),
    "in place": (lambda: lambda x: torch.relu_(x * 2), tokens, T * D),
    "a cast is kept in its own type": (lambda: lambda x: x.float().sin(), tokens, T * D / 2),
    "a checkpoint keeps its input": (lambda: partial(checkpoint, sines, use_reentrant=False), tokens, T * D),
    "the reentrant one too": (lambda: partial(checkpoint, sines, use_reentrant=True), tokens, T * D),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_closed_form(name, device):
    make, make_input, numbers = FORMS[name]
    with torch.device(device):
        assert kept(make(), make_input()).bytes == numbers * BYTES


def test_parameters_stand_apart():
    linear, norm = nn.Linear(D, H), nn.LayerNorm(D)
    mem = kept(lambda x: linear(norm(x)) @ linear.weight, tokens())
    assert mem.parameter_bytes == (H * D + D + D) * BYTES  # both weights once, and LayerNorm's bias
    assert mem.bytes == (T * D + 2 * T + T * D + T * H) * BYTES


def test_what_a_custom_function_saves():
    class Matmul(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.t() @ x

    mem = kept(Matmul.apply, tokens(), nn.Linear(D, H).weight)
    assert (mem.bytes, mem.parameter_bytes) == (T * D * BYTES, H * D * BYTES)


def test_nothing_is_kept_without_gradients():
    with torch.no_grad():
        assert kept(nn.Linear(D, H), tokens()).bytes == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_adds_nothing(reentrant):
    block = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))

    def again(fn):
        return lambda x: checkpoint(fn, x, use_reentrant=reentrant)

    def run(x):
        nested = again(lambda y: block(again(block)(y)))
        again(block)(nested(x)).sum().backward()

    assert kept(run, tokens()).bytes == 2 * T * D * BYTES  # the inputs of the two outer checkpoints


def test_what_a_selective_policy_caches_counts():
    block = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    mem = kept(lambda x: checkpoint(block, x, use_reentrant=False, context_fn=contexts), tokens())
    assert mem.bytes == (T * D + T * H + T * D) * BYTES  # the input and both products


def test_storages_that_come_and_go_are_not_mistaken_for_each_other():
    def run():
        for _ in range(50):  # the allocator hands out the same addresses again and again
            tokens().sin().sum().backward()

    mem = kept(run)
    assert len(mem.tensors) == 50 and mem.bytes == 50 * T * D * BYTES


def test_counting_keeps_nothing_alive():
    gc.disable()
    try:
        with saved_activations() as mem:
            x = tokens()
            y = torch.softmax(x * 2, -1).sin()
        storages = [StorageWeakRef(t.untyped_storage()) for t in (x, y)]
        del x, y
        assert all(storage.expired() for storage in storages) and mem.bytes > 0
    finally:
        gc.enable()


def test_gradients_are_what_they_were():
    model, x = nn.Sequential(nn.Linear(D, H), nn.Softmax(-1), nn.LayerNorm(H)), tokens()

    def both(run):
        (first,) = torch.autograd.grad(run(x).pow(3).sum(), x, create_graph=True)
        return first, torch.autograd.grad(first.pow(2).sum(), x)[0]

    plain = both(model)
    with saved_activations():
        counted = both(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, counted, strict=True))


def test_a_change_in_place_is_still_an_error():
    with saved_activations():
        y = tokens() * 2
        z = y.sin()
        y.add_(1)
    with pytest.raises(RuntimeError, match=r"a \[5, 3\] tensor needed .* version 1, saved was version 0"):
        z.sum().backward()


def test_nested_counts_and_an_error_inside():
    with saved_activations() as outer:
        a = tokens().sin()
        with pytest.raises(KeyError), saved_activations() as inner:
            b = tokens(T, H).sin()
            raise KeyError
        c = tokens().sin()
    d = tokens().sin()
    del a, b, c, d
    assert inner.bytes == T * H * BYTES
    assert outer.bytes == 2 * T * D * BYTES  # the innermost counts alone


def attention(x):
    return torch.nn.functional.softmax(x @ x.t(), -1)


def test_print_says_where():
    mem = kept(attention, tokens())
    line = attention.__code__.co_firstlineno + 1
    assert [" ".join(text.split()) for text in str(pickle.loads(pickle.dumps(mem))).splitlines()] == [
        "saved at shape dtype storages bytes",
        f"attention:{line} [3, 5] float64 1 120",
        f"softmax in attention:{line} [5, 5] float64 1 200",
        "kept for backward 2 320",
        "parameters, not counted 0 0",
    ]


def test_a_sparse_tensor_counts_its_values_and_indices():
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    with saved_activations() as mem:
        y = torch.sparse.mm(dense.to_sparse(), x)
    y.sum().backward()
    assert mem.bytes == 2 * 8 + 2 * 2 * 8  # two values in float64, two rows of int64 indices
    assert torch.equal(x.grad, dense.T @ torch.ones(3, 4, dtype=torch.float64))
