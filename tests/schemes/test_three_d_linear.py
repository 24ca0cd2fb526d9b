"""The linear layer on three mesh dimensions, on real ranks, against nn.Linear in one process."""

from math import prod

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.measure import Row, Table, wire_bytes

MESHES = [(1, 1, 1), (1, 4, 1), (4, 1, 1), (1, 1, 4), (2, 2, 1), (1, 2, 3), (2, 3, 1), (2, 2, 2)]
DESIGNS = [(True, True), (True, False), (False, True), (False, False)]  # scatter, keep
NAMES = {(True, True): "scatter, kept", (True, False): "scatter, gathered again",
         (False, True): "all-reduce, kept", (False, False): "all-reduce, gathered again"}
STEPS = 2


def part(mesh, x, tokens, features):
    """x [tokens, features] cut along the named mesh dimensions, the first outermost."""
    for dim, names in enumerate((tokens, features)):
        for name in names:
            x = x.chunk(mesh[name].size(), dim)[mesh.get_local_rank(name)]
    return x.clone(memory_format=torch.contiguous_format)


def part_of(mesh, parameters, enter, leave):
    """This rank's rows over `enter`, as evenly as can be over i once more; its columns over `leave`."""
    weight, *bias = parameters
    blocks = [part(mesh, weight.detach(), enter, leave), *(part(mesh, b.detach()[:, None], enter, "")[:, 0]
                                                           for b in bias)]
    return [block.tensor_split(mesh["i"].size())[mesh.get_local_rank("i")] for block in blocks]


def layer_of(mesh, whole, scatter, keep, leaving):
    from tpcourse.comm import my_slice
    from tpcourse.schemes.cube import Axes, CubeLinear

    axes = Axes(mesh["i"], mesh["j"], mesh["l"], scatter, keep)
    axes = axes.swapped() if leaving else axes
    torch.manual_seed(3)
    rows = [my_slice(whole.out_features, axes.enter)]
    with torch.device("cpu"):
        torch.set_default_dtype(torch.float64)
        layer = CubeLinear(whole.in_features, whole.out_features, axes, rows, whole.bias is not None)
        torch.set_default_dtype(torch.float32)
    return layer


@torch.no_grad()
def sgd_(layer, lr=0.1):
    """By hand: in each rank, torch.optim takes seconds to import."""
    for parameter in layer.parameters():
        parameter -= lr * parameter.grad
        parameter.grad = None


def on_rank(mesh, whole, xs, grads, scatter, keep, leaving, wrong=None):
    """For each step of SGD: Y, dX, the parameters' gradients and themselves; and the whole layer's."""
    layer = layer_of(mesh, whole, scatter, keep, leaving)
    enter, leave = ("l", "j") if leaving else ("j", "l")
    outer, inner = ("i" + enter, "i" + leave) if scatter else ("i", "i")
    outs, expected = [], []
    for x, grad in zip(xs, grads):
        own = part(mesh, x, outer, leave).requires_grad_()
        y = layer(own) if wrong is None else wrong(layer, own)
        y.backward(part(mesh, grad, inner, enter))
        whole_x = x.clone().requires_grad_()
        whole_y = whole(whole_x)
        whole_y.backward(grad)
        outs += [y.detach(), own.grad, *(t.detach().clone() for p in layer.parameters() for t in (p.grad, p))]
        held = [part_of(mesh, ts, enter, leave) for ts in zip(*((p.grad, p) for p in whole.parameters()))]
        expected += [part(mesh, whole_y.detach(), inner, enter), part(mesh, whole_x.grad, outer, leave),
                     *(t.clone() for pair in zip(*held) for t in pair)]
        sgd_(layer)
        sgd_(whole)
    return outs, expected


def check(world, scatter, keep, leaving=False, bias=True, wrong=None):
    """Odd sizes: 3 input features and 5 outputs for each rank that splits them, 3 tokens for each rank."""
    sizes = world.mesh
    enter, leave = ("l", "j") if leaving else ("j", "l")
    torch.manual_seed(3)
    whole = nn.Linear(3 * sizes[leave], 5 * sizes[enter], bias, dtype=torch.float64)
    xs, grads = (list(torch.randn(STEPS, 3 * prod(sizes.values()), n, dtype=torch.float64))
                 for n in (whole.in_features, whole.out_features))
    for own, expected in world.run(on_rank, whole, xs, grads, scatter, keep, leaving, wrong):
        assert_close(own, expected, check_stride=False)


