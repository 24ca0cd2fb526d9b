"""The layers of SUMMA's grid against torch's own: results, gradients, SGD, and what each step sends."""

import pytest
import torch
from grids import named
from torch import nn
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.comm import split_sizes
from tpcourse.measure import Row, Table, wire_bytes
from tpcourse.schemes import Dense

MESHES = [(1, 1), (2, 2), (2, 2, 1), (2, 2, 2)]
TOKENS, WORDS, STEPS, RATE = 12, 7, 3, 0.3


@pytest.fixture(scope="module")
def eight():
    with tp.World(mesh=named((2, 2, 2))) as world:
        yield world


class Siblings(nn.Module):
    """Three linears from one input, as separate queries, keys and values are."""

    def __init__(self, scheme):
        super().__init__()
        self.q, self.k, self.v = (scheme.entering_linear(6, 10, bias) for bias in (True, False, True))

    def forward(self, x):
        return self.q(x) + self.k(x) * self.v(x)


def tied(scheme):
    """A head whose table also stands elsewhere in the model."""
    table = scheme.embedding(WORDS, 6)
    return scheme.head(6, WORDS, table)


LAYERS = {  # name: how a scheme makes it, and how its input comes
    "linear": (lambda scheme: scheme.entering_linear(6, 10), "block"),
    "no bias": (lambda scheme: scheme.leaving_linear(10, 6, bias=False), "block"),
    "gate and up": (lambda scheme: scheme.entering_linear(6, 20, stride=2), "block"),
    "uneven blocks": (lambda scheme: scheme.entering_linear(6, 16, stride=[10, 6]), "block"),
    "siblings": (Siblings, "block"),
    "grouped queries": (lambda scheme: scheme.qkv_linear(6, 3, 4, 2), "block"),
    "one kv head": (lambda scheme: scheme.qkv_linear(6, 3, 4, 1), "block"),
    "norm": (lambda scheme: scheme.norm(6, "layer"), "block"),
    "head": (lambda scheme: scheme.head(6, WORDS), "block"),
    "tied head": (tied, "block"),
    "embedding": (lambda scheme: scheme.embedding(WORDS, 6), "ids"),
    "positions": (lambda scheme: scheme.position_embedding(WORDS, 6), "ids"),
    "input": (lambda scheme: scheme.input_linear(5, 6), "data"),
}


def train(scheme, name, inputs, grads):
    """Results, gradients of a block's input, parameters before and after STEPS steps, first gradients."""
    torch.manual_seed(3)
    layer = LAYERS[name][0](scheme).double()
    start = {key: p.detach().clone() for key, p in layer.named_parameters()}
    optimizer = torch.optim.SGD(layer.parameters(), lr=RATE, momentum=0.9)
    outs, first = [], None
    for x, grad in zip(inputs, grads):
        if LAYERS[name][1] == "block":
            x = x.clone().requires_grad_()
        y = layer(x)
        optimizer.zero_grad()
        y.backward(grad)
        first = first or {key: p.grad.clone() for key, p in layer.named_parameters()}
        optimizer.step()
        outs.append((y.detach(), x.grad))
    last = {key: p.detach() for key, p in layer.named_parameters()}
    return outs, start, first, last, layer


def on_rank(mesh, name, inputs, grads, patch=None):
    from unittest import mock

    from tpcourse.layers import model_layouts
    from tpcourse.schemes import TwoD

    scheme = TwoD(mesh)
    place = (*mesh.get_coordinate(), 0)[:3]
    q, d = mesh.size(0), (*mesh.shape, 1)[2]
    if LAYERS[name][1] == "block":
        inputs = [block_of(x, place, q, d) for x in inputs]
    if name == "one kv head":  # each copy gets its share of the gradient
        grads = [torch.cat([grad[:, :12], grad[:, 12:] / q], 1) for grad in grads]
    grads = [block_of(grad, place, q, d, name) for grad in grads]
    with mock.patch(*patch) if patch else mock.MagicMock():
        *results, layer = train(scheme, name, inputs, grads)
    return *results, model_layouts(layer, scheme.group), place


def columns_of(name, n, q, j):
    """Which of n result features a column of the grid holds, in its order."""
    if "head" in name and "kv" not in name:
        return torch.arange(n).split(split_sizes(n, q))[j]
    blocks = {"gate and up": [10, 10], "uneven blocks": [10, 6], "grouped queries": [12, 6, 6],
              "one kv head": [12, 3, 3]}.get(name, [n])
    parts = []
    for part in torch.arange(n).split(blocks):
        alone = name == "one kv head" and len(part) == 3  # keys or values: a copy in every column
        parts.append(part if alone else part.chunk(q)[j])
    return torch.cat(parts)


