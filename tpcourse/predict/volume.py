"""The messages of one step of a transformer, part by part, from the formulas of a scheme."""

from tpcourse.measure import Row, Table
from tpcourse.predict.messages import again, times
from tpcourse.predict.model import Transformer
from tpcourse.predict.one_d import OneD
from tpcourse.predict.three_d import ThreeD
from tpcourse.predict.two_d import TwoD

Formulas = OneD | TwoD | ThreeD


def volume(model: Transformer, scheme: Formulas, batch: int, sequence: int | None = None, *, e: int = 2,
           recompute: str = "none") -> dict[str, Table]:
    """What one rank sends in one step, forward, backward and recomputed: a table for each part of the model.

    `batch` sequences of `sequence` tokens (the model's context), the same for all ranks; numbers of `e` bytes.
    The parts are embedding, attention, mlp (of all layers, each with its norm) and head (its norm, the logits
    and the loss). The tables are of the ledger's shape: what a ledger measured, minus these, is empty.
    """
    n, f = batch * (sequence or model.context), max(e, 4)
    embedding = scheme.embedding(n, model.vocab_size, model.dim, e)
    if model.positions == "learned":
        embedding += scheme.position_embedding(n, model.context, model.dim, e)
    attention, mlp = attention_rows(model, scheme, n, e), mlp_rows(model, scheme, n, e)
    if recompute == "full":
        attention += again(attention)
        repeated, last = Table(again(mlp)), Table(again(scheme.last(n, model.dim, e)))
        # Recomputation stops before the last message, whose result nothing keeps; but dropout's mask is behind it.
        mlp += repeated.rows if model.dropout else (repeated - last).rows
    head = scheme.norm(n, model.dim, model.norm_parameters, e, f) + _head(model, scheme, n, e) + scheme.loss(n, f)
    parts = {"embedding": embedding, "attention": times(attention, model.num_layers),
             "mlp": times(mlp, model.num_layers), "head": head}
    return {name: Table(rows) for name, rows in parts.items()}


def attention_rows(model: Transformer, scheme: Formulas, n: int, e: int) -> list[Row]:
    """One layer's norm, queries, keys and values, and output projection; the core sends nothing."""
    qkv = (model.num_heads + 2 * model.kv_heads) * model.head_dim
    return (scheme.norm(n, model.dim, model.norm_parameters, e, max(e, 4))
            + scheme.entering_linear(n, model.dim, qkv, model.bias, e)
            + scheme.kv_copies(model.kv_heads, model.head_dim, model.dim, model.bias, e)
            + scheme.leaving_linear(n, model.dim, model.dim, model.bias, e))


def mlp_rows(model: Transformer, scheme: Formulas, n: int, e: int) -> list[Row]:
    """One layer's norm and two linears."""
    return (scheme.norm(n, model.dim, model.norm_parameters, e, max(e, 4))
            + scheme.entering_linear(n, model.dim, model.up, model.bias, e)
            + scheme.leaving_linear(n, model.width, model.dim, model.bias, e))


def _head(model: Transformer, scheme: Formulas, n: int, e: int) -> list[Row]:
    if isinstance(scheme, TwoD):
        return scheme.head(n, model.dim, model.vocab_size, e)
    return scheme.entering_linear(n, model.dim, model.vocab_size, False, e)
