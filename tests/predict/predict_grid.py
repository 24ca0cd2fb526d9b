"""Models and schemes on which formulas are held against the real model, in dry runs and on ranks."""

import functools
from dataclasses import replace

import torch

import tpcourse as tp
from tpcourse import predict, schemes
from tpcourse.measure import DryRun, Table, dry_run
from tpcourse.predict.volume import Formulas

BATCH, SEQUENCE = 24, 5
GPT = predict.Transformer(vocab_size=48, context=6, dim=24, num_layers=2, num_heads=12, hidden=48)
LLAMA = replace(GPT, norm="rms", activation="swiglu", positions="rotary", tied=False, bias=False,
                num_kv_heads=4)
MODELS = {
    "gpt": GPT,
    "gpt, dropout, no bias": replace(GPT, dropout=0.1, bias=False, num_layers=1),
    "llama": LLAMA,
    "llama, dropout, bias": replace(LLAMA, dropout=0.1, bias=True, num_layers=3),
    "two key-value heads": replace(GPT, num_kv_heads=2, norm="rms", tied=False),
}
SCHEMES = {  # the formulas' scheme, and the mesh of the real one
    "1 rank": (predict.OneD(1), {"tp": 1}),
    "1D": (predict.OneD(4), {"tp": 4}),
    "1D, 3 ranks": (predict.OneD(3), {"tp": 3}),
    "1D+SP": (predict.OneD(4, True), {"tp": 4}),
    "2D": (predict.TwoD(2), {"rows": 2, "columns": 2}),
    "2D, 16 ranks": (predict.TwoD(4), {"rows": 4, "columns": 4}),
    "2.5D": (predict.TwoD(2, 3), {"rows": 2, "columns": 2, "depth": 3}),
    "depth alone": (predict.TwoD(1, 2), {"rows": 1, "columns": 1, "depth": 2}),
    "3D": (predict.ThreeD(2, 2, 3), {"i": 2, "j": 2, "l": 3}),
    "3D, gathered again": (predict.ThreeD(2, 4, 1, keep_gathered=False), {"i": 2, "j": 4, "l": 1}),
    "3D, flat": (predict.ThreeD(1, 4, 2), {"i": 1, "j": 4, "l": 2}),
    "3D, all-reduce": (predict.ThreeD(2, 4, 2, "all_reduce"), {"i": 2, "j": 4, "l": 2}),
    "3D, both": (predict.ThreeD(2, 2, 2, "all_reduce", False), {"i": 2, "j": 2, "l": 2}),
    "fully sharded": (predict.ThreeD(4, 1, 1), {"i": 4, "j": 1, "l": 1}),
}
RECOMPUTE = ("none", "selective", "full")
REAL = {  # for so many real ranks
    2: [(predict.OneD(2, True), {"tp": 2}, LLAMA, "full"), (predict.OneD(2), {"tp": 2}, GPT, "none"),
        (predict.ThreeD(2, 1, 1), {"i": 2, "j": 1, "l": 1}, MODELS["llama, dropout, bias"], "selective")],
    4: [(predict.TwoD(2), {"rows": 2, "columns": 2}, LLAMA, "none"),
        (predict.OneD(4, True), {"tp": 4}, MODELS["two key-value heads"], "selective"),
        (predict.ThreeD(2, 2, 1), {"i": 2, "j": 2, "l": 1}, GPT, "full"),
        (predict.ThreeD(1, 2, 2, keep_gathered=False), {"i": 1, "j": 2, "l": 2}, LLAMA, "none")],
}


def _deals(model: predict.Transformer, scheme: Formulas) -> bool:
    few, many = sorted((model.kv_heads, scheme.shares.inner_features))
    return many % few == 0 and (scheme.shares.storage == 1 or scheme.shares.inner_features <= model.kv_heads)


