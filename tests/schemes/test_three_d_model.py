"""GPT and ViT on three mesh dimensions against the dense model and other schemes: numbers and books."""

import pytest
import torch
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.measure import Row, Table, wire_bytes
from tpcourse.models import GPT, ViT, generate
from tpcourse.schemes import Dense

MESHES = [(1, 4, 1), (4, 1, 1), (1, 1, 4), (1, 2, 3), (2, 3, 1), (2, 2, 2)]
DESIGNS = [("reduce_scatter", True), ("reduce_scatter", False), ("all_reduce", True), ("all_reduce", False)]
GPT_SIZES = dict(vocab_size=11, context=3, dim=24, num_layers=1, num_heads=12, hidden=36)
VIT_SIZES = dict(classes=7, image=6, patch=2, channels=3, dim=24, num_layers=1, num_heads=12, hidden=36)
BATCH, SEQUENCE, STEPS = 12, 3, 2
GPTS = {
    "gpt2": {},
    "llama": {"positions": "rotary", "activation": "swiglu", "norm": "rms", "tied": False, "num_kv_heads": 1,
              "bias": False, "recompute": "full"},
}


def steps(model, inputs, targets, lr=0.5):
    """Steps of SGD, by hand as torch.optim takes seconds to import: losses, first gradients, last weights."""
    losses, first = [], None
    for x, target in zip(inputs, targets):
        loss = model.loss(x, target)
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
    return losses, first, {name: p.detach() for name, p in model.named_parameters()}


def on_rank(mesh, kind, sizes, designs, inputs, targets):
    from tpcourse import models
    from tpcourse.layers import model_layouts
    from tpcourse.schemes import ThreeD

    outs = []
    for design in designs:
        scheme = ThreeD(mesh, *design)
        model = getattr(models, kind)(scheme, **sizes).double()
        outs.append((*steps(model, inputs, targets), model_layouts(model, scheme.group)))
    return outs


def assembled(shape, parts):
    """The whole from the pieces that ranks own; each entry has one owner."""
    whole, owners = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape)
    for layout, part in parts:
        for piece in layout.pieces:
            if piece.owned:
                whole[piece.there] = part[piece.here]
                owners[piece.there] += 1
    assert torch.equal(owners, torch.ones(shape))
    return whole


def compare(world, kind, sizes, designs, inputs, targets):
    losses, first, last = steps({"GPT": GPT, "ViT": ViT}[kind](Dense(), **sizes).double(), inputs, targets)
    for outs in zip(*world.run(on_rank, kind, sizes, designs, inputs, targets)):
        for own_losses, own_first, own_last, layouts in outs:
            assert_close(own_losses, losses, rtol=1e-12, atol=0)
            for name, layout in layouts.items():
                assert_close(own_first[name], layout.take(first[name]), rtol=1e-9, atol=1e-13, msg=name)
        for name in last:
            parts = [(layouts[name], own_last[name]) for *_, own_last, layouts in outs]
            assert_close(assembled(last[name].shape, parts), last[name], rtol=1e-9, atol=1e-13, msg=name)


def text(batch=BATCH):
    ids = torch.randint(11, (STEPS, batch, SEQUENCE + 1))
    targets = ids[..., 1:].masked_fill(torch.rand(STEPS, batch, SEQUENCE) < 0.3, -100)
    targets[:, 0, 0] = 7
    return list(ids[..., :-1]), list(targets)


@pytest.mark.parametrize("options", GPTS.values(), ids=GPTS)
def test_gpt(cube, options):
    """Odd sequences, an uneven vocabulary, some targets that do not count."""
    compare(cube, "GPT", GPT_SIZES | options, DESIGNS[:3] if cube.size > 4 else DESIGNS[1:3], *text())


def test_two_layers(eight):
    """Gradients pass from layer to layer; several queries to a KV head; the core recomputed."""
    sizes = GPT_SIZES | {"num_layers": 2, "num_kv_heads": 6, "recompute": "selective", "activation": "swiglu"}
    compare(eight, "GPT", sizes, DESIGNS[1:3], *text())


