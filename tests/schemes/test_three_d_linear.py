"""The linear layer on three mesh dimensions, on real ranks, against nn.Linear in one process."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tpcourse as tp

MESHES = [(1, 1, 1), (1, 2, 1), (1, 4, 1), (4, 1, 1), (1, 1, 4), (2, 2, 1), (1, 2, 3), (2, 3, 1), (2, 2, 2)]
STEPS = 2


@pytest.fixture(scope="module", params=MESHES, ids=str)
def cube(request):
    with tp.World(mesh=dict(zip("ijl", request.param))) as world:
        yield world, request.param


def axes_of(mesh, scatter, keep, leaving):
    from tpcourse.schemes.cube import Axes

    axes = Axes(mesh["i"], mesh["j"], mesh["l"], scatter, keep)
    return axes.swapped() if leaving else axes


def part(mesh, x, tokens, features):
    """x [tokens, features] cut along the named mesh dimensions, the first outermost."""
    for dim, names in enumerate((tokens, features)):
        for name in names:
            x = x.chunk(mesh[name].size(), dim)[mesh.get_local_rank(name)]
    return x.clone(memory_format=torch.contiguous_format)


def part_of_layer(mesh, linear, leaving):
    """Column ranges by hand: rows over j, then i; columns over l; for a leaving linear j and l swapped."""
    enter, leave = ("l", "j") if leaving else ("j", "l")
    weight = part(mesh, linear.weight.detach(), enter, leave).tensor_split(mesh["i"].size())
    bias = [] if linear.bias is None else [part(mesh, linear.bias.detach()[:, None], enter, "")[:, 0]]
    at = mesh.get_local_rank("i")
    sizes = [len(w) for w in weight]
    return [weight[at], *(b.split(sizes)[at] for b in bias)]


def on_rank(mesh, whole, xs, grads, scatter, keep, leaving, wrong=None):
    """For each step of SGD: Y, dX and the parameters' gradients, beside the parts of the whole layer's."""
    from tpcourse.schemes.cube import CubeLinear
    from tpcourse.comm import my_slice

    axes = axes_of(mesh, scatter, keep, leaving)
    enter, leave = ("l", "j") if leaving else ("j", "l")
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    layer = CubeLinear(whole.in_features, whole.out_features, axes,
                       [my_slice(whole.out_features, axes.enter)], whole.bias is not None)
    torch.set_default_dtype(torch.float32)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (layer, whole)]
    outs, expected = [], []
    for x, grad in zip(xs, grads):
        own = part(mesh, x, "i" + enter * scatter, leave).requires_grad_()
        y = layer(own) if wrong is None else wrong(layer, own)
        y.backward(part(mesh, grad, "i" + leave * scatter, enter))
        x = x.clone().requires_grad_()
        whole_y = whole(x)
        whole_y.backward(grad)
        outs += [y.detach(), own.grad, *(p.grad.clone() for p in layer.parameters()),
                 *(p.detach().clone() for p in layer.parameters())]
        gradients = nn.Linear(whole.in_features, whole.out_features, whole.bias is not None)
        for p, q in zip(gradients.parameters(), whole.parameters()):
            p.data = q.grad
        expected += [part(mesh, whole_y.detach(), "i" + leave * scatter, enter),
                     part(mesh, x.grad, "i" + enter * scatter, leave),
                     *part_of_layer(mesh, gradients, leaving), *part_of_layer(mesh, whole, leaving)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return outs, expected


def check(world, sizes, scatter, keep=True, leaving=False, bias=True, wrong=None, odd=(3, 5)):
    i, j, l = sizes
    torch.manual_seed(3)
    enter, leave = (l, j) if leaving else (j, l)
    whole = nn.Linear(odd[0] * leave, odd[1] * enter, bias, dtype=torch.float64)
    tokens = 3 * i * j * l
    xs, grads = ([torch.randn(tokens, n, dtype=torch.float64) for _ in range(STEPS)]
                 for n in (whole.in_features, whole.out_features))
    for own, expected in world.run(on_rank, whole, xs, grads, scatter, keep, leaving, wrong):
        assert_close(own, expected, check_stride=False)
        assert len(own) == STEPS * (4 + 2 * bias + (0))


@pytest.mark.parametrize("leaving", [False, True], ids=["entering", "leaving"])
@pytest.mark.parametrize("scatter, keep", product([True, False], repeat=2))
def test_against_the_whole_layer(cube, scatter, keep, leaving):
    world, sizes = cube
    check(world, sizes, scatter, keep, leaving, bias=scatter or keep)
