"""The messages of one step of a transformer, part by part, from the formulas of a scheme."""

from tpcourse.measure import Row, Table
from tpcourse.predict.messages import Axis, again, message, times
from tpcourse.predict.model import Transformer
from tpcourse.predict.one_d import OneD
from tpcourse.predict.shares import check
from tpcourse.predict.three_d import ThreeD
from tpcourse.predict.two_d import TwoD

Formulas = OneD | TwoD | ThreeD


def volume(model: Transformer, scheme: Formulas, batch: int, sequence: int | None = None, *, e: int = 2,
           recompute: str = "none") -> dict[str, Table]:
    """What one rank sends in one step, forward, backward and recomputed: a table for each part of the model.

    `batch` sequences of `sequence` tokens (the model's context), over all ranks; numbers of `e` bytes.
    The parts are embedding, attention, mlp (of all layers, each with its norm) and head (its norm, the logits
    and the loss). The tables are of the ledger's shape: what a ledger measured, minus these, is empty.

    Raises ValueError for a `recompute` that no block has, and for sizes of which ranks get unequal shares.
    """
    sequence = sequence or model.context
    check(model, scheme.shares, batch, sequence, recompute)
    n, f = batch * sequence, max(e, 4)
    embedding = scheme.embedding(n, model.vocab_size, model.dim, e)
    if model.positions == "learned":
        embedding += scheme.position_embedding(n, model.context, model.dim, e)
    attention, mlp = attention_rows(model, scheme, n, e), mlp_rows(model, scheme, n, e)
    if recompute == "full":
        attention += again(attention)
        repeated, last = Table(again(mlp)), Table(again(scheme.last(n, model.dim, e)))
        # It stops before the last message, whose result nothing keeps; but dropout's mask is behind it.
        mlp += repeated.rows if model.dropout else (repeated - last).rows
    head = scheme.norm(n, model.dim, model.norm_parameters, e, f) + _head(model, scheme, n, e)
    parts = {"embedding": embedding, "attention": times(attention, model.num_layers),
             "mlp": times(mlp, model.num_layers), "head": head + scheme.loss(n, f)}
    return {name: Table(rows) for name, rows in parts.items()}


def attention_rows(model: Transformer, scheme: Formulas, n: int, e: int) -> list[Row]:
    """One layer's norm, queries, keys and values, and output projection; the core sends nothing."""
    return (scheme.norm(n, model.dim, model.norm_parameters, e, max(e, 4))
            + scheme.entering_linear(n, model.dim, model.qkv(scheme.shares.inner_features), model.bias, e)
            + kv_copies(model, scheme, e)
            + scheme.leaving_linear(n, model.dim, model.dim, model.bias, e))


def kv_copies(model: Transformer, scheme: Formulas, e: int) -> list[Row]:
    """Where a KV head is on several ranks, the gradients of its key and value rows are summed over them."""
    shares = scheme.shares
    copies = Axis("kv_copies", max(1, shares.inner_features // model.kv_heads))
    if copies.size > 1 and shares.storage > 1:
        raise ValueError(f"num_kv_heads={model.kv_heads} for {shares.inner_features} ranks, whose rows "
                         f"{shares.storage} ranks store: not all hold rows of keys and values, so they send "
                         f"unequally; take at least {shares.inner_features} KV heads")
    rows = 2 * model.head_dim
    return (message("all_reduce", copies, rows * model.dim // shares.outer_features * e, "backward")
            + message("all_reduce", copies, rows * model.bias * e, "backward"))


def mlp_rows(model: Transformer, scheme: Formulas, n: int, e: int) -> list[Row]:
    """One layer's norm and two linears."""
    return (scheme.norm(n, model.dim, model.norm_parameters, e, max(e, 4))
            + scheme.entering_linear(n, model.dim, model.up, model.bias, e)
            + scheme.leaving_linear(n, model.width, model.dim, model.bias, e))


def _head(model: Transformer, scheme: Formulas, n: int, e: int) -> list[Row]:
    if isinstance(scheme, TwoD):
        return scheme.head(n, model.dim, model.vocab_size, e)
    return scheme.entering_linear(n, model.dim, model.vocab_size, False, e)
