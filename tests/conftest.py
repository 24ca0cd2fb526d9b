"""For every test: no rank may outlive its module. (The limit of 120 seconds a test is set in pyproject.toml.)"""

import gc
import time

import psutil
import pytest

GRACE_SECONDS = 3


@pytest.fixture(scope="module", autouse=True)
def no_rank_is_left():
    """Set up before a module's worlds and torn down after them: what still runs then was forgotten."""
    yield
    gc.collect()
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := living_ranks()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for rank in left:
        rank.kill()
    assert not left, f"{len(left)} ranks were still running after this module: {left}"


def living_ranks() -> list[psutil.Process]:
    """The children of this process's helper, which are ranks and what ranks started."""
    left = []
    for child in psutil.Process().children():
        try:
            if "tpcourse.launch.helper" in child.cmdline():
                left += [rank for rank in child.children(recursive=True) if rank.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            pass
    return left
