"""Norms over split features on real ranks, against torch's over whole ones in one process."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.measure import Row, Table, wire_bytes

KINDS = {"SplitLayerNorm": nn.LayerNorm, "SplitRMSNorm": nn.RMSNorm}
DIM, TOKENS = 12, 6


def on_rank(mesh, kind, parameters, x, grad, wrong=None):
    """On a mesh of tokens x features: result, gradient of X, parameters' gradients and those after a step."""
    from tpcourse.comm import my_slice
    from tpcourse.layers import split_norm

    tokens, features = (mesh["dp"], mesh["tp"]) if mesh.ndim == 2 else (None, mesh["tp"])
    norm = getattr(split_norm, kind)(DIM, features, tokens, dtype=x.dtype)
    own = my_slice(DIM, features)
    with torch.no_grad():
        for name, parameter in norm.named_parameters():
            parameter.copy_(norm.layouts()[name].take(parameters[name]))
    rows = slice(None) if tokens is None else my_slice(len(x), tokens)
    x = torch.stack([x[rows, ..., own], x[rows, ..., own]], -1)[..., 0].detach().requires_grad_()  # strided
    y = norm(x) if wrong is None else wrong(norm, x)
    y.backward(grad[rows, ..., own])
    grads = {name: p.grad.clone() for name, p in norm.named_parameters()}
    torch.optim.SGD(norm.parameters(), lr=0.1).step()
    return rows, own, y.detach(), x.grad, grads, {name: p.detach() for name, p in norm.named_parameters()}


def reference(kind, shape, dtype=torch.float64, mean=0.0):
    norm = KINDS[kind](DIM, eps=1e-5, dtype=dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm, torch.randn(shape, dtype=dtype) + mean, torch.randn(shape, dtype=dtype)


def check(world, kind, shape=(TOKENS, DIM), wrong=None):
    norm, x, grad = reference(kind, shape)
    parameters = {name: p.detach().clone() for name, p in norm.named_parameters()}
    y = norm(x.requires_grad_())
    y.backward(grad)
    grads = {name: p.grad.clone() for name, p in norm.named_parameters()}
    torch.optim.SGD(norm.parameters(), lr=0.1).step()
    for rows, own, own_y, dx, own_grads, after in world.run(on_rank, kind, parameters, x.detach(), grad, wrong):
        assert_close(own_y, y.detach()[rows, ..., own], check_stride=False)
        assert_close(dx, x.grad[rows, ..., own], check_stride=False)
        assert_close(own_grads, {name: g[own] for name, g in grads.items()})
        assert_close(after, {name: p.detach()[own] for name, p in norm.named_parameters()})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(TOKENS, DIM), (2, 3, DIM)], ids=str)
def test_features_over_ranks(world, kind, shape):
    check(world, kind, shape)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_over_ranks_too(square, kind):
    check(square, kind)


def own_statistics(norm, x):
    weight, bias = norm._enter()
    if bias is None:
        return nn.functional.rms_norm(x, x.shape[-1:], weight, norm.eps)
    return nn.functional.layer_norm(x, x.shape[-1:], weight, bias, norm.eps)


def whole_statistics_with_the_gradient_of_one(norm, x):
    """The sum's conjugate taken for the identity, as if all ranks used it alike."""
    from tpcourse.comm import reduce_from_region

    bias = 0 if norm.bias is None else norm.bias
    mean = 0 if norm.bias is None else reduce_from_region(x.sum(-1, keepdim=True), norm.features) / DIM
    square = reduce_from_region((x - mean).square().sum(-1, keepdim=True), norm.features) / DIM
    return (x - mean) * (square + norm.eps).rsqrt() * norm.weight + bias


def unsummed_parameters(norm, x):
    norm.tokens = None
    return norm(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [own_statistics, whole_statistics_with_the_gradient_of_one,
                                   unsummed_parameters])
def test_the_usual_bugs_are_seen(square, kind, wrong):
    with pytest.raises(AssertionError, match="not close"):
        check(square, kind, wrong=wrong)


