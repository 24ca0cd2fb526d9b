"""Worlds for these tests: one per shape and module."""

import pytest

import tpcourse as tp


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{}ranks".format)
def world(request):
    with tp.World(ranks=request.param) as world:
        yield world


@pytest.fixture(scope="module")
def three():
    with tp.World(ranks=3) as world:
        yield world


@pytest.fixture(scope="module")
def square():
    with tp.World(mesh={"dp": 2, "tp": 2}) as world:
        yield world
