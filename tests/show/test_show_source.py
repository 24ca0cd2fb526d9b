"""What `show.source` shows is the source, whole and of no particular machine."""

import ast
import functools
import inspect
import linecache
import textwrap

import pytest
import torch

from tpcourse import comm, show
from tpcourse.comm import groups
from tpcourse.show import collectives
from tpcourse.show.figure import Drawing


@functools.lru_cache
def cached(x):
    return x


THINGS = [groups.split_sizes, Drawing, Drawing.png, groups, cached, torch.nn.Linear.forward, show.blocks]


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: thing.__name__)
def test_source_is_getsource(thing):
    shown = show.source(thing)
    assert shown.text == textwrap.dedent(inspect.getsource(inspect.unwrap(thing))).rstrip()
    assert shown.text in repr(shown) and shown.text in shown._repr_markdown_()


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: thing.__name__)
def test_nothing_tells_where_the_package_is_installed(thing):
    shown = show.source(thing)
    folder = inspect.getfile(inspect.unwrap(thing)).rsplit("/", 1)[0]
    assert folder not in repr(shown) + shown._repr_markdown_() and not shown.caption.startswith("/")


def test_caption_is_the_file():
    assert show.source(groups.split_sizes).caption == "tpcourse/comm/groups.py"
    assert show.source(comm).caption == "tpcourse/comm/__init__.py"
    assert show.source(torch.nn.Linear).caption == "torch/nn/modules/linear.py"


@pytest.mark.parametrize(
    "thing", [groups.split_sizes, Drawing, groups, collectives], ids=lambda thing: thing.__name__
)
def test_without_docstrings_the_code_is_the_same(thing):
    def bare(text):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if hasattr(node, "body") and isinstance(node.body, list) and len(node.body) > 1:
                if isinstance(node.body[0], ast.Expr) and isinstance(
                    getattr(node.body[0].value, "value", None), str
                ):
                    del node.body[0]
        return ast.dump(tree)

    short = show.source(thing, docstring=False).text
    assert bare(short) == bare(show.source(thing).text)
    assert (
        ast.get_docstring(ast.parse(short).body[0] if not inspect.ismodule(thing) else ast.parse(short))
        is None
    )


def test_a_function_from_a_cell():
    code = "def double(x):\n    return 2 * x\n"
    linecache.cache["/tmp/ipykernel_1/123.py"] = (
        len(code),
        None,
        code.splitlines(keepends=True),
        "/tmp/ipykernel_1/123.py",
    )
    space = {"__name__": "__cell__"}
    exec(compile(code, "/tmp/ipykernel_1/123.py", "exec"), space)
    shown = show.source(space["double"])
    assert shown.text == code.rstrip() and shown.caption == "defined in this notebook"


def test_a_fence_in_the_source_does_not_end_the_block():
    shown = show.source(show.source)
    inside = type(shown)("x = '```'", "c")._repr_markdown_()
    assert inside.startswith("````python\n") and "\n````\n" in inside


def test_a_builtin_has_no_source():
    with pytest.raises(TypeError):
        show.source(len)
