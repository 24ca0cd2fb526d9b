"""For every test: worlds to share within a module, and no rank may outlive its module.

(The limit of 120 seconds a test is set in pyproject.toml.)
"""

import gc
import time

import psutil
import pytest

import tpcourse as tp

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


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{}ranks".format)
def world(request):
    with tp.World(ranks=request.param) as world:
        yield world


@pytest.fixture(scope="module")
def two():
    with tp.World(ranks=2) as world:
        yield world


@pytest.fixture(scope="module")
def three():
    with tp.World(ranks=3) as world:
        yield world


@pytest.fixture(scope="module")
def square():
    with tp.World(mesh={"dp": 2, "tp": 2}) as world:
        yield world


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