def mean_of_squares(norm, x):
    """E[x^2] - E[x]^2, which cancels."""
    from tpcourse.comm import all_reduce

    mean = all_reduce(x.sum(-1, keepdim=True), norm.features) / DIM
    variance = all_reduce(x.square().sum(-1, keepdim=True), norm.features) / DIM - mean.square()
    return (x - mean) * (variance + norm.eps).rsqrt() * norm.weight + norm.bias


def test_a_large_mean_does_not_cancel(three):
    """float32 at mean 1e4: off by the rounding of X itself and no more; from sums of squares it is useless."""
    norm, x, grad = reference("SplitLayerNorm", (TOKENS, DIM), torch.float32, mean=1e4)
    parameters = {name: p.detach() for name, p in norm.named_parameters()}
    wide = x.double().requires_grad_()
    expected = norm.double()(wide)
    expected.backward(grad.double())
    for out, close in ((three.run(on_rank, "SplitLayerNorm", parameters, x, grad), True),
                       (three.run(on_rank, "SplitLayerNorm", parameters, x, grad, mean_of_squares), False)):
        for _, own, y, dx, *_ in out:
            assert torch.allclose(y.double(), expected[:, own], atol=5e-3) == close
            assert torch.allclose(dx.double(), wide.grad[:, own], atol=5e-3) == close


def test_half_precision_is_computed_in_float32(two):
    """bfloat16 in and out; between them the numbers of a float32 norm."""

    def on_rank(mesh, x):
        from tpcourse.layers.split_norm import SplitLayerNorm

        own = x.chunk(2, -1)[mesh.get_rank()].requires_grad_()
        y = SplitLayerNorm(DIM, mesh["tp"], dtype=torch.bfloat16)(own)
        y.backward(own.detach().flip(0))
        return y.detach(), own.grad

    x = torch.randn(TOKENS, DIM).bfloat16()
    whole = x.float().requires_grad_()
    y = nn.LayerNorm(DIM)(whole)
    y.backward(x.float().flip(0))
    for rank, (own, dx) in enumerate(two.run(on_rank, x)):
        assert_close(own, y.detach().bfloat16().chunk(2, -1)[rank])
        assert_close(dx, whole.grad.bfloat16().chunk(2, -1)[rank])


@pytest.mark.parametrize("kind, numbers, forward", [("SplitLayerNorm", 2, "all_gather"),
                                                    ("SplitRMSNorm", 1, "all_reduce")])
def test_what_it_sends_and_keeps(square, kind, numbers, forward):
    """One message forward, one back, one for the parameters; X and `numbers` a token are kept."""

    def on_rank(mesh, kind):
        from tpcourse.layers import split_norm

        norm = getattr(split_norm, kind)(DIM, mesh["tp"], mesh["dp"])
        x = torch.ones(TOKENS, DIM // 2, requires_grad=True)
        with tp.ledger(mesh) as book, tp.saved_activations() as mem:
            norm(x).sum().backward()
        return book, mem.bytes

    def row(op, dim, size, phase):
        return Row(op, dim, 2, 1, size, wire_bytes(op, size, 2), phase)

    statistics = numbers * TOKENS * 4
    for book, kept in square.run(on_rank, kind):
        assert book == Table([
            row(forward, "tp", statistics * (2 if forward == "all_gather" else 1), "forward"),
            row("all_reduce", "tp", statistics, "backward"),
            row("all_reduce", "dp", numbers * DIM // 2 * 4, "backward")]), book
        assert kept == TOKENS * DIM // 2 * 4 + statistics


def test_frozen_parameters_and_indivisible_features(three):
    def on_rank(mesh):
        from tpcourse.layers.split_norm import SplitLayerNorm

        norm = SplitLayerNorm(DIM, mesh["tp"]).requires_grad_(False)
        x = torch.randn(2, 4, requires_grad=True)
        norm(x).sum().backward()
        try:
            SplitLayerNorm(10, mesh["tp"])
        except ValueError as error:
            return norm.weight.grad, x.grad.shape, str(error)

    for grad, shape, text in three.run(on_rank):
        assert grad is None and shape == (2, 4)
        assert text == ("dim=10 is not divisible by the 3 ranks of mesh dimension 'tp'; pad to 12 or use "
                        "2 or 5 ranks")
