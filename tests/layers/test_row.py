"""RowParallelLinear on real ranks against nn.Linear in one process."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.measure import Row, Table, wire_bytes

SHAPES = [(1,), (7,), (2, 3), ()]  # one token, several, a batch of sequences, a bare vector
IN = {1: 7, 2: 6, 3: 9, 4: 12}  # in_features for each number of ranks: odd where P allows it
OUT = 5


def as_it_is(x):
    return x.clone()


def strided(x):
    return torch.stack([x, -x], -1)[..., 0]


def on_rank(mesh, xs, grad, in_features, bias, input_is_parallel, change, wrong):
    """Result and gradient of X after one pass; each parameter with its gradient. `wrong` spoils the layer."""
    from tpcourse.layers import RowParallelLinear

    torch.manual_seed(3)
    layer = RowParallelLinear(in_features, OUT, mesh["tp"], bias, input_is_parallel, dtype=torch.float64)
    x = change(xs[mesh.get_rank()]).requires_grad_()
    y = layer(x) if wrong is None else wrong(layer, x)
    y.backward(grad)
    return y.detach(), x.grad, [(p.detach(), p.grad) for p in layer.parameters()]


def whole_layer(in_features, bias=True):
    torch.manual_seed(3)
    return nn.Linear(in_features, OUT, bias, dtype=torch.float64)


def check(world, shape=(7,), bias=True, input_is_parallel=True, change=as_it_is, wrong=None):
    """Every rank's numbers are those of the whole layer, or of its part of it."""
    p, layer = world.size, whole_layer(IN[world.size], bias)
    x = torch.randn(*shape, IN[p], dtype=torch.float64, requires_grad=True)
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    xs = x.detach().chunk(p, -1) if input_is_parallel else [x.detach()] * p
    dxs = x.grad.chunk(p, -1) if input_is_parallel else [x.grad] * p
    weights, weight_grads = (t.chunk(p, 1) for t in (layer.weight.detach(), layer.weight.grad))
    outs = world.run(on_rank, xs, grad, IN[p], bias, input_is_parallel, change, wrong)
    for rank, (own_y, dx, ((weight, weight_grad), *own_bias)) in enumerate(outs):
        assert_close(own_y, y.detach())
        assert_close(dx, dxs[rank], check_stride=False)
        assert torch.equal(weight, weights[rank])  # drawn the same, to the bit
        assert_close(weight_grad, weight_grads[rank], check_stride=False)
        assert len(own_bias) == bias
        for value, bias_grad in own_bias:
            assert torch.equal(value, layer.bias.detach())
            assert_close(bias_grad, layer.bias.grad)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("input_is_parallel", [True, False], ids=["own features", "all features"])
@pytest.mark.parametrize("change", [as_it_is, strided], ids=["contiguous", "strided"])
def test_rows_against_the_whole_layer(world, shape, bias, input_is_parallel, change):
    check(world, shape, bias, input_is_parallel, change)


def bias_on_every_rank(layer, x):
    from tpcourse.comm import reduce_from_region

    return reduce_from_region(nn.functional.linear(x, layer.weight, layer.bias), layer.group)


def all_reduce_backward_too(layer, x):
    from tpcourse.comm import all_reduce

    return all_reduce(nn.functional.linear(x, layer.weight), layer.group) + layer.bias


def not_summed(layer, x):
    return nn.functional.linear(x, layer.weight, layer.bias)


@pytest.mark.parametrize("wrong", [bias_on_every_rank, all_reduce_backward_too, not_summed])
def test_the_usual_bugs_are_seen(three, wrong):
    check(three)
    with pytest.raises(AssertionError, match="not close"):
        check(three, wrong=wrong)


