"""ColumnParallelLinear on real ranks against nn.Linear in one process."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

SHAPES = [(1, 5), (7, 5), (2, 3, 5), (5,)]  # one token, several, a batch of sequences, a bare vector
OUT = {1: 7, 2: 6, 3: 9, 4: 12}  # out_features for each number of ranks: odd where P allows it


def on_rank(mesh, xs, grads, out_features, bias, gather_output, strided=False):
    """Result and gradient of X after one pass forward and backward; each parameter with its gradient."""
    from tpcourse.layers import ColumnParallelLinear

    torch.manual_seed(3)
    layer = ColumnParallelLinear(5, out_features, mesh["tp"], bias, gather_output, dtype=torch.float64)
    x = torch.stack([xs, -xs], -1)[..., 0] if strided else xs
    y = layer(x.requires_grad_())
    y.backward(grads[mesh.get_rank()])
    return y.detach(), x.grad, [(p.detach(), p.grad) for p in layer.parameters()]


def whole_layer(out_features, bias):
    torch.manual_seed(3)
    return nn.Linear(5, out_features, bias, dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_columns_against_the_whole_layer(world, shape, bias, strided):
    """Upstream gradients differ per rank: rank r's is that of its own columns of Y."""
    p, layer = world.size, whole_layer(OUT[world.size], bias)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    outs = world.run(on_rank, x.detach(), grad.chunk(p, -1), OUT[p], bias, False, strided)
    for rank, (own_y, dx, parameters) in enumerate(outs):
        assert_close(own_y, y.detach().chunk(p, -1)[rank].contiguous())
        assert_close(dx, x.grad)
        assert len(parameters) == 1 + bias
        for (value, own_grad), whole in zip(parameters, layer.parameters()):
            assert torch.equal(value, whole.detach().chunk(p)[rank])  # drawn the same, to the bit
            assert_close(own_grad, whole.grad.chunk(p)[rank])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gathered_output(world, shape):
    """With gather_output every rank holds all of Y and gives it the same upstream gradient."""
    p, layer = world.size, whole_layer(OUT[world.size], True)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    outs = world.run(on_rank, x.detach(), [grad] * p, OUT[p], True, True)
    for rank, (own_y, dx, parameters) in enumerate(outs):
        assert_close(own_y, y.detach())
        assert_close(dx, x.grad)
        for (_, own_grad), whole in zip(parameters, layer.parameters()):
            assert_close(own_grad, whole.grad.chunk(p)[rank])


@pytest.mark.parametrize("gather_output", [False, True])
def test_training(world, gather_output):
    """Five steps of SGD with momentum: the shards stay equal to the rows of the whole layer."""

    def train(mesh, xs, out_features, gather_output):
        from tpcourse.layers import ColumnParallelLinear

        torch.manual_seed(3)
        inner = nn.Linear(4, 5, dtype=torch.float64)  # replicated, below the parallel layer
        layer = ColumnParallelLinear(5, out_features, mesh["tp"], True, gather_output, dtype=torch.float64)
        optimizer = torch.optim.SGD([*inner.parameters(), *layer.parameters()], lr=0.1, momentum=0.9)
        for x in xs:
            optimizer.zero_grad()
            layer(inner(x).tanh()).square().sum().backward()
            optimizer.step()
        return [p.detach() for p in (*inner.parameters(), *layer.parameters())]

    p = world.size
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, OUT[p])).double()
    torch.manual_seed(3)
    for part in (whole[0], whole[2]):  # the same draws in float64
        part.reset_parameters()
    xs = [torch.randn(3, 4, dtype=torch.float64) for _ in range(5)]
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for x in xs:
        optimizer.zero_grad()
        whole(x).square().sum().backward()
        optimizer.step()
    for rank, (*inner, weight, bias) in enumerate(world.run(train, xs, OUT[p], gather_output)):
        assert_close(inner, [t.detach() for t in whole[0].parameters()])
        assert_close([weight, bias], [t.detach().chunk(p)[rank] for t in whole[2].parameters()])