def test_vit(cube):
    images, classes = torch.randn(STEPS, BATCH, 3, 6, 6).double(), torch.randint(7, (STEPS, BATCH))
    designs = DESIGNS[:1] if cube.size > 4 else DESIGNS[2:3]
    compare(cube, "ViT", VIT_SIZES, designs, list(images), list(classes))


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_by_p_by_one_is_one_dimensional(ranks):
    """To the bit, and message for message: Megatron's layers, with and without sequence parallelism."""

    def on_rank(mesh, make, leave, sizes, inputs, targets):
        from tpcourse import models
        from tpcourse.schemes import OneD, ThreeD

        outs = []
        one = OneD(mesh["j"], leave == "reduce_scatter", seed=4)
        for scheme in (one, ThreeD(mesh, leave, False, seed=4)):
            model = getattr(models, make)(scheme, **sizes).double()
            with tp.ledger(mesh) as book:
                outs.append((*steps(model, inputs, targets), scheme.random.get_state()[1]))
            outs[-1] += (book.rows,)
        return outs

    with tp.World(mesh={"i": 1, "j": ranks, "l": 1}) as world:
        for leave in ("reduce_scatter", "all_reduce"):
            for options in GPTS.values():
                sizes = GPT_SIZES | options | {"dropout": 0.2}
                for theirs, ours in world.run(on_rank, "GPT", leave, sizes, *text()):
                    equal_to_the_bit(ours, theirs)


def equal_to_the_bit(ours, theirs):
    assert ours[0] == theirs[0]
    for mine, other in zip(ours[1:3], theirs[1:3]):
        assert set(mine) == set(other)
        for name in mine:
            assert torch.equal(mine[name], other[name]), name
    assert torch.equal(ours[3], theirs[3])
    assert Table(ours[4]) == Table(theirs[4]), Table(ours[4]) - Table(theirs[4])


def test_p_by_one_by_one_is_fully_sharded(two):
    """PyTorch's fully_shard: the same losses, and as many bytes on the wire in a step.

    Where weights are gathered again in backward, fully_shard gathers all parameters, we what backward needs:
    not the embedding's table, positions, biases, and the norms' parameters, which we do not split.
    """

    def on_rank(mesh, sizes, again, inputs, targets):
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        from tpcourse import models
        from tpcourse.comm import my_slice
        from tpcourse.schemes import Dense, ThreeD

        cube = dist.init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("i", "j", "l"))
        ours = models.GPT(ThreeD(cube, keep_gathered=not again), **sizes).double()
        theirs = models.GPT(Dense(), **sizes).double()
        unneeded = sum(p.numel() for name, p in theirs.named_parameters()
                       if p.dim() == 1 or name in ("embedding.weight", "positions.weight"))
        for module in (*theirs.blocks, theirs):
            fully_shard(module, mesh=cube["i"], reshard_after_forward=again)
        own, loss = my_slice(BATCH, cube["i"]), theirs.loss
        theirs.loss = lambda x, target: mean_over_ranks(loss(x[own], target[own]), dist)
        outs = []
        for model in (ours, theirs):
            with tp.ledger() as book:
                outs.append(steps(model, inputs, targets)[0])
            outs.append(book.total("wire_bytes"))
        return *outs, unneeded

    inputs, targets = text()
    targets = [target.masked_fill(target == -100, 1) for target in targets]  # as many on every rank
    sizes = GPT_SIZES | {"vocab_size": 12, "context": 4, "tied": False, "num_layers": 2}
    for again in (False, True):
        for ours, sent, theirs, they_sent, unneeded in two.run(on_rank, sizes, again, inputs, targets):
            assert_close(ours, theirs, rtol=1e-12, atol=0)
            assert they_sent - sent == again * STEPS * wire_bytes("all_gather", unneeded * 8, 2)


def mean_over_ranks(loss, dist):
    """The loss of a rank's tokens, as part of the mean that is reported."""
    mean = loss.detach().clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return loss + (mean - loss).detach()


def test_dropout_masks(eight):
    """Equal where ranks hold the same activation, different where they hold shards of it."""

    def on_rank(mesh, leave, plain):
        from tpcourse.comm import RandomStates
        from tpcourse.schemes import ThreeD

        scheme = ThreeD(mesh, leave, seed=3)
        if plain:
            scheme.random = RandomStates(3, scheme.group)
        return [tuple(scheme.dropout(0.5, inner)(torch.ones(64)).tolist()) for inner in (False, True)]

    places = [(i, j, l) for i in range(2) for j in range(2) for l in range(2)]
    for rank, (outer, inner) in enumerate(eight.run(on_rank, "reduce_scatter", False)):
        assert [other for other in eight.run(on_rank, "reduce_scatter", False)].count([outer, inner]) == 1
    masks = [mask for out in eight.run(on_rank, "reduce_scatter", False) for mask in out]
    assert len(set(masks)) == 16
    outs = dict(zip(places, eight.run(on_rank, "all_reduce", False)))
    assert len({mask for out in outs.values() for mask in out}) == 8
    for (i, j, l), (outer, inner) in outs.items():
        assert outer == outs[i, 1 - j, l][0] and inner == outs[i, j, 1 - l][1]
    plain = dict(zip(places, eight.run(on_rank, "all_reduce", True)))
    assert plain[0, 0, 0][0] == plain[1, 0, 1][0]  # the usual bug: other tokens and features, the same mask
    assert plain[0, 0, 0][1] != plain[0, 0, 1][1]  # and another mask for the same activation


