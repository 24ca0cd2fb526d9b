"""Two streams of random numbers: which draws are equal on which ranks, and where the streams stand."""

import copy
import pickle

import pytest
import torch

from tpcourse.comm import RandomStates

N = 64  # numbers a draw: two streams that agree on them are one stream


def draws(states):
    return [torch.rand(N, generator=generator) for generator in (states.replicated, states.sharded)]


def on_rank(mesh, seed):
    return draws(RandomStates(seed, mesh["tp"]))


def test_replicated_is_equal_on_all_ranks_and_sharded_on_none(world):
    outs = world.run(on_rank, 3)
    streams = {tuple(sharded.tolist()) for _, sharded in outs} | {tuple(outs[0][0].tolist())}
    assert all(torch.equal(replicated, outs[0][0]) for replicated, _ in outs)
    assert len(streams) == world.size + 1


def test_no_stream_is_another_rank_s_under_another_seed(three):
    """The usual seed + rank makes rank 1's stream that of rank 0 under the next seed."""

    def usual(mesh, seed):
        return torch.rand(N, generator=torch.Generator().manual_seed(seed + mesh.get_rank()))

    assert torch.equal(three.run(usual, 3)[1], three.run(usual, 4)[0])
    numbers = [tuple(sharded.tolist()) for seed in range(3, 7) for _, sharded in three.run(on_rank, seed)]
    assert len(set(numbers)) == 3 * 4


def test_seed_and_rank_alone_decide(square):
    """Also in another process, without a group, and whatever the rank along another mesh dimension."""
    outs = square.run(on_rank, 3)
    for rank, (replicated, sharded) in enumerate(outs):
        assert torch.equal(replicated, outs[0][0])
        assert torch.equal(sharded, outs[rank % 2][1])
    alone = draws(RandomStates(3, None))
    assert torch.equal(alone[0], outs[0][0]) and torch.equal(alone[1], outs[0][1])
    assert not torch.equal(draws(RandomStates(4, None))[0], alone[0])


def test_a_draw_advances_its_own_stream_only():
    torch.manual_seed(0)
    after = torch.rand(N)
    torch.manual_seed(0)
    states, other = RandomStates(3, None), RandomStates(3, None)
    torch.rand(N, generator=states.sharded)
    assert torch.equal(draws(states)[0], draws(other)[0])
    assert torch.equal(torch.rand(N), after)


def test_a_state_brings_both_streams_back():
    states = RandomStates(3, None)
    draws(states)
    state = states.get_state()
    first = draws(states)
    states.set_state(state)
    assert all(map(torch.equal, draws(states), first))
    with pytest.raises(ValueError):
        states.set_state(state[:1])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda states: pickle.loads(pickle.dumps(states))],
                         ids=["deepcopy", "pickle"])
def test_a_copy_goes_on_from_the_same_place_by_itself(copied):
    states = RandomStates(3, None)
    draws(states)
    other = copied(states)
    numbers = draws(other)
    assert all(map(torch.equal, draws(states), numbers))


def test_on_meta_tensors():
    with torch.device("meta"):
        states = RandomStates(3, None)
    assert states.sharded.device.type == "cpu"


def test_replicated_along_one_dimension_only(square):
    """With `shards`, ranks at different places along dp do not repeat each other's masks."""

    def both_dimensions(mesh):
        return draws(RandomStates(3, mesh["tp"], mesh["dp"]))[0]

    a, b, c, d = square.run(both_dimensions)
    assert torch.equal(a, b) and torch.equal(c, d) and not torch.equal(a, c)