@pytest.mark.parametrize("leaving", [False, True], ids=["entering", "leaving"])
@pytest.mark.parametrize("scatter, keep", DESIGNS, ids=NAMES.values())
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_against_the_whole_layer(cube, scatter, keep, leaving, bias):
    check(cube, scatter, keep, leaving, bias)


def test_three_siblings_from_one_input(eight):
    """Q, K and V as linears of their own: dX is the sum of what each sends back."""

    def on_rank(mesh, layers, x, dx, grads, scatter, keep):
        own = part(mesh, x, "ij" if scatter else "i", "l").requires_grad_()
        torch.autograd.backward(
            [layer_of(mesh, layer, scatter, keep, False)(own) for layer in layers],
            [part(mesh, grad, "il" if scatter else "i", "j") for grad in grads])
        return own.grad, part(mesh, dx, "ij" if scatter else "i", "l")

    layers = []
    for width in (6, 10, 4):
        torch.manual_seed(3)
        layers.append(nn.Linear(6, width, dtype=torch.float64))
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    ys = [layer(x) for layer in layers]
    grads = [torch.randn_like(y) for y in ys]
    torch.autograd.backward(ys, grads)
    for scatter, keep in DESIGNS:
        for own, expected in eight.run(on_rank, layers, x.detach(), x.grad, grads, scatter, keep):
            assert_close(own, expected)


def spoil(**patches):
    """The layer with parts of its module replaced."""
    def wrong(layer, x):
        from unittest import mock

        with mock.patch.multiple("tpcourse.schemes.cube", **{name: make() for name, make in patches.items()}):
            return layer(x)

    return wrong


def first_of_the_region_names():
    from tpcourse.comm import gather_from_region

    return gather_from_region


def each_its_own_bias():
    from tpcourse.comm import reduce_scatter

    return lambda y, bias, group, scatter: reduce_scatter(y, group, 0) + bias


def the_sum_for_all():
    from tpcourse.comm import all_reduce

    return lambda y, bias, group, scatter: all_reduce(y, group) + bias


@pytest.mark.parametrize("scatter, wrong", [
    (True, spoil(all_gather=first_of_the_region_names)), (True, spoil(leave_region=each_its_own_bias)),
    (False, spoil(all_gather=first_of_the_region_names)), (False, spoil(leave_region=the_sum_for_all))])
def test_the_usual_bugs_are_seen(eight, scatter, wrong):
    """Gradients not summed over i; the bias' not over l; dY summed where all have it whole."""
    check(eight, scatter, keep=True)
    with pytest.raises(AssertionError, match="not close"):
        check(eight, scatter, keep=True, wrong=wrong)


def test_the_usual_bugs_by_how_much(eight):
    """Of the bias' gradient a rank has its tokens' part; with dY summed over l, all is twice as much."""
    def grads(mesh, scatter, wrong):
        torch.manual_seed(7)
        x, dy = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 10, dtype=torch.float64)
        layer = layer_of(mesh, nn.Linear(6, 10, dtype=torch.float64), scatter, True, False)
        own = part(mesh, x, "ij" if scatter else "i", "l").requires_grad_()
        y = layer(own) if wrong is None else wrong(layer, own)
        y.backward(part(mesh, dy, "il" if scatter else "i", "j"))
        return own.grad, layer.weight.grad, layer.bias.grad

    right = eight.run(grads, True, None)
    parts = eight.run(grads, True, spoil(leave_region=each_its_own_bias))
    for rank in range(0, 8, 2):  # l = 0, and the next rank has l = 1
        assert_close(parts[rank][2] + parts[rank + 1][2], right[rank][2])
        assert not torch.allclose(parts[rank][2], right[rank][2])
    twice = eight.run(grads, False, spoil(leave_region=the_sum_for_all))
    for (dx, dw, db), (large_dx, large_dw, same) in zip(eight.run(grads, False, None), twice):
        assert_close((large_dx, large_dw, same), (2 * dx, 2 * dw, db))


