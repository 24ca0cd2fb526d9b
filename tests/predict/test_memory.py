"""The formulas of memory are what the model's parameters take and what autograd keeps, to the byte."""

from dataclasses import fields, replace

import pytest
import torch
from predict_grid import (BATCH, GPT, GRID, LLAMA, MODELS, REAL, SCHEMES, SEQUENCE, dry_pieces, dry_step,
                          one_layer, steps_of)

from tpcourse import predict
from tpcourse.predict.memory import parameters
from tpcourse.predict.shares import Shares

BY_PART = [("1 rank", "llama, dropout, bias", "none"), ("1D", "two key-value heads", "none"),
           ("1D+SP", "gpt", "selective"), ("2.5D", "llama", "none"), ("2D", "gpt, dropout, no bias", "none"),
           ("3D", "gpt", "none"), ("3D", "gpt, dropout, no bias", "none"),
           ("3D, gathered again", "llama, dropout, bias", "selective"), ("3D, all-reduce", "gpt", "none")]
PREFIXES = {"embedding": ("embedding.", "positions."), "attention": ("norm1.", "attention."),
            "mlp": ("norm2.", "mlp."), "head": ("norm.", "head.")}


def part_of(name):
    inside = name.split(".", 2)[2] if name.startswith("blocks.") else name
    return next(part for part, prefixes in PREFIXES.items() if inside.startswith(prefixes))


def predicted(name, kind, recompute):
    return predict.memory(MODELS[kind], SCHEMES[name][0], BATCH, SEQUENCE, recompute=recompute)


@pytest.mark.parametrize("name, kind, recompute", GRID, ids=map(" - ".join, GRID))
def test_equal_to_what_is_held(name, kind, recompute):
    parts, dry = predicted(name, kind, recompute), dry_step(name, kind, recompute)
    assert sum(part.activations for part in parts.values()) == dry.activations.bytes
    held = dict.fromkeys(parts, 0)
    for parameter, size in dry.value.items():
        held[part_of(parameter)] += size
    assert {name: part.parameters for name, part in parts.items()} == held


@pytest.mark.parametrize("name, kind, recompute", BY_PART, ids=map(" - ".join, BY_PART))
def test_activations_of_each_part(name, kind, recompute):
    parts = predict.memory(one_layer(kind), SCHEMES[name][0], BATCH, SEQUENCE, recompute=recompute)
    measured = {part: kept for part, (_, kept) in dry_pieces(name, kind, recompute).items()}
    assert {part: own.activations for part, own in parts.items()} == measured


@pytest.mark.parametrize("ranks", REAL)
def test_equal_on_real_ranks(ranks):
    for outs in steps_of(ranks):
        for (scheme, _, model, recompute), (_, kept, held) in zip(REAL[ranks], outs):
            parts = predict.memory(model, scheme, BATCH, SEQUENCE, e=4, recompute=recompute).values()
            assert sum(part.activations for part in parts) == kept, scheme
            assert sum(part.parameters for part in parts) == held, scheme


WRONG = [("1D", "inner_features"), ("1D+SP", "outer_tokens"), ("2.5D", "inner_tokens"), ("2.5D", "looked_up"),
         ("2.5D", "outer_features"), ("3D", "outer_tokens"), ("3D", "storage"), ("3D", "keeps_gathered"),
         ("3D", "looked_up"), ("3D, gathered again", "keeps_gathered")]


@pytest.mark.parametrize("name, field", WRONG, ids=map(".".join, WRONG))
def test_another_share_is_seen(name, field, monkeypatch):
    """Each share of every scheme that is not one, taken for one; what is kept, for gathered again."""
    right = SCHEMES[name][0].shares
    value = not right.keeps_gathered if field == "keeps_gathered" else 1
    assert value != getattr(right, field) and field in {f.name for f in fields(Shares)}
    monkeypatch.setattr(type(SCHEMES[name][0]), "shares", replace(right, **{field: value}))
    parts = predicted(name, "gpt", "none")
    assert sum(part.activations for part in parts.values()) != dry_step(name, "gpt", "none").activations.bytes


@pytest.mark.parametrize("layout", ["1D", "1D+SP"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_table_of_korthikanti(layout, recompute):
    """Their Table 2, with dropout, plus four numbers a token that our norms keep; 22 billion parameters."""
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    model = predict.Transformer(51200, s, h, num_layers=1, num_heads=a, dropout=0.1)
    parts = predict.memory(model, predict.OneD(t, layout == "1D+SP"), b, recompute=recompute)
    split = t if layout == "1D+SP" else 1
    table = s * b * h * 2 // split
    if recompute != "full":
        scores = 5 * a * s * s * b // t if recompute == "none" else 0
        table = s * b * h * 10 // split + s * b * h * 24 // t + scores + 4 * 4 * s * b // split
    assert parts["attention"].activations + parts["mlp"].activations == table


def test_the_parameters_of_gpt3():
    """12lh^2 (1 + 13 / (12 h) + (V + s) / (12 l h)): Narayanan et al. 2021, equation 2; and the last norm."""
    l, h, V, s = 96, 12288, 51200, 2048
    model = predict.Transformer(V, s, h, num_layers=l, num_heads=96)
    whole = parameters(model, predict.OneD(1).shares)
    assert sum(whole.values()) == 12 * l * h**2 + 13 * l * h + (V + s) * h + 2 * h
    for scheme, ranks in (predict.TwoD(4), 16), (predict.ThreeD(2, 4, 4), 32):  # norms and places less
        own = parameters(model, scheme.shares)
        assert sum(whole.values()) / sum(own.values()) == pytest.approx(ranks, 0.01)


@pytest.mark.parametrize("e, dtype", [(4, torch.float32), (8, torch.float64)])
def test_adam_in_full_precision(e, dtype):
    """Two moments: what torch's own Adam holds, its counters of steps apart."""
    from tpcourse.schemes import Dense

    gpt = GPT.build(Dense()).to(dtype)
    adam = torch.optim.Adam(gpt.parameters())
    gpt.loss(*torch.zeros(2, 2, SEQUENCE, dtype=torch.long)).backward()
    adam.step()
    held = sum(t.nbytes for state in adam.state.values() for name, t in state.items() if name != "step")
    parts = predict.memory(GPT, predict.OneD(1), 2, SEQUENCE, e=e).values()
    assert sum(part.optimizer for part in parts) == held
    assert sum(part.gradients for part in parts) == sum(p.grad.nbytes for p in gpt.parameters())


def test_sixteen_bytes_a_parameter():
    """2 + 2 + 12 in mixed precision: Rajbhandari et al. 2020, section 3.1; the activations on top."""
    for part in predicted("3D", "llama", "none").values():
        numbers = part.parameters // 2
        assert part.total - part.activations == 16 * numbers and part.gradients == 2 * numbers


def test_what_does_not_split_is_refused():
    with pytest.raises(ValueError, match="vocab_size=50 does not split evenly over 4 ranks; make it 52"):
        predict.memory(replace(LLAMA, vocab_size=50), predict.OneD(4), BATCH)
    with pytest.raises(ValueError, match="recompute='all'"):
        predict.memory(LLAMA, predict.OneD(4), BATCH, recompute="all")
