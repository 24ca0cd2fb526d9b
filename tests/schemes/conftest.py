"""Worlds for the schemes' tests. A module that takes `grid_world` or `cube` lists its meshes in MESHES."""

import pytest
from grids import named

import tpcourse as tp


def pytest_generate_tests(metafunc):
    for fixture in {"grid_world", "cube"} & set(metafunc.fixturenames):
        metafunc.parametrize(fixture, metafunc.module.MESHES, indirect=True, scope="module",
                             ids=lambda shape: "x".join(map(str, shape)))


@pytest.fixture(scope="module")
def grid_world(request):
    with tp.World(mesh=named(request.param)) as world:
        yield world


@pytest.fixture(scope="module")
def cube(request):
    with tp.World(mesh=dict(zip("ijl", request.param))) as world:
        yield world


@pytest.fixture(scope="module")
def four():
    """A grid of 2 x 2."""
    with tp.World(mesh=named((2, 2))) as world:
        yield world


@pytest.fixture(scope="module")
def eight():
    """A cube of 2 x 2 x 2."""
    with tp.World(mesh={"i": 2, "j": 2, "l": 2}) as world:
        yield world
