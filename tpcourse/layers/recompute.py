"""Recomputation: backward runs the forward again instead of keeping what it computed."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch.utils.checkpoint import checkpoint

from tpcourse.comm.random import RandomStates

T = TypeVar("T")


def recompute(function: Callable[..., T], *args: object, random: RandomStates | None = None) -> T:
    """function(*args), of which only args are kept for backward; backward first runs it again.

    Both streams of `random`, and torch's own, stand in the second run where they stood in the first, so that
    it draws the same masks, and go on afterwards as if there had been one run.
    Collectives inside are sent again, but the second run stops once it has all that backward needs: one at
    the end of `function`, whose result nothing inside keeps, is sent once.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4; in tensor-parallel layers: Korthikanti et al. 2022,
    arXiv:2205.05198, section 5.
    """
    if random is None:
        return checkpoint(function, *args, use_reentrant=False)
    before = random.get_state()
    return checkpoint(function, *args, use_reentrant=False,
                      context_fn=lambda: (contextlib.nullcontext(), _standing_at(before, random)))


@contextlib.contextmanager
def _standing_at(state: tuple, random: RandomStates) -> Iterator[None]:
    after = random.get_state()
    random.set_state(state)
    try:
        yield
    finally:
        random.set_state(after)
