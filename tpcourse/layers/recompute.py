"""Recomputation: backward runs the forward again instead of keeping what it computed."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
    again = _StandingAsNow(random)
    return checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again))


class _StandingAsNow(AbstractContextManager):
    """Inside it, any number of times, the streams start from where they stand now; outside they go on."""

    def __init__(self, random: RandomStates) -> None:
        self.random, self.now = random, random.get_state()

    def __enter__(self) -> None:
        self.outside = self.random.get_state()
        self.random.set_state(self.now)

    def __exit__(self, *error: object) -> None:
        self.random.set_state(self.outside)
