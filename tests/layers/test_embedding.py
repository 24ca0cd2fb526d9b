"""VocabParallelEmbedding on real ranks against nn.Embedding in one process."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.comm import split_sizes
from tpcourse.measure import Row, Table, wire_bytes

WORDS, DIM = 11, 3  # uneven on 2, 3 and 4 ranks
SHAPES = [(1,), (9,), (1, 7), (3, 5), ()]  # one token, several, a batch of one, of three, a bare id


def as_it_is(ids):
    return ids.clone()


def strided(ids):
    return torch.stack([ids, -ids - 1], -1)[..., 0]  # every second entry of its memory


def on_rank(mesh, ids, grad, padding_idx, change, wrong):
    """Result, weight and its gradient after one pass. `wrong` spoils the layer."""
    from tpcourse.layers import VocabParallelEmbedding

    torch.manual_seed(3)
    layer = VocabParallelEmbedding(WORDS, DIM, mesh["tp"], padding_idx, dtype=torch.float64)
    ids = change(ids)
    y = layer(ids) if wrong is None else wrong(layer, ids)
    y.backward(grad)
    return y.detach(), layer.weight.detach(), layer.weight.grad


def whole_table(padding_idx=None):
    torch.manual_seed(3)
    return nn.Embedding(WORDS, DIM, padding_idx, dtype=torch.float64)


def check(world, ids, padding_idx=None, change=as_it_is, wrong=None):
    """Every rank's numbers are those of the whole table, or of its rows."""
    table, sizes = whole_table(padding_idx), split_sizes(WORDS, world.size)
    y = table(ids)
    grad = torch.randn_like(y)
    y.backward(grad)
    rows, row_grads = table.weight.detach().split(sizes), table.weight.grad.split(sizes)
    outs = world.run(on_rank, ids, grad, padding_idx, change, wrong)
    for rank, (own_y, weight, weight_grad) in enumerate(outs):
        assert_close(own_y, y.detach())
        assert torch.equal(weight, rows[rank])  # drawn the same, to the bit
        assert_close(weight_grad, row_grads[rank])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("change", [as_it_is, strided], ids=["contiguous", "strided"])
def test_rows_against_the_whole_table(world, shape, dtype, change):
    check(world, torch.randint(WORDS, shape, dtype=dtype), change=change)


def test_every_id_and_none(world):
    check(world, torch.arange(WORDS))
    check(world, torch.empty(0, 4, dtype=torch.int64))


@pytest.mark.parametrize("padding_idx", [0, 1, 5, WORDS - 1, -1, -WORDS])
def test_padding_idx_counts_in_the_whole_vocabulary(world, padding_idx):
    """Its row starts as zeros and gets no gradient; all others do, also at the same place on another rank."""
    check(world, torch.arange(WORDS).repeat(2), padding_idx)


def summed_twice(layer, ids):
    from unittest import mock

    from tpcourse import comm

    with mock.patch("tpcourse.layers.embedding.reduce_from_region", comm.all_reduce):
        return layer(ids)


def not_masked(layer, ids):
    from tpcourse import comm

    local = (ids - layer.own.start).clamp(0, len(layer.own) - 1)
    return comm.reduce_from_region(nn.functional.embedding(local, layer.weight), layer.group)


@pytest.mark.parametrize("wrong", [summed_twice, not_masked])
def test_the_usual_bugs_are_seen(three, wrong):
    check(three, torch.arange(WORDS))
    with pytest.raises(AssertionError, match="not close"):
        check(three, torch.arange(WORDS), wrong=wrong)


def padding_as_a_local_row(layer, ids):
    layer.own_padding_idx = layer.padding_idx
    return layer(ids)


def padding_forgotten(layer, ids):
    layer.own_padding_idx = None
    return layer(ids)


@pytest.mark.parametrize("wrong", [padding_as_a_local_row, padding_forgotten])
def test_padding_bugs_are_seen(three, wrong):
    """Taken as a local row, id 1 loses its gradient on every rank: that is ids 5 and 9 too."""
    check(three, torch.arange(WORDS), padding_idx=1)
    with pytest.raises(AssertionError, match="not close"):
        check(three, torch.arange(WORDS), padding_idx=1, wrong=wrong)


def test_what_another_rank_holds_stays_out(three):
    """An infinite row must not leak through the mask as 0 * inf into tokens of other ranks."""

    def on_rank(mesh):
        from tpcourse.layers import VocabParallelEmbedding

        layer = VocabParallelEmbedding(WORDS, DIM, mesh["tp"])
        with torch.no_grad():
            layer.weight.fill_(1)
            layer.weight[0] = torch.inf  # ids 0, 4 and 8, where the ids of other ranks are looked up
        return layer(torch.arange(WORDS)).detach()

    for y in three.run(on_rank):
        infinite = torch.zeros(WORDS, dtype=torch.bool).index_fill_(0, torch.tensor([0, 4, 8]), True)
        assert torch.equal(y.isinf().all(-1), infinite) and (y[~infinite] == 1).all()


def test_against_dtensor(world):
    """torch's own RowwiseParallel of an embedding, from the same table: the same outputs and gradients."""

    def on_rank(mesh, ids, grad):
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

        from tpcourse.layers import VocabParallelEmbedding

        torch.manual_seed(3)
        table = nn.Embedding(WORDS, DIM, dtype=torch.float64)
        ours = VocabParallelEmbedding.from_embedding(table, mesh["tp"])
        plan = RowwiseParallel(input_layouts=Replicate())
        theirs = parallelize_module(table, mesh["tp"], plan)
        rows = slice(ours.own.start, ours.own.stop)
        outs = []
        for layer in (ours, theirs):
            y = layer(ids)
            y.backward(grad)
            held = [layer.weight.detach(), layer.weight.grad]
            held = [t.full_tensor()[rows] if hasattr(t, "full_tensor") else t for t in held]
            outs.append([y.detach(), *held])
        return outs

    for ours, theirs in world.run(on_rank, torch.randint(WORDS, (2, 9)), torch.randn(2, 9, DIM).double()):
        assert_close(ours, theirs)