def block_of(x, place, q, d, name=""):
    i, j, k = place
    return x.chunk(q * d)[i * d + k][:, columns_of(name, x.size(1), q, j)].contiguous()


def check(world, name, patch=None):
    features = {"no bias": 10, "input": 5}.get(name, 6)
    inputs = {"block": [torch.randn(TOKENS, features, dtype=torch.float64) for _ in range(STEPS)],
              "data": [torch.randn(TOKENS, features, dtype=torch.float64) for _ in range(STEPS)],
              "ids": [torch.randint(WORDS, (TOKENS,)) for _ in range(STEPS)]}[LAYERS[name][1]]
    width = LAYERS[name][0](Dense()).double()(inputs[0]).size(1)
    grads = [torch.randn(TOKENS, width, dtype=torch.float64) for _ in range(STEPS)]
    outs, start, first, last, _ = train(Dense(), name, inputs, grads)
    shape = world.run(lambda mesh: tuple(mesh.shape))[0]
    q, d = shape[0], (*shape, 1)[2]
    for own_outs, own_start, own_first, own_last, layouts, place in world.run(on_rank, name, inputs, grads,
                                                                              patch):
        for (own_y, own_dx), (y, dx) in zip(own_outs, outs):
            assert_close(own_y, block_of(y, place, q, d, name))
            if dx is not None:
                assert_close(own_dx, block_of(dx, place, q, d))
        for key, layout in layouts.items():
            assert torch.equal(own_start[key], layout.take(start[key]))  # drawn the same, to the bit
            assert_close(own_first[key], layout.take(first[key]), check_stride=False)
            assert_close(own_last[key], layout.take(last[key]))


@pytest.mark.parametrize("name", LAYERS)
def test_layers(grid_world, name):
    check(grid_world, name)


def to_its_own(x, group):
    return x


@pytest.mark.parametrize("name, patch", [
    ("linear", ("tpcourse.schemes.two_d_layers.copy_to_region", to_its_own)),
    ("embedding", ("tpcourse.schemes.two_d_layers.copy_to_region", to_its_own)),
    ("positions", ("tpcourse.layers.split_entrance.copy_to_region", to_its_own)),
    ("input", ("tpcourse.layers.split_entrance.copy_to_region", to_its_own)),
    ("one kv head", ("tpcourse.schemes.two_d_layers.SumCopies.apply", lambda parameter, *_: parameter))],
    ids=["bias over tokens", "table over depth", "positions over tokens", "input over tokens", "kv copies"])
def test_a_gradient_that_is_not_summed_is_seen(eight, name, patch):
    with pytest.raises(AssertionError, match="not close"):
        check(eight, name, patch)


def test_gradients_not_summed_are_those_of_a_ranks_own_tokens(eight):
    """The bias without its sum over rows and depth; the table without its sum over depth."""
    x, grad = torch.randn(TOKENS, 6, dtype=torch.float64), torch.randn(TOKENS, 10, dtype=torch.float64)
    patch = "tpcourse.schemes.two_d_layers.copy_to_region", to_its_own
    for _, _, first, _, _, place in eight.run(on_rank, "linear", [x], [grad], patch):
        assert_close(first["bias"], block_of(grad, place, 2, 2, "linear").sum(0))
    ids, grad = torch.randint(WORDS, (TOKENS,)), torch.randn(TOKENS, 6, dtype=torch.float64)
    for _, _, first, _, layouts, place in eight.run(on_rank, "embedding", [ids], [grad], patch):
        at_depth = torch.arange(4).view(2, 2)[:, place[2]]  # which quarters of the tokens
        table = torch.zeros(WORDS, 6, dtype=torch.float64)
        table.index_add_(0, ids.view(4, -1)[at_depth].flatten(), grad.view(4, -1, 6)[at_depth].flatten(0, 1))
        assert_close(first["weight"], layouts["weight"].take(table))


def moves(op, dim, sizes, q, place, phase="forward"):
    """One broadcast or reduce from each of the q ranks of a dimension in turn, of blocks of so many bytes."""
    here = place[("row", "column").index(dim)]
    sizes = sizes if isinstance(sizes, list) else [sizes] * q
    return [Row(op, dim, q, 1, size, wire_bytes(op, size, q, from_root=(here - t) % q), phase)
            for t, size in enumerate(sizes)]


