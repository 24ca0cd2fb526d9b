"""Fused weights: each block of `stride` is cut by itself, and layouts move them to another rank count."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tpcourse as tp

IN, OUT = 5, 72
BLOCKS = {"Q|K|V": 3, "gate|up": 2, "grouped queries": [36, 24, 12]}


def widths(stride, out_features):
    return [out_features // stride] * stride if isinstance(stride, int) else stride


def own_rows(whole, stride, p, rank):
    """This rank's rows of a whole weight or bias: its share of each block."""
    return torch.cat([block.chunk(p)[rank] for block in whole.split(widths(stride, len(whole)))])


def on_rank(mesh, x, grads, stride, whole):
    from tpcourse.layers import ColumnParallelLinear

    torch.manual_seed(3)
    layer = ColumnParallelLinear(IN, OUT, mesh["tp"], stride=stride, dtype=torch.float64)
    if whole is not None:
        with torch.no_grad():
            for name, layout in layer.layouts().items():
                getattr(layer, name).copy_(layout.take(whole[name]))
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grads[mesh.get_rank()])
    return y.detach(), x.grad, {n: (p.detach(), p.grad) for n, p in layer.named_parameters()}


def check(world, stride, whole=None):
    p = world.size
    torch.manual_seed(3)
    dense = nn.Linear(IN, OUT, dtype=torch.float64)
    if whole is not None:
        dense.load_state_dict(whole)
    x = torch.randn(3, IN, dtype=torch.float64, requires_grad=True)
    y = dense(x)
    dy = torch.randn_like(y)
    y.backward(dy)

    def columns(t, rank):
        return own_rows(t.T, stride, p, rank).T

    outs = world.run(on_rank, x.detach(), [columns(dy, rank) for rank in range(p)], stride, whole)
    for rank, (own_y, dx, own) in enumerate(outs):
        assert_close(own_y, columns(y.detach(), rank), check_stride=False)
        assert_close(dx, x.grad)
        for name, parameter in dense.named_parameters():
            assert torch.equal(own[name][0], own_rows(parameter.detach(), stride, p, rank))
            assert_close(own[name][1], own_rows(parameter.grad, stride, p, rank))


@pytest.mark.parametrize("stride", BLOCKS.values(), ids=BLOCKS)
def test_each_block_is_cut_by_itself(world, stride):
    check(world, stride)


def whole_from(world, stride):
    """The whole weight and bias, put together by the layouts from what the ranks hold."""

    def parts(mesh):
        from tpcourse.layers import ColumnParallelLinear

        torch.manual_seed(7)
        layer = ColumnParallelLinear(IN, OUT, mesh["tp"], stride=stride, dtype=torch.float64)
        return layer.layouts(), {name: p.detach() for name, p in layer.named_parameters()}

    outs = world.run(parts)
    whole = {name: torch.full(layout.shape, torch.nan).double() for name, layout in outs[0][0].items()}
    for layouts, own in outs:
        for name, layout in layouts.items():
            for piece in layout.pieces:
                whole[name][piece.there] = own[name][piece.here]
    return whole


def test_two_ranks_to_others(world, two):
    """A fused weight drawn on two ranks is put together whole, and cut again for another number."""
    whole = whole_from(two, 3)
    torch.manual_seed(7)
    assert torch.equal(whole["weight"], nn.Linear(IN, OUT, dtype=torch.float64).weight)
    check(world, 3, whole)


def test_cut_as_one_block_it_is_wrong_on_other_ranks(two):
    """The ranks' parts end to end are q0 k0 v0 q1 k1 v1, not Q K V: for two ranks right, for others not."""

    def rows(mesh, whole):
        from tpcourse.layers import ColumnParallelLinear

        layer = ColumnParallelLinear(1, 12, mesh["tp"], False, stride=3, dtype=torch.float64)
        return layer.layouts()["weight"].take(whole)[:, 0]

    whole = torch.arange(12).double().unsqueeze(1)  # Q is 0 to 3, K 4 to 7, V 8 to 11
    joined = torch.cat(two.run(rows, whole))
    assert joined.tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    assert torch.equal(joined.chunk(2)[1], two.run(rows, whole)[1])
    cut_in_four = joined.chunk(4)[1].tolist()
    assert cut_in_four == [5, 8, 9]
    assert tp.spawn(rows, whole, ranks=4)[1].tolist() == [1, 5, 9]


def test_errors_name_both_numbers_and_the_way_out(three):
    def on_rank(mesh):
        from tpcourse.layers import ColumnParallelLinear

        texts = []
        for out, options in ((10, {"stride": 3}), (12, {"stride": 2, "gather_output": True}),
                             (12, {"skip_bias_add": True, "gather_output": True}), (12, {"stride": 3}),
                             (12, {"stride": [6, 3, 2]}), (12, {"stride": 0}), (12, {"stride": [6, 4, 2]}),
                             (6, {"weight": nn.Parameter(torch.ones(6, 5))})):
            try:
                ColumnParallelLinear(IN, out, mesh["tp"], **options)
            except ValueError as error:
                texts.append(str(error))
        return texts

    over = "the 3 ranks of mesh dimension 'tp'"
    joins = "gather_output=True joins the ranks' columns, so it fits neither the blocks of"
    for texts in three.run(on_rank):
        assert texts == [
            "out_features=10 are not stride=3 equal blocks; pass stride as the list of the blocks' sizes",
            f"{joins} stride=2 nor a bias kept back, skip_bias_add=False; drop one",
            f"{joins} stride=1 nor a bias kept back, skip_bias_add=True; drop one",
            f"a block of 4 in [4, 4, 4] is not divisible by {over}; pad to 6 or use 2 or 4 ranks",
            "the blocks of stride=[6, 3, 2] add up to 11, not to out_features=12; pass blocks that do",
            "out_features=12 are not stride=0 equal blocks; pass stride as the list of the blocks' sizes",
            f"a block of 4 in [6, 4, 2] is not divisible by {over}; pad to 6 or use 2 or 4 ranks",
            f"weight has shape (6, 5), not (2, 5) as this rank's part over {over}; pass that part of the "
            "weight to share"]


def test_skip_bias_add(three):
    """The bias comes beside Y, for this rank's columns, and is added by whoever wants it."""

    def on_rank(mesh, x, grads, bias):
        from tpcourse.layers import ColumnParallelLinear

        torch.manual_seed(3)
        layer = ColumnParallelLinear(IN, 9, mesh["tp"], bias, skip_bias_add=True, dtype=torch.float64)
        y, b = layer(x)
        if bias:
            (y + b).backward(grads[mesh.get_rank()])
            return y.detach(), b.detach(), b is layer.bias, b.grad
        return y.detach(), b

    torch.manual_seed(3)
    whole = nn.Linear(IN, 9, dtype=torch.float64)
    x, dy = torch.randn(4, IN, dtype=torch.float64), torch.randn(4, 9, dtype=torch.float64)
    product = (x @ whole.weight.detach().T).chunk(3, -1)
    for rank, (y, b, same, grad) in enumerate(three.run(on_rank, x, dy.chunk(3, -1), True)):
        assert same
        expected = [product[rank], whole.bias.detach().chunk(3)[rank], dy.sum(0).chunk(3)[rank]]
        assert_close([y, b, grad], expected, check_stride=False)
    for rank, (y, none) in enumerate(three.run(on_rank, x, dy.chunk(3, -1), False)):
        assert_close(y, product[rank], check_stride=False)
        assert none is None