def test_the_usual_bugs_by_how_much(three):
    """The bias P times; with the wrong conjugate, gradients P times too large."""
    x, grad = torch.randn(4, 9, dtype=torch.float64), torch.randn(4, OUT, dtype=torch.float64)
    args = (x.chunk(3, -1), grad, 9, True, True, as_it_is)
    right = three.run(on_rank, *args, None)
    biased = three.run(on_rank, *args, bias_on_every_rank)
    thrice = three.run(on_rank, *args, all_reduce_backward_too)
    for (y, dx, (weight, bias)), (biased_y, *_), (_, large_dx, (large, _)) in zip(right, biased, thrice):
        assert_close(biased_y, y + 2 * bias[0])
        assert_close(large_dx, 3 * dx)
        assert_close(large[1], 3 * weight[1])


def test_skip_bias_add(three):
    """The bias comes beside Y and is added by whoever wants it, once; its gradient is the same."""

    def on_rank(mesh, xs, grad, bias):
        from tpcourse.layers import RowParallelLinear

        torch.manual_seed(3)
        layer = RowParallelLinear(9, OUT, mesh["tp"], bias, skip_bias_add=True, dtype=torch.float64)
        y, b = layer(xs[mesh.get_rank()])
        if not bias:
            return y.detach(), b
        (y + b).backward(grad)
        return y.detach(), b is layer.bias, b.grad

    x, grad = torch.randn(4, 9, dtype=torch.float64), torch.randn(4, OUT, dtype=torch.float64)
    whole = whole_layer(9)
    product = x @ whole.weight.detach().T
    for y, same, bias_grad in three.run(on_rank, x.chunk(3, -1), grad, True):
        assert_close(y, product)
        assert same
        assert_close(bias_grad, grad.sum(0))
    for y, none in three.run(on_rank, x.chunk(3, -1), grad, False):
        assert_close(y, product)
        assert none is None


def test_against_dtensor(world):
    """torch's own RowwiseParallel, from the same weights: the same local weights, outputs and gradients."""

    def on_rank(mesh, xs, grad, in_features):
        from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

        from tpcourse.layers import RowParallelLinear

        torch.manual_seed(3)
        linear = nn.Linear(in_features, OUT, dtype=torch.float64)
        ours = RowParallelLinear.from_linear(linear, mesh["tp"])
        theirs = parallelize_module(linear, mesh["tp"], RowwiseParallel())
        outs = []
        for layer in (ours, theirs):
            leaf = xs[mesh.get_rank()].clone().requires_grad_()
            y = layer(leaf)
            y.backward(grad)
            held = [t for p in layer.parameters() for t in (p.detach(), p.grad)]
            held = [t.to_local() if hasattr(t, "to_local") else t for t in held]
            outs.append([t.detach().contiguous() for t in (y, leaf.grad, *held)])
        return outs

    p = world.size
    x, grad = torch.randn(3, IN[p], dtype=torch.float64), torch.randn(3, OUT, dtype=torch.float64)
    for ours, theirs in world.run(on_rank, x.chunk(p, -1), grad, IN[p]):
        assert_close(ours, theirs)


def test_from_linear_copies_and_draws_nothing(three):
    def on_rank(mesh, weight, bias):
        from tpcourse.layers import RowParallelLinear

        linear = nn.Linear(9, OUT, dtype=torch.float64)
        linear.weight.data.copy_(weight)
        linear.bias.data.copy_(bias)
        state = torch.get_rng_state()
        layer = RowParallelLinear.from_linear(linear, mesh["tp"], input_is_parallel=False, skip_bias_add=True)
        drew = not torch.equal(state, torch.get_rng_state())
        with torch.no_grad():
            linear.weight.zero_()
            linear.bias.zero_()
        held = sum(p.untyped_storage().nbytes() for p in layer.parameters())
        options = layer.input_is_parallel, layer.skip_bias_add, layer.weight.is_contiguous()
        return drew, held, options, [p.detach() for p in layer.parameters()]

    weight, bias = torch.randn(OUT, 9, dtype=torch.float64), torch.randn(OUT, dtype=torch.float64)
    for rank, (drew, held, options, own) in enumerate(three.run(on_rank, weight, bias)):
        assert not drew and options == (False, True, True)
        assert held == (OUT * 3 + OUT) * 8  # a third of the weight, not a view of all of it
        assert torch.equal(own[0], weight.chunk(3, 1)[rank]) and torch.equal(own[1], bias)