@pytest.mark.parametrize("tokens", [1, 7])
def test_what_it_sends(world, tokens):
    """One all-reduce of Y forward, nothing backward."""

    def on_rank(mesh, ids):
        from tpcourse.layers import VocabParallelEmbedding

        layer = VocabParallelEmbedding(WORDS, DIM, mesh["tp"])
        with tp.ledger(mesh) as book:
            layer(ids).sum().backward()
        return book

    p, size = world.size, tokens * DIM * 4
    expected = [Row("all_reduce", "tp", p, 1, size, wire_bytes("all_reduce", size, p), "forward")]
    for book in world.run(on_rank, torch.randint(WORDS, (tokens,))):
        assert book == Table(expected if p > 1 else []), book


def test_from_embedding_copies_and_draws_nothing(three):
    def on_rank(mesh, weight):
        from tpcourse.layers import VocabParallelEmbedding

        table = nn.Embedding(WORDS, DIM, padding_idx=-2, dtype=torch.float64)
        table.weight.data.copy_(weight)
        state = torch.get_rng_state()
        layer = VocabParallelEmbedding.from_embedding(table, mesh["tp"])
        drew = not torch.equal(state, torch.get_rng_state())
        with torch.no_grad():
            table.weight.zero_()
        return drew, layer.padding_idx, layer.weight.untyped_storage().nbytes(), layer.weight.detach()

    weight, sizes = torch.randn(WORDS, DIM, dtype=torch.float64), split_sizes(WORDS, 3)
    for rank, (drew, padding_idx, held, own) in enumerate(three.run(on_rank, weight)):
        assert not drew and padding_idx == WORDS - 2
        assert held == sizes[rank] * DIM * 8  # its own rows, not a view of all of them
        assert torch.equal(own, weight.split(sizes)[rank])


def test_draws_as_the_whole_table_does(three):
    """Random numbers after the layer are those after nn.Embedding, so that stacks of layers start alike."""

    def on_rank(mesh):
        from tpcourse.layers import VocabParallelEmbedding

        torch.manual_seed(3)
        VocabParallelEmbedding(WORDS, DIM, mesh["tp"], padding_idx=2)
        return torch.rand(3)

    torch.manual_seed(3)
    nn.Embedding(WORDS, DIM, padding_idx=2)
    after = torch.rand(3)
    assert all(torch.equal(after, own) for own in three.run(on_rank))


def test_on_one_dimension_of_a_mesh(square):
    """Ranks with the same place along tp hold the same rows, whatever their place along dp."""

    def on_rank(mesh, ids):
        from tpcourse.layers import VocabParallelEmbedding

        torch.manual_seed(3)
        layer = VocabParallelEmbedding(WORDS, DIM, mesh["tp"], dtype=torch.float64)
        return layer(ids[mesh.get_local_rank("dp")]).detach()

    ids = torch.randint(WORDS, (2, 4))
    for rank, y in enumerate(square.run(on_rank, ids)):
        assert_close(y, whole_table()(ids[rank // 2]).detach())


def test_errors_name_both_numbers_and_the_way_out(three):
    """At construction, and for ids that no rank holds: with masks alone these would come out as zeros."""

    def on_rank(mesh):
        from tpcourse.layers import VocabParallelEmbedding

        group, texts = mesh["tp"], []
        layer = VocabParallelEmbedding(WORDS, DIM, group)
        for attempt in (lambda: VocabParallelEmbedding(2, DIM, group),
                        lambda: VocabParallelEmbedding(WORDS, DIM, group, padding_idx=WORDS),
                        lambda: VocabParallelEmbedding(WORDS, DIM, group, padding_idx=-WORDS - 1),
                        lambda: VocabParallelEmbedding(WORDS, DIM, group, max_norm=2.0),
                        lambda: VocabParallelEmbedding.from_embedding(
                            nn.Embedding(WORDS, DIM, scale_grad_by_freq=True), group),
                        lambda: layer(torch.tensor([3, WORDS])), lambda: layer(torch.tensor([-1, 3])),
                        lambda: layer(torch.ones(2))):
            try:
                attempt()
            except (ValueError, TypeError) as error:
                texts.append(str(error))
        return texts

    whole = "count in the whole vocabulary, 0 to 10, or back from -1"
    for texts in three.run(on_rank):
        assert texts == [
            "num_embeddings=2 is less than the 3 ranks of mesh dimension 'tp', and each needs an entry; "
            "pad to 3 or use at most 2 ranks",
            f"padding_idx=11 is not one of num_embeddings=11; {whole}",
            f"padding_idx=-12 is not one of num_embeddings=11; {whole}",
            "max_norm=2.0 rewrites the rows that are looked up, and here other ranks' ids look up row 0; "
            "clip the rows of `weight` after the optimizer's step instead",
            "scale_grad_by_freq=True counts how often a row is looked up, and here other ranks' ids look up "
            "row 0; divide the rows of `weight.grad` by the ids' counts instead",
            "ids holds the id 11, outside the vocabulary of 11; pass ids from 0 to 10",
            "ids holds the id -1, outside the vocabulary of 11; pass ids from 0 to 10",
            "ids must hold int64 or int32 ids, not torch.float32"]
