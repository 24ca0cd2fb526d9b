"""Activations that change hands: every rank's new block, its gradient, and what was sent for it."""

from itertools import permutations

import pytest
import torch
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.comm import Placement
from tpcourse.measure import Table
from tpcourse.predict.moves import moved

N, H = 12, 36  # divisible by all that the placements below split them into


def placements(ranks: int) -> dict[str, Placement]:
    """The outer layouts of the schemes on so many ranks, and others."""
    i, j, l = {1: (1, 1, 1), 2: (1, 1, 2), 3: (3, 1, 1), 4: (2, 1, 2)}[ranks]
    cube = {"i": i, "j": j, "l": l}
    places = {
        "all": Placement.on({"tp": ranks}),
        "tokens": Placement.on({"tp": ranks}, ("tp",)),
        "features": Placement.on({"tp": ranks}, (), ("tp",)),
        "tokens and features": Placement.on(cube, ("i", "j"), ("l",)),
        "backwards": Placement(tuple(reversed(range(ranks))), (0,) * ranks),
    }
    if ranks == 4:
        face = {"i": 1, "j": 2, "l": 2}
        places |= {"other way": Placement.on(cube, ("l",), ("i",)),
                   "copies over l": Placement.on(cube, ("i",)),
                   "a face": Placement.on(face, ("i", "j"), ("l",)),
                   "copies over j": Placement.on(face, ("i",), ("l",))}
    return places


def on_ranks(mesh, moves, x, grads):
    """Each move forward and backward: the new block, the gradient, and the books."""
    from tpcourse import comm

    rank, outs = mesh.get_rank(), []
    for source, target in moves:
        own = x[source.block(rank, *x.shape)].mT.contiguous().mT  # strides as no other rank needs them
        own.requires_grad_()
        with tp.ledger() as book, tp.saved_activations() as mem:
            y = comm.redistribute(own, source, target, mesh["tp"])
            y.backward(grads[target.block(rank, *x.shape)])
        outs.append((y.detach(), own.grad, Table(book.rows), mem.bytes))
    return outs


def pairs(ranks: int) -> list[tuple[Placement, Placement]]:
    return list(permutations(placements(ranks).values(), 2))


def test_blocks_gradients_and_messages(world):
    """Between any two placements, where copies of the result have equal gradients, whole ones."""
    x, grads = torch.randn(2, N, H, dtype=torch.float64)
    outs = world.run(on_ranks, pairs(world.size), x, grads)
    for rank, of_rank in enumerate(outs):
        for (source, target), (y, grad, book, kept) in zip(pairs(world.size), of_rank):
            assert_close(y, x[target.block(rank, N, H)], rtol=0, atol=0)
            assert_close(grad, grads[source.block(rank, N, H)], rtol=0, atol=0)
            assert book == Table(moved(source, target, N, H, 8, rank)), (source, target, book)
            assert kept == 0


def test_ranks_that_have_what_they_need_send_nothing(world):
    """To copies everybody sends; from copies nobody does, and the gradient goes the other way."""
    places, rows = placements(world.size), {True: [], False: []}
    x = torch.ones(N, H)
    moves = [(places["tokens"], places["all"]), (places["all"], places["tokens"])]
    for (y, _, book, _), to_copies in zip(world.run(on_ranks, moves, x, x)[0], (True, False)):
        rows[to_copies] = [(row.phase, row.message_bytes) for row in book.rows]
        assert y.untyped_storage().nbytes() == y.nbytes  # a shard does not keep the whole alive
    size = (world.size - 1) * N // world.size * H * 4
    assert rows == {True: [("forward", size)] * (size > 0), False: [("backward", size)] * (size > 0)}


def test_equal_placements_pass_through(two):
    def on_rank(mesh):
        from tpcourse import comm

        x, place = torch.ones(4, 4, requires_grad=True), comm.Placement((0, 1), (0, 0))
        with tp.ledger() as book:
            same = comm.redistribute(x, place, comm.Placement((0, 1), (0, 0)), mesh["tp"]) is x
        return same, len(book)

    assert two.run(on_rank) == [(True, 0)] * 2


def test_a_sum_over_copies_makes_the_gradient_too_large(world):
    """What the adjoint would do, here that of a plain all-gather: it counts the whole gradient P times."""
    def on_rank(mesh, x, grad):
        from tpcourse import comm

        own = x[comm.my_slice(N, mesh["tp"])].requires_grad_()
        y = comm.all_gather(own, mesh["tp"], 0)
        y.backward(grad)
        return y.detach(), own.grad

    x, grads = torch.randn(2, N, H, dtype=torch.float64)
    places = placements(world.size)
    moves = [(places["tokens"], places["all"])]
    for right, (y, grad) in zip(world.run(on_ranks, moves, x, grads), world.run(on_rank, x, grads)):
        assert_close(y, right[0][0])
        assert_close(grad, world.size * right[0][1])


def test_no_gradient_is_moved_for_what_is_frozen(two):
    def on_rank(mesh, source, target):
        from tpcourse import comm

        with tp.ledger() as book:
            y = comm.redistribute(torch.ones(2, 4), source, target, mesh["tp"])
        return y.requires_grad, len(book)

    assert two.run(on_rank, placements(2)["tokens"], placements(2)["features"]) == [(False, 1)] * 2


@pytest.mark.parametrize("shape, source, target, says", [
    ((4,), "tokens", "all", "x has shape (4,), not (tokens, features)"),
    ((2, 2, 4), "tokens", "all", "x has shape (2, 2, 4), not (tokens, features)"),
    ((3, 4), "all", "tokens", "3 tokens do not split into 2 equal parts; make it 4"),
    ((2, 5), "tokens", "features", "5 features do not split into 2 equal parts; make it 6")],
    ids=["a vector", "three dimensions", "tokens", "features"])
def test_refused(two, shape, source, target, says):
    def on_rank(mesh, x, source, target):
        from tpcourse import comm

        with pytest.raises(ValueError) as refused:
            comm.redistribute(x, source, target, mesh["tp"])
        return str(refused.value)

    places = placements(2)
    for text in two.run(on_rank, torch.ones(shape), places[source], places[target]):
        assert says in text


def test_placements_of_other_ranks_are_refused(two):
    def on_rank(mesh, source, target):
        from tpcourse import comm

        for one, other, says in ((source, target, "on 4 ranks is not one on the 2 ranks"),
                                 (target, source, "on 2 and 4 ranks")):
            with pytest.raises(ValueError, match=says):
                comm.redistribute(torch.ones(4, 4), one, other, mesh["tp"])

    two.run(on_rank, placements(4)["tokens"], placements(2)["all"])