@pytest.mark.parametrize("leave", ["reduce_scatter", "all_reduce"])
def test_dropout_survives_recomputation(eight, leave):
    """With dropout the gradients are to the bit those of a run that keeps everything; without it, others."""

    def on_rank(mesh, leave, recompute, dropout, inputs, targets):
        from tpcourse import models
        from tpcourse.schemes import ThreeD

        scheme = ThreeD(mesh, leave, seed=1)
        model = models.GPT(scheme, **GPT_SIZES, dropout=dropout, recompute=recompute).double()
        return *steps(model, inputs, targets), scheme.random.get_state()

    args = text()
    kept = eight.run(on_rank, leave, "none", 0.3, *args)
    assert all(losses == kept[0][0] for losses, *_ in kept)
    without = eight.run(on_rank, leave, "none", 0.0, *args)
    for recompute in ("selective", "full"):
        for ours, theirs, other in zip(eight.run(on_rank, leave, recompute, 0.3, *args), kept, without):
            assert ours[0] == theirs[0] != other[0]
            assert all(torch.equal(ours[2][name], last) for name, last in theirs[2].items())
            assert all(torch.equal(*pair) for pair in zip(ours[3], theirs[3]))


def test_generates_what_the_dense_model_does(eight):
    """From one sequence, which the ranks cannot split."""

    def on_rank(mesh, leave):
        from tpcourse import models
        from tpcourse.schemes import ThreeD

        model = models.GPT(ThreeD(mesh, leave), **GPT_SIZES | {"context": 6}, dropout=0.5)
        return models.generate(model, torch.tensor([1, 2, 3]), 7, seed=3)

    dense = generate(GPT(Dense(), **GPT_SIZES | {"context": 6}), torch.tensor([1, 2, 3]), 7, seed=3)
    for leave in ("reduce_scatter", "all_reduce"):
        assert all(torch.equal(own, dense) for own in eight.run(on_rank, leave))


def test_what_one_scheme_saves_any_other_loads(tmp_path):
    """Weights and momentum through a checkpoint, from scheme to scheme: the losses of one dense run."""

    def on_rank(mesh, path, inputs, targets):
        import torch.distributed as dist

        from tpcourse import models
        from tpcourse.layers.checkpoint import load, save
        from tpcourse.schemes import OneD, ThreeD, TwoD

        def axes(*sizes):
            return dist.init_device_mesh("cpu", sizes, mesh_dim_names=tuple("ijl"[: len(sizes)]))

        losses = []
        for number, scheme in enumerate([ThreeD(mesh), OneD(axes(4)), ThreeD(axes(1, 2, 2), "all_reduce"),
                                         TwoD(axes(2, 2)), ThreeD(axes(4, 1, 1), keep_gathered=False)]):
            model = models.GPT(scheme, **GPT_SIZES, seed=number, num_kv_heads=1).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
            if number:
                load(f"{path}/{number}", model, optimizer, scheme.group)
            losses.append(momentum_step(model, optimizer, inputs[number % STEPS], targets[number % STEPS]))
            save(f"{path}/{number + 1}", model, optimizer, scheme.group, None)
        return losses

    inputs, targets = text()
    dense = GPT(Dense(), **GPT_SIZES, seed=0, num_kv_heads=1).double()
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.5, momentum=0.9)
    expected = [momentum_step(dense, optimizer, inputs[n % STEPS], targets[n % STEPS]) for n in range(5)]
    for losses in tp.spawn(on_rank, str(tmp_path), inputs, targets, mesh={"i": 2, "j": 2, "l": 1}):
        assert_close(losses, expected, rtol=1e-12, atol=0)


def momentum_step(model, optimizer, x, target):
    optimizer.zero_grad()
    loss = model.loss(x, target)
    loss.backward()
    optimizer.step()
    return loss.item()


DIM, HIDDEN, HEADS, TOKENS = 24, 36, 12, BATCH * SEQUENCE  # of the block whose messages are counted