# Every scheme with every model whose heads it deals; recomputation goes round.
GRID = [(name, kind, RECOMPUTE[(a + b) % 3])
        for a, name in enumerate(SCHEMES) for b, kind in enumerate(MODELS)
        if _deals(MODELS[kind], SCHEMES[name][0])]


def real(scheme: Formulas, mesh) -> schemes.Scheme:
    """The scheme itself of a scheme's formulas, on a mesh."""
    if isinstance(scheme, predict.OneD):
        return schemes.OneD(mesh["tp"], scheme.sequence_parallel)
    if isinstance(scheme, predict.TwoD):
        return schemes.TwoD(mesh)
    return schemes.ThreeD(mesh, scheme.leave, scheme.keep_gathered)


def step(mesh, scheme: Formulas, model: predict.Transformer, recompute: str,
         dtype: torch.dtype) -> dict[str, int]:
    """One step on whatever device is the default; the bytes of each parameter."""
    gpt = model.build(real(scheme, mesh), recompute).to(dtype)
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    gpt.loss(ids, ids).backward()
    return {name: p.nbytes for name, p in gpt.named_parameters()}


@functools.cache
def dry_step(name: str, kind: str, recompute: str) -> DryRun:
    """The step of a scheme and a model in bfloat16, dry; once for all tests that ask for it."""
    scheme, mesh = SCHEMES[name]
    return dry_run(step, scheme, MODELS[kind], recompute, torch.bfloat16, mesh=mesh)


@functools.cache
def steps_of(ranks: int) -> list[list[tuple]]:
    """The steps in `REAL` on real ranks in float32: of each rank the books, kept and parameters' bytes."""
    with tp.World(ranks=ranks) as world:
        return world.run(_steps, REAL[ranks])


def _steps(_, cases: list) -> list[tuple]:
    outs = []
    for scheme, sizes, model, recompute in cases:
        mesh = torch.distributed.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        with tp.ledger(mesh) as book, tp.saved_activations() as mem:
            parameters = step(mesh, scheme, model, recompute, torch.float32)
        outs.append((book, mem.bytes, sum(parameters.values())))
    return outs


def piece_by_piece(mesh, scheme: Formulas, model: predict.Transformer, recompute: str) -> dict[str, tuple]:
    """A step of one layer, of which each part runs forward and backward by itself: book and kept bytes."""
    gpt = model.build(real(scheme, mesh), recompute).bfloat16()
    ids, places = torch.zeros(BATCH * SEQUENCE, dtype=torch.long), torch.arange(SEQUENCE).repeat(BATCH)
    block, outs = gpt.blocks[0], {}
    parts = {
        "embedding": lambda _: gpt.dropout(
            gpt.embedding(ids) + (gpt.positions(places) if gpt.positions else 0)),
        "attention": lambda x: x + block.dropout(block.attention(block.norm1(x), SEQUENCE)),
        "mlp": lambda x: x + block.dropout(block.mlp(block.norm2(x))),
        "head": lambda x: gpt.scheme.loss(gpt.head(gpt.norm(x)), ids, gpt.vocab_size),
    }
    y = torch.zeros(())
    for name, part in parts.items():
        x = y.detach().requires_grad_()
        with tp.ledger(mesh) as book, tp.saved_activations() as mem:
            y = part(x)
            y.backward(torch.ones_like(y))
        outs[name] = book, mem.bytes
    return outs


@functools.cache
def dry_pieces(name: str, kind: str, recompute: str) -> dict[str, tuple]:
    """`piece_by_piece`, dry; once for all tests that ask for it."""
    scheme, mesh = SCHEMES[name]
    return dry_run(piece_by_piece, scheme, one_layer(kind), recompute, mesh=mesh).value


def one_layer(kind: str) -> predict.Transformer:
    """One of the models, with a single layer."""
    return replace(MODELS[kind], num_layers=1)


def whole(parts: dict[str, Table]) -> Table:
    """One table of all parts."""
    return Table(call for table in parts.values() for call in table.calls)