TOKENS, IN, OUT = 24, 10, 8  # of the whole, where messages and memory are counted


def a_step(mesh, scatter, keep, recompute, frozen=()):
    """What a step of the layer sends and keeps, and the order of the collectives in its backward."""
    from tpcourse import layers

    layer = layer_of(mesh, nn.Linear(IN, OUT, dtype=torch.float64), scatter, keep, False)
    layer.weight.requires_grad_("weight" not in frozen)
    x = torch.ones(TOKENS // 2 // (2 if scatter else 1), IN // 2, dtype=torch.float64)
    x.requires_grad_("x" not in frozen)
    with tp.ledger(mesh) as book, tp.saved_activations() as mem:
        y = layers.recompute(lambda x: layer(x).sin(), x) if recompute else layer(x)
        (y * y.detach()).sum().backward()
    return book, mem.bytes - y.numel() * 8, x.grad, layer.weight.grad


def messages(scatter, keep, recompute):
    """The closed form: which operation along which dimension sends how many numbers, in which phase."""
    x, w, y, b = TOKENS // 2 * IN // 2, OUT // 2 * IN // 2, TOKENS // 2 * OUT // 2, OUT // 2
    product = [("all_gather", "i", b), ("all_gather", "i", w)] + [("all_gather", "j", x)] * scatter
    leave = [("reduce_scatter" if scatter else "all_reduce", "l", y)]
    back = [("reduce_scatter", "i", w), ("reduce_scatter", "i", b)]
    if scatter:
        back += [("all_gather", "l", y), ("reduce_scatter", "j", x)]
        back += [] if keep else [("all_gather", "j", x)]
    else:
        back += [("all_reduce", "j", x)]
    back += [] if keep else [("all_gather", "i", w)]
    again = product + leave if recompute else []
    return {"forward": product + leave, "backward": back, "recomputation": again}


def table(phases):
    return Table(Row(op, dim, 2, 1, n * 8, wire_bytes(op, n * 8, 2), phase)
                 for phase, rows in phases.items() for op, dim, n in rows)


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("scatter, keep", DESIGNS, ids=NAMES.values())
def test_what_it_sends(eight, scatter, keep, recompute):
    expected = table(messages(scatter, keep, recompute))
    for book, *_ in eight.run(a_step, scatter, keep, recompute):
        assert book == expected, book - expected


@pytest.mark.parametrize("scatter, keep", DESIGNS, ids=NAMES.values())
def test_what_it_keeps(eight, scatter, keep):
    """The gathered X and W, or this rank's X alone; of a frozen W no X, and no W if X needs no gradient."""
    x, w = TOKENS // 2 * IN // 2 * 8, OUT // 2 * IN // 2 * 8
    own = x // 2 if scatter and not keep else x
    gathered = w if keep else 0
    for frozen, expected in (((), own + gathered), (("weight",), gathered), (("x",), own)):
        for _, kept, dx, dw in eight.run(a_step, scatter, keep, False, frozen):
            assert kept == expected
            assert (dx is None, dw is None) == ("x" in frozen, "weight" in frozen)


def test_the_sum_of_dx_is_under_way_while_dw_is_computed(eight):
    """In backward dX is sent before dW is computed, and what gathers X again before dX is."""

    def on_rank(mesh, scatter, keep):
        from torch.utils._python_dispatch import TorchDispatchMode

        class Calls(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                name = func._schema.name.split("::")[1]
                if name in ("mm", "_allgather_base_", "_reduce_scatter_base_", "allreduce_"):
                    names.append(name.strip("_"))
                return func(*args, **(kwargs or {}))

        names, whole = [], nn.Linear(IN, OUT, False, dtype=torch.float64)
        layer = layer_of(mesh, whole, scatter, keep, False)
        x = torch.ones(TOKENS // 4 if scatter else TOKENS // 2, IN // 2, dtype=torch.float64)
        loss = layer(x.requires_grad_()).sum()
        with Calls():
            loss.backward()
        return names

    gather, scatter = "allgather_base", "reduce_scatter_base"
    for names in eight.run(on_rank, True, True):
        assert names == [gather, "mm", scatter, "mm", scatter]
    for names in eight.run(on_rank, True, False):  # dY, X and W are gathered
        assert names == [gather, gather, gather, "mm", scatter, "mm", scatter]
    for names in eight.run(on_rank, False, True):
        assert names == ["mm", "allreduce", "mm", scatter]


def test_uneven_rows(eight):
    """Blocks side by side, each split over j, and odd rows over i: every piece lies where it says."""

    def on_rank(mesh, whole):
        from tpcourse.layers.layout import block_spans
        from tpcourse.schemes.cube import Axes, CubeLinear

        axes = Axes(mesh["i"], mesh["j"], mesh["l"], True, True)
        torch.manual_seed(3)
        layer = CubeLinear(4, 14, axes, block_spans([4, 10], axes.enter))
        layouts = layer.layouts()
        return [(layouts[name], p.detach(), layouts[name].take(whole[name]))
                for name, p in layer.named_parameters()]

    torch.manual_seed(3)
    whole = {name: p.detach() for name, p in nn.Linear(4, 14).named_parameters()}
    outs = eight.run(on_rank, whole)
    for index, name in enumerate(("weight", "bias")):
        owners = torch.zeros_like(whole[name])
        for rank, out in enumerate(outs):
            layout, own, expected = out[index]
            assert torch.equal(own, expected) and len(own) == (4 if rank < 4 else 3)
            for piece in layout.pieces:
                owners[piece.there] += piece.owned
        assert torch.equal(owners, torch.ones_like(owners))  # each entry has one owner
    assert [p.there[0] for p in outs[0][0][0].pieces] == [slice(0, 2), slice(4, 6)]  # i = 0, j = 0
    assert [p.there[0] for p in outs[6][0][0].pieces] == [slice(11, 14)]  # i = 1, j = 1


def test_errors_name_the_axis_both_numbers_and_the_way_out(eight):
    def on_rank(mesh):
        from tpcourse.comm import my_slice
        from tpcourse.schemes.cube import Axes, CubeLinear

        axes = Axes(mesh["i"], mesh["j"], mesh["l"], True, True)
        rows = [my_slice(6, axes.enter)]
        layer = CubeLinear(4, 6, axes, rows)
        own = nn.Parameter(torch.ones(3, 4))
        texts = []
        for attempt in (lambda: CubeLinear(5, 6, axes, rows), lambda: CubeLinear(4, 2, axes, [slice(0, 1)]),
                        lambda: CubeLinear(4, 6, axes, rows, weight=own),
                        lambda: layer(torch.ones(2, 4)), lambda: layer(torch.ones(2, 3, 2))):
            try:
                attempt()
            except ValueError as error:
                texts.append(str(error))
        return texts

    for rank, texts in enumerate(eight.run(on_rank)):
        of_l, over_l = "the 2 ranks of mesh dimension 'l'", "over the 2 ranks of mesh dimension 'l'"
        assert texts[0] == f"in_features=5 is not divisible by {of_l}; pad to 6 or use 1 or 5 ranks"
        assert texts[1] == ("a block of 1 rows of (2, 4) is less than the 2 ranks of mesh dimension 'i', and "
                            "each needs an entry; pad to 2 or use at most 1 ranks")
        shape = (2 if rank < 4 else 1, 2)
        assert texts[2].startswith(f"weight has shape (3, 4), not {shape} as this rank's part over storage ")
        assert texts[3:] == [f"x has shape {shape}, not (tokens, 2), for in_features=4 {over_l}; pass this "
                             "rank's features" for shape in ((2, 4), (2, 3, 2))]


def test_tokens_that_do_not_split_are_refused():
    def on_rank(mesh):
        layer = layer_of(mesh, nn.Linear(3, 10), True, True, False)
        with pytest.raises(ValueError) as refused:
            layer(torch.ones(1, 1))
        return str(refused.value)

    assert set(tp.spawn(on_rank, mesh={"i": 1, "j": 2, "l": 3})) == {
        "the share of the 1 ranks of mesh dimension 'i', 2 tokens each, is not divisible by the "
        "3 ranks of mesh dimension 'l'; pad to 3 or use 2 ranks"}
