"""LayerNorm and RMSNorm on real ranks, tokens whole or split, against torch's in one process."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.comm import split_sizes
from tpcourse.measure import Row, Table, wire_bytes

DIM, TOKENS = 5, 7
KINDS = ["LayerNorm", "RMSNorm"]


def as_it_is(x):
    return x.clone()


def strided(x):
    return torch.stack([x, -x], -1)[..., 0]


def on_rank(mesh, kind, xs, grads, parameters, sequence_parallel, change=as_it_is, wrong=None):
    """Result, gradient of X, the parameters' gradients, and the parameters after a step of SGD."""
    from tpcourse import layers

    norm = getattr(layers, kind)(DIM, mesh["tp"], sequence_parallel=sequence_parallel, dtype=torch.float64)
    norm.load_state_dict(parameters)
    x = change(xs[mesh.get_rank()]).requires_grad_()
    y = norm(x) if wrong is None else wrong(norm, x)
    y.backward(grads[mesh.get_rank()])
    param_grads = {name: p.grad.clone() for name, p in norm.named_parameters()}
    torch.optim.SGD(norm.parameters(), lr=0.1).step()
    return y.detach(), x.grad, param_grads, norm.state_dict()


def whole_norm(kind):
    norm = getattr(nn, kind)(DIM, eps=1e-5, dtype=torch.float64)
    for p in norm.parameters():
        nn.init.normal_(p)
    return norm


def check(world, kind, shape=(TOKENS, DIM), sequence_parallel=True, change=as_it_is, wrong=None):
    norm = whole_norm(kind)
    parameters = {name: p.detach().clone() for name, p in norm.named_parameters()}
    x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    y = norm(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    param_grads = {name: p.grad.clone() for name, p in norm.named_parameters()}
    torch.optim.SGD(norm.parameters(), lr=0.1).step()
    ys, dxs, xs, grads = (t.detach().split(split_sizes(shape[0], world.size)) if sequence_parallel
                          else [t.detach()] * world.size for t in (y, x.grad, x, grad))
    outs = world.run(on_rank, kind, xs, grads, parameters, sequence_parallel, change, wrong)
    for rank, (own_y, dx, own_grads, after) in enumerate(outs):
        assert_close(own_y, ys[rank])
        assert_close(dx, dxs[rank], check_stride=False)
        assert_close(own_grads, param_grads)
        assert_close(after, dict(norm.state_dict()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(TOKENS, DIM), (4, 3, DIM), (1, DIM)], ids=str)  # 1: the others have none
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["own tokens", "all tokens"])
@pytest.mark.parametrize("change", [as_it_is, strided], ids=["contiguous", "strided"])
def test_against_the_whole_norm(world, kind, shape, sequence_parallel, change):
    check(world, kind, shape, sequence_parallel, change)


def unsummed(norm, x):
    norm.sequence_parallel = False
    return norm(x)


