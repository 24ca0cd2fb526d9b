"""A layout says what torch really does: tensor_split's blocks, a DTensor's, or where given shards lie."""

import pickle

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import tpcourse as tp
from tpcourse import show
from tpcourse.show.layout import describe

FULL = torch.arange(7 * 10 * 3, dtype=torch.float64).view(7, 10, 3)


def cut(full, block):
    return full[tuple(slice(*edge) for edge in block)]


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_split_is_tensor_split(dim, parts):
    found = describe(FULL.shape, {"tp": parts}, {dim: "tp"})
    for block, expected in zip(found.blocks, FULL.tensor_split(parts, dim), strict=True):
        assert torch.equal(cut(FULL, block), expected)


def test_three_mesh_dimensions_split_copy_and_nest():
    found = describe(FULL.shape, {"pp": 2, "dp": 2, "tp": 3}, {1: ("tp", "dp")})
    expected = [
        FULL.tensor_split(3, 1)[t].tensor_split(2, 1)[d] for _ in range(2) for d in range(2) for t in range(3)
    ]
    for block, part in zip(found.blocks, expected, strict=True):
        assert torch.equal(cut(FULL, block), part)
    assert sorted(found.holders().values()) == [[rank, rank + 6] for rank in range(6)]


@pytest.fixture(scope="module")
def world():
    with tp.World(mesh={"dp": 2, "tp": 2}) as world:
        yield world


def shard(mesh, full, placements):
    tensor = distribute_tensor(full, mesh, placements)
    return show.layout(tensor), tensor.to_local()


PLACEMENTS = [
    [Replicate(), Replicate()],
    [Replicate(), Shard(1)],
    [Shard(0), Replicate()],
    [Shard(0), Shard(1)],
    [Shard(1), Shard(1)],
    [Shard(2), Shard(0)],
    [Shard(2), Shard(2)],
]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_layout_of_a_dtensor_is_what_ranks_hold(world, placements):
    outs = world.run(shard, FULL, placements)
    assert all(layout == outs[0][0] for layout, _ in outs)
    layout, parts = outs[0][0], [part for _, part in outs]
    assert layout.mesh == {"dp": 2, "tp": 2} and layout.shape == FULL.shape
    for block, part in zip(layout.blocks, parts, strict=True):
        assert torch.equal(cut(FULL, block), part)
    located = show.locate(FULL, parts, mesh={"dp": 2, "tp": 2})
    assert located.holders() == layout.holders() and located.empty_ranks() == layout.empty_ranks()


def partial_sum(mesh, placements):
    from torch.distributed.tensor import DTensor

    return show.layout(DTensor.from_local(torch.ones(2, 6), mesh, placements))


