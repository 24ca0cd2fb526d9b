"""The formulas of a step's messages are the ledger's books, row by row and part by part."""

from dataclasses import replace

import pytest
from predict_grid import (BATCH, GPT, GRID, LLAMA, MODELS, REAL, SCHEMES, SEQUENCE, dry_pieces, dry_step,
                          one_layer, steps_of, whole)

from tpcourse import predict
from tpcourse.measure import Row, Table

BY_PART = [("1D", "two key-value heads", "none"), ("1D+SP", "gpt", "selective"), ("2.5D", "llama", "none"),
           ("2D", "gpt, dropout, no bias", "none"), ("3D", "gpt", "none"),
           ("3D, gathered again", "llama, dropout, bias", "selective"), ("3D, all-reduce", "gpt", "none")]


def predicted(name, kind, recompute):
    return whole(predict.volume(MODELS[kind], SCHEMES[name][0], BATCH, SEQUENCE, recompute=recompute))


@pytest.mark.parametrize("name, kind, recompute", GRID, ids=map(" - ".join, GRID))
def test_equal_to_the_ledger(name, kind, recompute):
    book = dry_step(name, kind, recompute).book
    assert len(book - predicted(name, kind, recompute)) == 0, book - predicted(name, kind, recompute)
    assert bool(book.calls) == (name != "1 rank")


@pytest.mark.parametrize("name, kind, recompute", BY_PART, ids=map(" - ".join, BY_PART))
def test_equal_part_by_part(name, kind, recompute):
    parts = predict.volume(one_layer(kind), SCHEMES[name][0], BATCH, SEQUENCE, recompute=recompute)
    measured = dry_pieces(name, kind, recompute)
    assert list(parts) == list(measured)
    for part, (book, _) in measured.items():
        assert book == parts[part], f"{part}\n{book - parts[part]}"


@pytest.mark.parametrize("ranks", REAL)
def test_equal_to_the_ledger_of_real_ranks(ranks):
    for outs in steps_of(ranks):
        for (scheme, _, model, recompute), (book, *_) in zip(REAL[ranks], outs):
            table = whole(predict.volume(model, scheme, BATCH, SEQUENCE, e=4, recompute=recompute))
            assert book == table and len(book) > 1, f"{scheme}\n{book - table}"


MUTANTS = [("1D", "entering_linear"), ("1D", "leaving_linear"), ("1D", "embedding"), ("1D", "loss"),
           ("1D+SP", "norm"), ("1D+SP", "position_embedding"), ("2D", "head"), ("2D", "leaving_linear"),
           ("2.5D", "embedding"), ("2.5D", "norm"), ("2.5D", "position_embedding"), ("2.5D", "loss"),
           ("3D", "entering_linear"), ("3D", "leaving_linear"), ("3D", "embedding"), ("3D", "norm"),
           ("3D", "position_embedding"), ("3D", "loss")]


@pytest.mark.parametrize("name, method", MUTANTS, ids=map(".".join, MUTANTS))
def test_a_missing_term_is_seen(name, method, monkeypatch):
    monkeypatch.setattr(type(SCHEMES[name][0]), method, lambda *args: [])
    assert len(dry_step(name, "gpt", "none").book - predicted(name, "gpt", "none")) > 0


def test_the_usual_mistakes_are_seen(monkeypatch):
    """A message that recomputation skips, a head that is A B in place of A B^T, a norm's bias forgotten."""
    def differ(name, kind, recompute):
        return dry_step(name, kind, recompute).book - predicted(name, kind, recompute)

    full = "1D", "gpt", "full"
    with monkeypatch.context() as patch:
        patch.setattr(predict.OneD, "last", lambda *args: [])
        size = BATCH * SEQUENCE * GPT.dim * 2
        skipped = Row("all_reduce", "tp", 4, -2, -2 * size, -2 * size * 2 * 3 / 4, "recomputation")
        assert differ(*full).rows == [skipped]
    assert len(differ(*full)) == 0
    with monkeypatch.context() as patch:
        patch.setattr(predict.TwoD, "head", lambda self, n, h, vocab, e:
                      self.entering_linear(n, h, vocab, False, e))
        assert len(differ("2D", "gpt", "none")) > 0
    with monkeypatch.context() as patch:
        right = predict.OneD.norm
        patch.setattr(predict.OneD, "norm", lambda self, n, h, parameters, e, f: right(self, n, h, 1, e, f))
        rows = differ("1D+SP", "gpt", "none").rows
        norms, size = 2 * GPT.num_layers + 1, GPT.dim * 2
        assert [(row.op, row.calls, row.message_bytes) for row in rows] == [("all_reduce", 0, norms * size)]


def test_a_layer_of_gpt3():
    """Two all-reduces forward and two backward, of s b h numbers: Shoeybi et al. 2019, figure 4."""
    model = predict.Transformer(51200, 2048, 12288, num_layers=96, num_heads=96)
    parts = predict.volume(model, predict.OneD(8), 1)
    layers = Table(parts["attention"].calls + parts["mlp"].calls)
    message = 2048 * 12288 * 2
    assert {(row.op, row.phase): (row.calls, row.message_bytes) for row in layers.rows} == {
        ("all_reduce", "forward"): (2 * 96, 2 * 96 * message),
        ("all_reduce", "backward"): (2 * 96, 2 * 96 * message)}


REFUSED = {
    "vocab_size=50 does not split evenly over 4 ranks; make it 52":
        (replace(GPT, vocab_size=50), predict.OneD(4), {}),
    "num_heads=12 does not split evenly over 5 ranks; make it 15": (GPT, predict.OneD(5), {}),
    "hidden=50 does not split evenly over 4 ranks; make it 52":
        (replace(GPT, hidden=50), predict.TwoD(4), {}),
    "batch=9 does not split evenly over 2 ranks; make it 10": (GPT, predict.TwoD(2), {"batch": 9}),
    "batch * sequence=45 does not split evenly over 4 ranks; make it 48":
        (GPT, predict.OneD(4, True), {"batch": 9}),
    "dim=24 does not split evenly over 9 ranks; make it 27": (GPT, predict.ThreeD(3, 1, 3), {"batch": 9}),
    "the outputs of queries, keys and values=40 does not split evenly over 6 ranks; make it 42":
        (replace(LLAMA, tied=True), predict.ThreeD(3, 2, 1), {}),
    "of num_kv_heads=4 and the 3 ranks that heads are split over neither divides":
        (LLAMA, predict.OneD(3), {}),
    "num_kv_heads=2 for 4 ranks, whose rows 2 ranks store: not all hold":
        (MODELS["two key-value heads"], predict.ThreeD(2, 4, 1), {}),
    "sequence=7 is not between 1 and context=6": (GPT, predict.OneD(2), {"sequence": 7}),
    "recompute='some' is not one of 'none', 'selective', 'full'":
        (GPT, predict.OneD(2), {"recompute": "some"}),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_no_formula_says_is_refused(says):
    model, scheme, options = REFUSED[says]
    with pytest.raises(ValueError) as refused:
        predict.volume(model, scheme, **{"batch": BATCH, "sequence": SEQUENCE} | options)
    assert says in str(refused.value)


def test_models_that_there_are_not():
    for options, says in (({"norm": "batch"}, "norm='batch' is not one of"),
                          ({"num_heads": 5}, "dim=24 must be divisible by num_heads=5"),
                          ({"num_kv_heads": 5}, "and that by num_kv_heads=5")):
        with pytest.raises(ValueError, match=says):
            replace(GPT, **options)