def test_draws_as_the_whole_layer_does(three):
    """Random numbers after the layer are those after nn.Linear, so that stacks of layers start alike too."""

    def on_rank(mesh):
        from tpcourse.layers import RowParallelLinear

        torch.manual_seed(3)
        RowParallelLinear(9, OUT, mesh["tp"])
        return torch.rand(3)

    torch.manual_seed(3)
    nn.Linear(9, OUT)
    after = torch.rand(3)
    assert all(torch.equal(after, own) for own in three.run(on_rank))


@pytest.mark.parametrize("input_is_parallel", [True, False])
def test_what_it_sends(world, input_is_parallel):
    """One all-reduce of Y forward; backward nothing, or the all-gather of dX that undoes the scatter."""

    def on_rank(mesh, xs, in_features, input_is_parallel):
        from tpcourse.layers import RowParallelLinear

        layer = RowParallelLinear(in_features, OUT, mesh["tp"], input_is_parallel=input_is_parallel)
        with tp.ledger(mesh) as book:
            layer(xs[mesh.get_rank()].requires_grad_()).sum().backward()
        return book

    p, tokens = world.size, 4
    x = torch.ones(tokens, IN[p])
    y_bytes, x_bytes = tokens * OUT * 4, tokens * IN[p] * 4
    expected = [Row("all_reduce", "tp", p, 1, y_bytes, wire_bytes("all_reduce", y_bytes, p), "forward")]
    if not input_is_parallel:
        wire = wire_bytes("all_gather", x_bytes, p)
        expected.append(Row("all_gather", "tp", p, 1, x_bytes, wire, "backward"))
    xs = x.chunk(p, -1) if input_is_parallel else [x] * p
    for book in world.run(on_rank, xs, IN[p], input_is_parallel):
        assert book == Table(expected if p > 1 else []), book


def test_on_one_dimension_of_a_mesh(square):
    """Ranks with the same place along tp hold the same shard, whatever their place along dp."""

    def on_rank(mesh, xs):
        from tpcourse.layers import RowParallelLinear

        torch.manual_seed(3)
        layer = RowParallelLinear(6, OUT, mesh["tp"], dtype=torch.float64)
        return layer(xs[mesh.get_local_rank("tp")]).detach()

    x = torch.randn(3, 6, dtype=torch.float64)
    for y in square.run(on_rank, x.chunk(2, -1)):
        assert_close(y, whole_layer(6)(x).detach())


def test_errors_name_both_numbers_and_the_way_out(three):
    def on_rank(mesh):
        from tpcourse.layers import RowParallelLinear

        layers = [RowParallelLinear(9, 4, mesh["tp"], input_is_parallel=kept) for kept in (True, False)]
        texts = []
        for attempt in (lambda: RowParallelLinear(10, 4, mesh["tp"]),
                        lambda: RowParallelLinear.from_linear(nn.Linear(7, 4), mesh["tp"]),
                        lambda: layers[0](torch.ones(2, 9)), lambda: layers[1](torch.ones(2, 3))):
            try:
                attempt()
            except ValueError as error:
                texts.append(str(error))
        return texts

    over = "the 3 ranks of mesh dimension 'tp'"
    way_out = "pass this rank's features with input_is_parallel=True, or all with False"
    for texts in three.run(on_rank):
        assert texts == [
            f"in_features=10 is not divisible by {over}; pad to 12 or use 2 or 5 ranks",
            f"in_features=7 is not divisible by {over}; pad to 9 or use 1 or 7 ranks",
            f"x has 9 features, not 3, for in_features=9 over {over} and input_is_parallel=True; {way_out}",
            f"x has 3 features, not 9, for in_features=9 over {over} and input_is_parallel=False; {way_out}"]
