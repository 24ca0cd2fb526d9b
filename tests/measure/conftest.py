"""Worlds for these tests: one per shape and module."""

import pytest

import tpcourse as tp


@pytest.fixture(scope="module")
def two():
    with tp.World(mesh={"tp": 2}) as world:
        yield world


@pytest.fixture(scope="module")
def three():
    with tp.World(mesh={"tp": 3}) as world:
        yield world


@pytest.fixture(scope="module")
def square():
    with tp.World(mesh={"dp": 2, "tp": 2}) as world:
        yield world
