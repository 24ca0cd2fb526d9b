"""Dropout by the stream of its region: which ranks share a mask, what it does, what it draws and keeps."""

import pytest
import torch
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.comm import RandomStates
from tpcourse.layers import Dropout

P = 0.3


def strided(x):
    return torch.stack([x, -x], -1)[..., 0]


def on_rank(mesh, x, sharded):
    """The masks of two calls in a row, read off their results."""
    from tpcourse.comm import RandomStates
    from tpcourse.layers import Dropout

    dropout = Dropout(P, RandomStates(3, mesh["tp"]), sharded)
    return [dropout(x) != 0 for _ in range(2)]


def masks(world, sharded):
    """How many different masks there are over all ranks, first and second call apart."""
    outs = world.run(on_rank, torch.ones(7, 9), sharded)
    return [len({tuple(mask.flatten().tolist()) for mask in call}) for call in zip(*outs)]


def test_masks_are_equal_in_replicated_regions_and_differ_in_sharded_ones(world):
    assert masks(world, sharded=False) == [1, 1]
    assert masks(world, sharded=True) == [world.size, world.size]


def test_the_wrong_stream_is_seen(three):
    """Copies of one activation that drift apart; and shards that all drop the same entries."""

    def region(mesh, x, swapped):
        from tpcourse.comm import RandomStates, all_gather, reduce_from_region
        from tpcourse.layers import Dropout

        random = RandomStates(3, mesh["tp"])
        replicated = Dropout(P, random, sharded=swapped)(reduce_from_region(x, mesh["tp"]))
        return replicated, all_gather(Dropout(P, random, sharded=not swapped)(x), mesh["tp"], 0)

    x = torch.ones(7, 9)
    right, wrong = three.run(region, x, False), three.run(region, x, True)
    assert all(torch.equal(own, right[0][0]) for own, _ in right)
    assert not torch.equal(wrong[1][0], wrong[0][0]) and not torch.equal(wrong[2][0], wrong[0][0])
    a, b, c = right[0][1].chunk(3)
    assert not torch.equal(a, b) and not torch.equal(b, c) and not torch.equal(a, c)
    assert torch.equal(wrong[0][1], wrong[0][1][:7].repeat(3, 1))


@pytest.mark.parametrize("shape", [(7,), (2, 3, 5), ()], ids=str)
@pytest.mark.parametrize("change", [torch.clone, strided], ids=["contiguous", "strided"])
def test_against_the_formula(shape, change):
    random = RandomStates(3, None)
    state = random.get_state()
    x = change(torch.randn(shape, dtype=torch.float64)).requires_grad_()
    y = Dropout(P, random, sharded=True)(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    random.set_state(state)
    mask = torch.empty(shape, dtype=torch.bool).bernoulli_(1 - P, generator=random.sharded)
    assert_close(y, torch.where(mask, x / (1 - P), 0.0))
    assert_close(x.grad, torch.where(mask, grad / (1 - P), 0.0), check_stride=False)


def test_drops_the_share_p_and_keeps_the_mean():
    n = 100_000
    y = Dropout(P, RandomStates(3, None), sharded=False)(torch.ones(n))
    spread = 4 * (P * (1 - P) / n) ** 0.5  # four standard deviations
    assert abs((y == 0).float().mean() - P) < spread
    assert abs(y.mean() - 1) < spread / (1 - P)


@pytest.mark.parametrize("sharded", [True, False])
def test_without_a_share_to_drop_it_returns_x_and_draws_nothing(sharded):
    random, x = RandomStates(3, None), torch.randn(7)
    before = random.get_state()
    assert Dropout(0.0, random, sharded)(x) is x
    assert Dropout(P, random, sharded).eval()(x) is x
    assert all(map(torch.equal, random.get_state(), before))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_keeps_one_byte_an_entry(dtype, device):
    with torch.device(device), tp.saved_activations() as mem:
        y = Dropout(P, RandomStates(3, None), True)(torch.randn(7, 9, dtype=dtype, requires_grad=True))
    assert mem.bytes == 7 * 9 and y.dtype == dtype


@pytest.mark.parametrize("p", [-0.1, 1, 1.5])
def test_an_impossible_share_is_refused(p):
    with pytest.raises(ValueError) as error:
        Dropout(p, RandomStates(3, None), True)
    assert str(error.value) == (f"p={p} is not a probability of dropping that leaves something; "
                                "pass 0 or more and less than 1")