def once(op, dim, n, size, phase="backward"):
    return [Row(op, dim, n, 1, size, wire_bytes(op, size, n), phase)] if n > 1 else []


def linear_rows(op_bytes, q, d, place):
    """What a linear with bias sends, from the bytes of a rank's blocks of X, A, Y and of the bias."""
    x, a, y, b = op_bytes
    rows = moves("broadcast", "column", x, q, place) + moves("broadcast", "row", a, q, place)  # A B
    for op, dim, size in (("broadcast", "row", a), ("reduce", "column", x),  # A B^T
                          ("broadcast", "column", x), ("reduce", "row", a)):  # A^T B
        rows += moves(op, dim, size, q, place, "backward")
    rows += once("all_reduce", "row" if d == 1 else "row_depth", q * d, b)
    return rows + once("all_reduce", "depth", d, a)


def cost_on_rank(mesh, tokens):
    from tpcourse.schemes import TwoD

    q, d = mesh.size(0), (*mesh.shape, 1)[2]
    layer = TwoD(mesh).entering_linear(6, 10)
    x = torch.ones(tokens // (q * d), 6 // q, requires_grad=True)
    with tp.ledger(mesh) as book, tp.saved_activations() as mem:
        y = layer(x)
        y.sum().backward()
    sizes = [4 * t.numel() for t in (x, layer.weight, y, layer.bias)]
    return book, mem.bytes, sizes, (*mesh.get_coordinate(), 0)[:3]


def test_what_a_linear_sends(grid_world):
    """The three products' panels; of the bias one sum, and with depth one of the weight's gradient."""
    shape = grid_world.run(lambda mesh: tuple(mesh.shape))[0]
    q, d = shape[0], (*shape, 1)[2]
    for book, kept, sizes, place in grid_world.run(cost_on_rank, TOKENS):
        x, a, _, b = sizes
        assert book == Table(linear_rows(sizes, q, d, place) if q > 1 else []), book
        sums = wire_bytes("all_reduce", b, q * d) + wire_bytes("all_reduce", a, d)
        assert book.total("wire_bytes") == 3 * (q - 1) * (x + a) + sums
        assert kept == x


def vocabulary_cost(mesh, name):
    from tpcourse.schemes import TwoD

    q, d = mesh.size(0), (*mesh.shape, 1)[2]
    layer = LAYERS[name][0](TwoD(mesh))
    ids, x = torch.zeros(TOKENS, dtype=torch.long), torch.ones(TOKENS // (q * d), 6 // q, requires_grad=True)
    with tp.ledger(mesh) as book:
        layer(ids if name == "embedding" else x).sum().backward()
    return book, (*mesh.get_coordinate(), 0)[:3]


def test_what_the_two_ends_send(grid_world):
    """The head: A B^T, in uneven panels; the embedding: a reduce-scatter, and no table moves."""
    shape = grid_world.run(lambda mesh: tuple(mesh.shape))[0]
    q, d = shape[0], (*shape, 1)[2]
    words, tokens, dim = split_sizes(WORDS, q), TOKENS // (q * d), 6 // q
    tables, logits = ([4 * n * each for n in words] for each in (dim, tokens))
    for book, place in grid_world.run(vocabulary_cost, "head"):
        rows = moves("broadcast", "row", tables, q, place) + moves("reduce", "column", logits, q, place)
        for op, dim_name, sizes in (("broadcast", "column", logits), ("broadcast", "row", tables),  # A B
                                    ("broadcast", "column", logits), ("reduce", "row", tables)):  # A^T B
            rows += moves(op, dim_name, sizes, q, place, "backward")
        rows += once("all_reduce", "depth", d, tables[place[0]])
        assert book == Table(rows if q > 1 else []), book
    for book, place in grid_world.run(vocabulary_cost, "embedding"):
        y = 4 * q * tokens * dim
        rows = once("reduce_scatter", "row", q, y, "forward") + once("all_gather", "row", q, y)
        assert book == Table(rows + once("all_reduce", "depth", d, tables[place[0]])), book


def test_depth_halves_activations_and_their_bytes_but_repeats_weights(four, eight):
    """2 x 2 x 2 against 2 x 2: half of X kept and moved, as much of A; and one sum of dA more."""
    for flat, deep in zip(four.run(cost_on_rank, 48), eight.run(cost_on_rank, 48)[::2]):
        (book, kept, (x, a, _, _), _), (deep_book, deep_kept, (deep_x, deep_a, _, _), _) = flat, deep
        assert (deep_kept, deep_x, deep_a) == (kept / 2, x / 2, a)
        saved, sum_da = 3 * x / 2, wire_bytes("all_reduce", a, 2)
        panels = [table.total("wire_bytes", op="broadcast") + table.total("wire_bytes", op="reduce")
                  for table in (book, deep_book)]
        assert panels[0] - panels[1] == saved
        assert deep_book.total("wire_bytes", dim="depth") == sum_da


def test_dropout_differs_on_all_ranks(eight):
    """Each holds its own shard, outer or inner, so that no two masks repeat; and all move on together."""
    def on_rank(mesh):
        from tpcourse.schemes import TwoD

        scheme = TwoD(mesh, seed=1)
        return [scheme.dropout(0.5, inner)(torch.ones(64)) for inner in (False, True)]

    masks = [mask for own in eight.run(on_rank) for mask in own]
    assert len({tuple(mask.tolist()) for mask in masks}) == 16


ROW, COLUMN = (f"the 2 ranks of mesh dimension {name!r}" for name in ("row", "column"))


@pytest.mark.parametrize("make, says", [
    (lambda s: s.entering_linear(5, 4),
     f"in_features=5 is not divisible by {ROW}; pad to 6 or use 1 or 5 ranks"),
    (lambda s: s.leaving_linear(4, 5),
     f"out_features=5 is not divisible by {COLUMN}; pad to 6 or use 1 or 5 ranks"),
    (lambda s: s.entering_linear(4, 6, stride=2), f"a block of 3 in [3, 3] is not divisible by {COLUMN}"),
    (lambda s: s.qkv_linear(4, 2, 3, 3), f"num_heads=3 is not divisible by {COLUMN}"),
    (lambda s: s.qkv_linear(4, 2, 6, 3), f"num_kv_heads=3 neither divides nor is divided by {COLUMN}"),
    (lambda s: s.embedding(1, 4), f"num_embeddings=1 is less than {ROW}"),
    (lambda s: s.embedding(4, 5), f"dim=5 is not divisible by {COLUMN}"),
    (lambda s: s.head(4, 1), f"vocab_size=1 is less than {ROW}"),
    (lambda s: s.head(4, 6, s.embedding(8, 4)), "weight has shape (4, 2), not (3, 2)"),
    (lambda s: s.norm(5, "rms"), f"dim=5 is not divisible by {COLUMN}"),
    (lambda s: s.position_embedding(3, 5), f"dim=5 is not divisible by {COLUMN}"),
    (lambda s: s.input_linear(3, 5), f"out_features=5 is not divisible by {COLUMN}"),
    (lambda s: s.embedding(4, 4)(torch.zeros(3, dtype=torch.long)), f"3 tokens is not divisible by {ROW}"),
    (lambda s: s.embedding(4, 4)(torch.full((2,), 4)), "ids holds the id 4, outside the vocabulary of 4"),
    (lambda s: s.input_linear(4, 4)(torch.ones(3, 4)), f"3 tokens is not divisible by {ROW}"),
    (lambda s: s.entering_linear(4, 6)(torch.ones(3, 4)),
     f"x has shape (3, 4), not (tokens, 2), for 4 features over {COLUMN}"),
], ids=lambda value: value[:24] if isinstance(value, str) else "")
def test_errors_name_the_dimension_and_the_way_out(four, make, says):
    def on_rank(mesh, make):
        from tpcourse.schemes import TwoD

        with pytest.raises(ValueError) as refused:
            make(TwoD(mesh))
        return str(refused.value)

    assert all(says in text for text in four.run(on_rank, make))


def test_autocast(four):
    """Panels travel, and X is kept, in the lower precision; the weight's gradient comes in its own."""
    def on_rank(mesh):
        from tpcourse.schemes import TwoD

        torch.manual_seed(3)
        layer = TwoD(mesh).entering_linear(6, 10)
        x = torch.ones(4, 3, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16), tp.ledger(mesh) as book:
            y = layer(x)
        y.float().sum().backward()
        return y.dtype, x.grad.dtype, layer.weight.grad.dtype, book.total("message_bytes")

    expected = torch.bfloat16, torch.float32, torch.float32, 2 * 2 * (4 * 3 + 3 * 5)
    assert four.run(on_rank) == [expected] * 4