def block_step(mesh, design, recompute):
    """What a step of one block sends along each dimension, and keeps for backward."""
    from tpcourse import models
    from tpcourse.schemes import ThreeD

    block = models.Block(ThreeD(mesh, *design), DIM, HEADS, hidden=HIDDEN, bias=False, norm="rms",
                         recompute=recompute).double()
    x = torch.ones(TOKENS // (4 if design[0] == "reduce_scatter" else 2), DIM // 2, dtype=torch.float64)
    with tp.ledger(mesh) as book, tp.saved_activations() as mem:
        y = block(x.requires_grad_(), SEQUENCE)
        y.backward(torch.ones_like(y))
    return book, mem.bytes


def block_messages(scatter, keep, recompute):
    """The closed form on 2 x 2 x 2: operations, dimensions, how many numbers; A enters, B is W, C leaves."""
    tokens, norm = TOKENS // 2, TOKENS // (4 if scatter else 2)  # what a linear, and a norm, has of them
    linears = [(DIM, 3 * DIM, "jl"), (DIM, DIM, "lj"), (DIM, HIDDEN, "jl"), (HIDDEN, DIM, "lj")]
    reduce = "reduce_scatter" if scatter else "all_reduce"
    a, b, c, dx, dw, dy = ([] for _ in range(6))
    for into, out, (enter, leave) in linears:
        x, w, y = tokens * into // 2, into * out // 4, tokens * out // 2
        a += [("all_gather", enter, x)] * scatter
        b += [("all_gather", "i", w)]
        c += [(reduce, leave, y)]
        dx += [(reduce, enter, x)]
        dw += [("reduce_scatter", "i", w)]
        dy += [("all_gather", leave, y)] * scatter
    statistics = [("all_reduce", "l", norm)] * 2
    parameters = [("all_reduce", "i_j" if scatter else "i", DIM // 2)] * 2
    return {"forward": a + b + c + statistics,
            "backward": dx + dw + dy + statistics + parameters + (a * scatter + b if not keep else []),
            "recomputation": a + b + c[:-1] + statistics if recompute == "full" else []}


def block_table(phases):
    rows = []
    for phase, messages in phases.items():
        for op, dim, n in messages:
            ranks = 4 if dim == "i_j" else 2
            rows.append(Row(op, dim, ranks, 1, n * 8, wire_bytes(op, n * 8, ranks), phase))
    return Table(rows)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("design", DESIGNS, ids=lambda d: f"{d[0]}, {'kept' if d[1] else 'gathered again'}")
def test_what_a_block_sends(eight, design, recompute):
    """The last sum of a recomputed block is not made again: nothing in it needs the result."""
    expected = block_table(block_messages(design[0] == "reduce_scatter", design[1], recompute))
    for book, _ in eight.run(block_step, design, recompute):
        assert book == expected, book - expected


def test_what_a_block_keeps(eight):
    """Of N = q^3 ranks, gathering again keeps 1/q^3; leaving by an all-reduce 1/q^2, here twice as much."""
    kept = {design: eight.run(block_step, design, "none")[0][1] for design in DESIGNS}
    x = sum(TOKENS // 2 * n // 2 for n in (DIM, DIM, DIM, HIDDEN)) * 8  # the linears' inputs, tokens gathered
    w = sum(DIM * n // 4 for n in (3 * DIM, DIM, 2 * HIDDEN)) * 8  # and their weights
    assert kept["reduce_scatter", True] == kept["reduce_scatter", False] + w + x - x // 2
    assert kept["all_reduce", True] == kept["all_reduce", False] + w
    assert kept["all_reduce", False] == 2 * kept["reduce_scatter", False]


def test_what_cannot_be_split_is_refused(eight):
    """On all ranks, by an error that names the axis and both numbers."""

    def on_rank(mesh):
        import torch.distributed as dist

        from tpcourse import models
        from tpcourse.schemes import ThreeD

        scheme = ThreeD(mesh)
        model = models.GPT(scheme, **GPT_SIZES)
        flat = dist.init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
        cases = {
            "leave='gather' is not one of 'reduce_scatter', 'all_reduce'": lambda: ThreeD(mesh, "gather"),
            "the named dimensions ('tp',), not three": lambda: ThreeD(flat),
            "embeddings=3 is less than the 2 ranks of mesh dimension 'j'": lambda: scheme.embedding(3, 4),
            "vocab_size=1 is less than the 2 ranks of mesh dimension 'j' times": lambda: scheme.head(4, 1),
            f"dim=5 {of('l')}": lambda: scheme.embedding(11, 5),
            f"dim=7 {of('l')}": lambda: scheme.norm(7, "rms"),
            f"in_features=5 {of('j')}": lambda: scheme.leaving_linear(5, 4),
            f"a block of 5 in [5, 5] {of('j')}": lambda: scheme.entering_linear(4, 10, stride=2),
            f"num_heads=3 {of('j')}": lambda: scheme.qkv_linear(6, 2, 3, 3),
            f"a first dimension of 3 tokens {of('i')}": lambda: model(torch.zeros(3, 1, dtype=torch.long)),
            f"the share of the 2 ranks of mesh dimension 'i', 3 tokens each, {of('j')}":
                lambda: model(torch.zeros(2, 3, dtype=torch.long)),
            "a first dimension of 6 tokens is not divisible by the 4 ranks of mesh dimension 'i_j'":
                lambda: scheme.position_embedding(4, 4)(torch.arange(6)),
            "2 tokens on a rank are not whole sequences of 4; pass a batch that is divisible by the 4 ranks "
            "it is split over": lambda: models.GPT(scheme, **GPT_SIZES | {"context": 4})(
                torch.zeros(2, 4, dtype=torch.long))}
        for says, attempt in cases.items():
            with pytest.raises(ValueError) as refused:
                attempt()
            assert says in str(refused.value), str(refused.value)

    def of(name):
        return f"is not divisible by the 2 ranks of mesh dimension '{name}'"

    eight.run(on_rank)


def llama_step(mesh, design):
    """A step of a block of Llama's kind on whatever device is the default."""
    from tpcourse import models
    from tpcourse.schemes import ThreeD

    model = models.GPT(ThreeD(mesh, *design), **GPT_SIZES | GPTS["llama"])
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    model.loss(ids, ids).backward()


@pytest.mark.parametrize("design", [DESIGNS[1], DESIGNS[2]], ids=str)
def test_a_dry_run_counts_what_real_ranks_send_and_keep(eight, design):
    def on_rank(mesh, design):
        with tp.ledger(mesh) as book, tp.saved_activations() as mem:
            llama_step(mesh, design)
        return book, mem

    dry = tp.measure.dry_run(llama_step, design, mesh=eight.mesh)
    book, mem = eight.run(on_rank, design)[0]
    assert dry.book == book and dry.activations == mem and len(book) > 10


def test_autocast(eight):
    """Products in bfloat16, sums and parameters in float32: the dense model's loss and gradients, nearly."""

    def on_rank(mesh, leave, inputs, targets):
        from tpcourse import models
        from tpcourse.layers import model_layouts
        from tpcourse.schemes import ThreeD

        scheme = ThreeD(mesh, leave)
        model = models.GPT(scheme, **GPT_SIZES)
        return *autocast_step(model, inputs[0], targets[0]), model_layouts(model, scheme.group)

    inputs, targets = text()
    loss, grads = autocast_step(GPT(Dense(), **GPT_SIZES), inputs[0], targets[0])
    for leave in ("reduce_scatter", "all_reduce"):
        for own_loss, own_grads, layouts in eight.run(on_rank, leave, inputs, targets):
            assert own_loss == pytest.approx(loss, rel=1e-3)
            for name, layout in layouts.items():
                assert own_grads[name].dtype == torch.float32
                size = grads[name].abs().max()
                assert_close(own_grads[name], layout.take(grads[name]), rtol=0, atol=0.05 * size, msg=name)


def autocast_step(model, x, target):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(x, target)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def test_clipping_counts_every_entry_once(eight):
    """Norms and biases that other ranks hold too, a tied table, copies of the one KV head."""

    def on_rank(mesh, leave, ids):
        from tpcourse import layers, models
        from tpcourse.schemes import ThreeD

        scheme = ThreeD(mesh, leave)
        model = models.GPT(scheme, **GPT_SIZES, num_kv_heads=1).double()
        model.loss(ids, ids.roll(1)).backward()
        norm = layers.clip_grad_norm_(model, 0.1, scheme.group)
        grads = {name: p.grad for name, p in model.named_parameters()}
        return norm, grads, layers.model_layouts(model, scheme.group)

    ids = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % 11
    model = GPT(Dense(), **GPT_SIZES, num_kv_heads=1).double()
    model.loss(ids, ids.roll(1)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for leave in ("reduce_scatter", "all_reduce"):
        for own_norm, grads, layouts in eight.run(on_rank, leave, ids):
            assert_close(own_norm, norm)
            for name, p in model.named_parameters():
                assert_close(grads[name], layouts[name].take(p.grad), check_stride=False)