def test_a_product_that_is_yet_to_be_summed(world):
    """X split by features times A split by rows: torch calls the result Partial, and so do we."""

    def product(mesh, x, a):
        x, a = (distribute_tensor(t, mesh, [Replicate(), Shard(dim)]) for t, dim in ((x, 1), (a, 0)))
        return show.layout(x @ a), (x @ a).to_local()

    x, a = torch.randn(3, 8, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
    outs = world.run(product, x, a)
    expected = describe((3, 5), {"dp": 2, "tp": 2}, partial="tp")
    assert all(layout == expected for layout, _ in outs)
    for dp in (0, 1):
        torch.testing.assert_close(outs[2 * dp][1] + outs[2 * dp + 1][1], x @ a)
    assert expected.holders() == {((0, 3), (0, 5)): [0, 1, 2, 3]}
    assert expected != describe((3, 5), {"dp": 2, "tp": 2})  # four terms are not four copies


def test_split_along_one_mesh_dimension_and_partial_along_the_other(world):
    expected = describe((4, 6), {"dp": 2, "tp": 2}, {0: "dp"}, "tp")
    assert all(found == expected for found in world.run(partial_sum, [Shard(0), Partial()]))
    assert list(expected.holders().values()) == [[0, 1], [2, 3]]


def test_a_maximum_that_is_yet_to_be_made_is_refused(world):
    def partial(mesh):
        with pytest.raises(ValueError, match="'tp' is neither Shard, Replicate nor a sum"):
            partial_sum(mesh, [Replicate(), Partial("max")])

    world.run(partial)


def test_a_sum_says_so():
    drawn = show.blocks(shape=(2, 3), mesh={"tp": 2}, partial="tp", title="Z")
    assert drawn.alt.splitlines() == ["Z: 2 × 3 on mesh tp=2.", "ranks 0, 1: [0:2, 0:3]", "terms of a sum over tp"]
    texts = [text.get_text() for text in drawn.figure().axes[0].texts]
    assert "Σ ranks 0, 1\n2 × 3" in texts and "terms of a sum over tp" in texts
    assert "Σ" not in "".join(t.get_text() for t in show.blocks(shape=(2, 3), mesh={"tp": 2}).figure().axes[0].texts)


def test_between_terms_of_a_sum_stands_a_plus():
    def pluses(partial):
        drawn = show.blocks(shape=(6, 5), mesh={"tp": 4}, partial=partial).figure()
        return [t.get_text() for t in drawn.axes[0].texts].count("+")
    assert pluses("tp") == 3 and pluses(()) == 0


def test_a_sign_with_a_caption():
    X = show.blocks(shape=(2, 3), mesh={"tp": 2}, title="X")
    drawn = show.equation([X, "→\nall-reduce", X])
    texts = [t.get_text() for t in drawn.figure().axes[0].texts]
    assert "→" in texts and "all-reduce" in texts and drawn.title == "X → X"


def test_a_local_tensor_of_another_size_is_refused(world):
    def shorter(mesh):
        from torch.distributed.tensor import DTensor

        tensor = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0), Replicate()], shape=torch.Size((8, 2)),
                                    stride=(2, 1))
        with pytest.raises(ValueError, match=r"local tensor has shape \(3, 2\); .* promise \(4, 2\)"):
            show.layout(tensor)

    world.run(shorter)


@pytest.mark.parametrize("part", ["dp", "tp"])
def test_a_part_of_the_mesh_is_refused(world, part):
    """Along dp rank 0 shares with rank 2, whose block must not be drawn as rank 1's."""

    def partly(mesh):
        tensor = distribute_tensor(FULL, mesh[part], [Shard(0)])
        with pytest.raises(ValueError, match=r"holds ranks \[\d, \d\], not 0 to 3 in order"):
            show.layout(tensor)

    world.run(partly)


def test_layouts_are_plain_data():
    layout = describe((6, 8), {"tp": 4}, {1: "tp"})
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_empty_ranks():
    layout = describe((3, 5), {"tp": 4}, {0: "tp"})
    assert layout.empty_ranks() == [3] and [3] not in layout.holders().values()


@pytest.mark.parametrize(
    "split, message",
    [
        ({2: "tp"}, r"dimension 2; shape \(4, 6\) has 0 to 1"),
        ({0: "pp"}, "'pp'; the mesh has dp, tp"),
        ({0: "tp", 1: "tp"}, "'tp' splits two dimensions"),
    ],
)
def test_bad_descriptions(split, message):
    with pytest.raises(ValueError, match=message):
        show.blocks(shape=(4, 6), mesh={"dp": 2, "tp": 2}, split=split)


def test_a_mesh_dimension_is_split_or_partial():
    with pytest.raises(ValueError, match="'tp' is both split and partial"):
        show.blocks(shape=(4, 6), mesh={"dp": 2, "tp": 2}, split={0: "tp"}, partial="tp")


def test_blocks_needs_something_to_draw():
    with pytest.raises(ValueError, match="either a layout, or shape= and mesh="):
        show.blocks(shape=(4, 6))


@pytest.mark.parametrize(
    "part", [FULL[:2, :3] + 1000, FULL[0], FULL[::2], FULL[:2, :3].flip(0), FULL[5:6].repeat(2, 1, 1)]
)
def test_parts_that_are_no_block(part):
    with pytest.raises(ValueError, match="rank 1's part"):
        show.locate(FULL, [FULL, part])


def test_repeating_values_have_no_place():
    with pytest.raises(ValueError, match="torch.arange"):
        show.locate(torch.ones(4), [torch.ones(2)])