def test_against_dtensor(world):
    """torch's own ColwiseParallel, from the same weights: the same local weights, outputs and gradients."""

    def on_rank(mesh, x, grads, out_features):
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        from tpcourse.layers import ColumnParallelLinear

        torch.manual_seed(3)
        linear = nn.Linear(5, out_features, dtype=torch.float64)
        ours = ColumnParallelLinear.from_linear(linear, mesh["tp"])
        theirs = parallelize_module(linear, mesh["tp"], ColwiseParallel())
        outs = []
        for layer in (ours, theirs):
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            y.backward(grads[mesh.get_rank()])
            held = [t for p in layer.parameters() for t in (p.detach(), p.grad)]
            held = [t.to_local() if hasattr(t, "to_local") else t for t in held]
            outs.append([y.detach(), leaf.grad, *held])
        return outs

    p = world.size
    x, grads = torch.randn(3, 5, dtype=torch.float64), torch.randn(p, 3, OUT[p] // p, dtype=torch.float64)
    for ours, theirs in world.run(on_rank, x, list(grads), OUT[p]):
        assert_close(ours, theirs)


def test_from_linear_copies_and_draws_nothing(three):
    def on_rank(mesh, weight, bias):
        from tpcourse.layers import ColumnParallelLinear

        linear = nn.Linear(5, 9, dtype=torch.float64)
        linear.weight.data.copy_(weight)
        linear.bias.data.copy_(bias)
        state = torch.get_rng_state()
        layer = ColumnParallelLinear.from_linear(linear, mesh["tp"], gather_output=True)
        drew = not torch.equal(state, torch.get_rng_state())
        with torch.no_grad():
            linear.weight.zero_()
        held = sum(p.untyped_storage().nbytes() for p in layer.parameters())
        return drew, held, layer.gather_output, [p.detach() for p in layer.parameters()]

    weight, bias = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    for rank, (drew, held, gathers, own) in enumerate(three.run(on_rank, weight, bias)):
        assert not drew and gathers
        assert held == (3 * 5 + 3) * 8  # a third of the layer, not a view of all of it
        assert all(torch.equal(*pair) for pair in zip(own, (weight.chunk(3)[rank], bias.chunk(3)[rank])))


def test_draws_as_the_whole_layer_does(three):
    """Random numbers after the layer are those after nn.Linear, so that stacks of layers start alike too."""

    def on_rank(mesh):
        from tpcourse.layers import ColumnParallelLinear

        torch.manual_seed(3)
        ColumnParallelLinear(5, 9, mesh["tp"])
        return torch.rand(3)

    torch.manual_seed(3)
    nn.Linear(5, 9)
    after = torch.rand(3)
    assert all(torch.equal(after, own) for own in three.run(on_rank))


@pytest.mark.parametrize("gather_output", [False, True])
@pytest.mark.parametrize("x_needs_grad", [False, True])
def test_what_it_sends(three, gather_output, x_needs_grad):
    """Forward nothing, or one all-gather; backward one all-reduce of X's size, unless X needs no gradient."""

    def on_rank(mesh, x):
        from torch.distributed.tensor.debug import CommDebugMode

        from tpcourse.layers import ColumnParallelLinear

        layer = ColumnParallelLinear(5, 9, mesh["tp"], gather_output=gather_output)
        counts = []
        with CommDebugMode() as mode:
            y = layer(x.requires_grad_(x_needs_grad))
            counts.append(mode.get_total_counts())
            y.sum().backward()
            counts.append(mode.get_total_counts())
        return counts, sorted(str(kind) for kind in mode.get_comm_counts())

    forward, backward = int(gather_output), int(x_needs_grad)
    kinds = ["c10d._allgather_base_"] * forward + ["c10d.allreduce_"] * backward
    for counts, seen in three.run(on_rank, torch.ones(4, 5)):
        assert counts == [forward, forward + backward]
        assert seen == kinds


def test_without_its_all_reduce_the_input_gradient_is_a_part(three):
    """The bug that copy_to_region prevents: each rank would keep the contribution of its own columns."""

    def on_rank(mesh, x, grads):
        from tpcourse.layers import ColumnParallelLinear

        torch.manual_seed(3)
        layer = ColumnParallelLinear(5, 9, mesh["tp"], dtype=torch.float64)
        y = torch.nn.functional.linear(x.requires_grad_(), layer.weight, layer.bias)
        y.backward(grads[mesh.get_rank()])
        return x.grad

    x, layer = torch.randn(4, 5, dtype=torch.float64, requires_grad=True), whole_layer(9, True)
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    parts = three.run(on_rank, x.detach(), grad.chunk(3, -1))
    assert_close(sum(parts), x.grad)
    assert all((part - x.grad).abs().max() > 1e-3 for part in parts)


def test_on_one_dimension_of_a_mesh(square):
    """Ranks with the same place along tp hold the same shard, whatever their place along dp."""
    layer = whole_layer(6, True)
    x = torch.randn(3, 5, dtype=torch.float64)

    def on_rank(mesh, x):
        from tpcourse.layers import ColumnParallelLinear

        torch.manual_seed(3)
        return ColumnParallelLinear(5, 6, mesh["tp"], dtype=torch.float64)(x).detach()

    for rank, y in enumerate(square.run(on_rank, x)):
        assert_close(y, layer(x).detach().chunk(2, -1)[rank % 2].contiguous())


def test_indivisible_out_features():
    """Raised at construction, on every rank, with both numbers and the way out."""
    import tpcourse as tp

    def on_rank(mesh):
        from tpcourse.layers import ColumnParallelLinear

        texts = []
        for build in (lambda: ColumnParallelLinear(4, 10, mesh["tp"]),
                      lambda: ColumnParallelLinear.from_linear(nn.Linear(4, 7), mesh["tp"])):
            try:
                build()
            except ValueError as error:
                texts.append(str(error))
        return texts

    for texts in tp.spawn(on_rank, ranks=4):
        reason = "is not divisible by the 4 ranks of mesh dimension 'tp'"
        assert texts == [f"out_features=10 {reason}; pad to 12 or use 2 or 5 ranks",
                         f"out_features=7 {reason}; pad to 8 or use 1 or 7 ranks"]