def summed_though_equal(norm, x):
    norm.sequence_parallel = True
    return norm(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong, sequence_parallel", [(unsummed, True), (summed_though_equal, False)])
def test_the_usual_bugs_are_seen(three, kind, wrong, sequence_parallel):
    check(three, kind, sequence_parallel=sequence_parallel)
    with pytest.raises(AssertionError, match="not close"):
        check(three, kind, sequence_parallel=sequence_parallel, wrong=wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_the_usual_bugs_by_how_much(three, kind):
    """Unsummed, each rank has its own tokens' part; summed where all have all tokens, P times too much."""
    parameters = dict(whole_norm(kind).state_dict())
    x, grad = torch.randn(2, TOKENS, DIM, dtype=torch.float64)
    split = [kind, x.tensor_split(3), grad.tensor_split(3), parameters]
    whole = [kind, [x] * 3, [grad] * 3, parameters]
    right = three.run(on_rank, *split, True)[0][2]
    for name, value in right.items():
        parts = [out[2][name] for out in three.run(on_rank, *split, False)]
        assert_close(sum(parts), value)
        assert not torch.allclose(parts[0], value)
        assert_close(three.run(on_rank, *whole, True)[0][2][name], 3 * value)


@pytest.mark.parametrize("kind", KINDS)
def test_against_dtensor(world, kind):
    """torch's own SequenceParallel, from the same parameters: the same outputs and gradients."""

    def both(mesh, kind, xs, grads, parameters):
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

        from tpcourse import layers

        ours = getattr(layers, kind)(DIM, mesh["tp"], sequence_parallel=True, dtype=torch.float64)
        theirs = getattr(nn, kind)(DIM, eps=1e-5, dtype=torch.float64)
        for norm in (ours, theirs):
            norm.load_state_dict(parameters)
        theirs = parallelize_module(theirs, mesh["tp"], SequenceParallel(sequence_dim=0))
        outs = []
        for norm in (ours, theirs):
            x = xs[mesh.get_rank()].clone().requires_grad_()
            y = norm(x)
            y = y.to_local() if isinstance(y, DTensor) else y
            y.backward(grads[mesh.get_rank()])
            held = [p.grad for p in norm.parameters()]
            held = [g.redistribute(placements=[Replicate()]).to_local() if isinstance(g, DTensor) else g
                    for g in held]
            outs.append([y.detach(), x.grad, *held])
        return outs

    x, grad = torch.randn(2, 2 * world.size, DIM, dtype=torch.float64)
    args = (x.chunk(world.size), grad.chunk(world.size), dict(whole_norm(kind).state_dict()))
    for ours, theirs in world.run(both, kind, *args):
        assert_close(ours, theirs)


@pytest.mark.parametrize("kind, numbers", [("LayerNorm", 2 * DIM), ("RMSNorm", DIM)])
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["own tokens", "all tokens"])
def test_what_it_sends(world, kind, numbers, sequence_parallel):
    """Backward one all-reduce, of weight's and bias' gradients together; if tokens are whole, nothing."""

    def counted(mesh, kind, sequence_parallel):
        from tpcourse import layers

        norm = getattr(layers, kind)(DIM, mesh["tp"], sequence_parallel=sequence_parallel)
        with tp.ledger(mesh) as book:
            norm(torch.randn(3, DIM, requires_grad=True)).sum().backward()
        return book

    p, size = world.size, numbers * 4
    rows = [Row("all_reduce", "tp", p, 1, size, wire_bytes("all_reduce", size, p), "backward")]
    for book in world.run(counted, kind, sequence_parallel):
        assert book == Table(rows if sequence_parallel and p > 1 else []), book


@pytest.mark.parametrize("kind, numbers, parameters", [("LayerNorm", 2, 2 * DIM), ("RMSNorm", 1, DIM)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_it_keeps(two, kind, numbers, parameters, device):
    """X and some numbers a token; the parameters are kept as such and not as copies."""

    def kept(mesh, kind, sequence_parallel, device):
        from tpcourse import layers

        with torch.device(device), tp.saved_activations() as mem:
            norm = getattr(layers, kind)(DIM, mesh["tp"], sequence_parallel=sequence_parallel)
            norm(torch.randn(3, DIM, requires_grad=True))
        return mem.bytes, mem.parameter_bytes

    for sequence_parallel in (True, False):
        bytes = (3 * DIM + 3 * numbers) * 4, parameters * 4
        assert two.run(kept, kind, sequence_parallel, device) == [bytes] * 2


def test_rms_of_16_bits_is_computed_in_32(two):
    """As of the same numbers in float32, and rounded once; X is kept in 16 bits."""

    def step(mesh, x, grad):
        from tpcourse.layers import RMSNorm

        norm, x = RMSNorm(64, mesh["tp"], dtype=x.dtype), x.clone().requires_grad_()
        with tp.saved_activations() as mem:
            y = norm(x)
        y.backward(grad)
        return y.detach(), x.grad, norm.weight.grad, max(saved.bytes for saved in mem.tensors)

    x, grad = torch.randn(2, 9, 64).bfloat16()
    for *own, largest in two.run(step, x, grad):
        wide = two.run(step, x.float(), grad.float())[0][:3]
        assert_close(own, [t.bfloat16() for t in wide], atol=0, rtol=2**-7)
        assert largest == 9 * 64 * 2


@pytest.mark.parametrize("frozen", [["weight"], ["bias"], ["weight", "bias"]], ids="-".join)
def test_frozen_parameters(two, frozen):
    """The other gradients are right; with nothing to train, nothing is sent."""

    def step(mesh, x, frozen):
        from tpcourse.layers import LayerNorm

        norm = LayerNorm(DIM, mesh["tp"], sequence_parallel=True, dtype=torch.float64)
        for name in frozen:
            getattr(norm, name).requires_grad_(False)
        with tp.ledger(mesh) as book:
            norm(x.chunk(2)[mesh.get_rank()].clone().requires_grad_()).square().sum().backward()
        return {name: p.grad for name, p in norm.named_parameters()}, len(book)

    x, norm = torch.randn(4, DIM, dtype=torch.float64), nn.LayerNorm(DIM, dtype=torch.float64)
    norm(x).square().sum().backward()
    for grads, sent in two.run(step, x, frozen):
        assert sent == (len(frozen) < 2)
        for name, p in norm.named_parameters():
            assert grads[name] is None if name in frozen else torch.allclose(grads[name], p.grad)


def test_variance_far_from_zero(two):
    """At mean 1e4 and spread 1, E[x^2] - E[x]^2 in float32 has no correct digit left; ours has three."""

    def far(mesh, x):
        from tpcourse.layers import LayerNorm

        return LayerNorm(x.size(1), mesh["tp"])(x).detach()

    x = torch.randn(50, 64) + 1e4
    right = nn.functional.layer_norm(x.double(), (64,))
    mean = x.mean(-1, keepdim=True)
    naive = (x - mean) / (x.square().mean(-1, keepdim=True) - mean.square() + 1e-5).sqrt()
    assert not (naive - right).abs().max() < 0.5  # also where the variance came out negative: NaN
    for y in two.run(far, x):
        assert_close(y.double(), right, atol=5e-3, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_starts_as_torch_does(two, kind):
    def start(mesh, kind):
        from tpcourse import layers

        norm = getattr(layers, kind)(DIM, mesh["tp"], sequence_parallel=True, eps=1e-3)
        return {name: p.detach() for name, p in norm.named_parameters()}, repr(norm)

    over = "over the 2 ranks of mesh dimension 'tp'"
    for parameters, text in two.run(start, kind):
        assert_close(parameters, dict(getattr(nn, kind)(DIM).state_dict()))
        assert text == f"{kind}({DIM} features, eps=0.001, sequence_parallel=True, {over})"
