"""The simulator ends in the definition, in the steps it should take, with the bytes that measure counts."""

from collections import Counter

import pytest

from tpcourse.measure import wire_bytes
from tpcourse.show.collectives import COLLECTIVES, simulate

RANKS = range(1, 7)


def filled(n, content):
    """What n ranks hold, `content(rank, slot)` being the terms (chunk, rank) of a cell."""
    return tuple(tuple(tuple(content(r, s)) for s in range(n)) for r in range(n))


def total(n, chunk):
    return [(chunk, rank) for rank in range(n)]


DEFINITIONS = {
    "broadcast": lambda n: filled(n, lambda r, s: [(s, 0)]),
    "reduce": lambda n: filled(n, lambda r, s: total(n, s) if r == 0 else []),
    "scatter": lambda n: filled(n, lambda r, s: [(s, 0)] if r == s else []),
    "gather": lambda n: filled(n, lambda r, s: [(s, s)] if r == 0 else []),
    "all_gather": lambda n: filled(n, lambda r, s: [(s, s)]),
    "reduce_scatter": lambda n: filled(n, lambda r, s: total(n, s) if r == s else []),
    "all_reduce": lambda n: filled(n, lambda r, s: total(n, s)),
    "all_to_all": lambda n: filled(n, lambda r, s: [(r, s)]),
    "send_recv": lambda n: tuple((((0, 0),) if r < 2 else (),) for r in range(n)),
    "ring_shift": lambda n: tuple((((0, (r - 1) % n),),) for r in range(n)),
}
STEPS = {
    "broadcast": lambda n: 2 * (n - 1),
    "reduce": lambda n: 2 * (n - 1),
    "all_reduce": lambda n: 2 * (n - 1),
    "scatter": lambda n: n - 1,
    "gather": lambda n: n - 1,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "send_recv": lambda n: int(n > 1),
    "ring_shift": lambda n: int(n > 1),
    "all_to_all": lambda n: (1 << (n - 1).bit_length()) - 1,  # n - 1 where n is a power of two
}


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_ends_in_its_definition(name, n):
    run = simulate(name, n)
    assert run.frames[-1].holds == DEFINITIONS[name](n)
    assert len(run.frames) - 1 == STEPS[name](n)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_each_step_moves_what_is_there_over_one_port(name, n):
    for frame in simulate(name, n).frames:
        assert all(frame.holds[move.source][move.slot] for move in frame.moves)
        for ranks in ([move.source for move in frame.moves], [move.target for move in frame.moves]):
            assert len(set(ranks)) == len(ranks)  # a rank sends one chunk and receives one at a time
        cells = [cell for slots in frame.holds for cell in slots]
        assert all(max(Counter(cell).values(), default=1) == 1 for cell in cells)  # no term added twice


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("name", sorted(set(COLLECTIVES) - {"send_recv", "ring_shift"}))
def test_sends_what_measure_counts(name, n):
    sent = simulate(name, n).sent()
    assert [float(part) * 240 for part in sent] == pytest.approx(
        [wire_bytes(name, 240, n, from_root=rank) for rank in range(n)]
    )


def test_bad_names_and_sizes():
    with pytest.raises(ValueError, match="no collective 'allreduce'; there are broadcast"):
        simulate("allreduce", 4)
    for ranks in (0, 27):
        with pytest.raises(ValueError, match=f"ranks={ranks}"):
            simulate("all_reduce", ranks)
