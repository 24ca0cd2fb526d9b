"""What forward keeps for backward, tensor by tensor, in bytes on one rank.

n tokens; e bytes a number, f where it is computed in float32 at least, 1 a mask's entry, 8 an id. Each tensor
is one of Korthikanti et al. 2022 (arXiv:2205.05198), section 4, or as small as one number a token.
"""

from tpcourse.predict.model import Transformer
from tpcourse.predict.shares import Shares

ID = 8


def activations(model: Transformer, shares: Shares, batch: int, sequence: int, e: int,
                recompute: str) -> dict[str, int]:
    """Bytes of each part; of a block that is recomputed its input alone, which counts as attention's."""
    n = batch * sequence
    if recompute == "full":
        attention, mlp = e * shares.outer(n, model.dim), 0
    else:
        attention = attention_bytes(model, shares, n, sequence, e, recompute == "selective")
        mlp = mlp_bytes(model, shares, n, e)
    return {"embedding": embedding_bytes(model, shares, n), "attention": model.num_layers * attention,
            "mlp": model.num_layers * mlp, "head": head_bytes(model, shares, n, e)}


def embedding_bytes(model: Transformer, shares: Shares, n: int) -> int:
    """Where each id lies and whether elsewhere; each place; dropout's mask."""
    places = ID * n // shares.outer_tokens if model.positions == "learned" else 0
    return (ID + 1) * n // shares.looked_up + places + _outer_mask(model, shares, n)


def norm_bytes(model: Transformer, shares: Shares, n: int, e: int) -> int:
    """Its input; for each token the reciprocal deviation and, if it centres, the mean."""
    statistics = model.norm_parameters * n // shares.outer_tokens  # as many a token as parameters a feature
    return e * shares.outer(n, model.dim) + max(e, 4) * statistics


def attention_bytes(model: Transformer, shares: Shares, n: int, sequence: int, e: int,
                    selective: bool) -> int:
    """One layer's norm, entering linear, core, leaving linear and dropout."""
    qkv = model.qkv(shares.inner_features)
    linears = shares.entering(n, model.dim, qkv) + shares.leaving(n, model.dim, model.dim)
    core = e * shares.inner(n, qkv)  # Q, K and V: all of the core's inputs
    if not selective:
        core += _scores_bytes(model, shares, n, sequence, e) + _rotary_bytes(model, sequence, e)
    return norm_bytes(model, shares, n, e) + e * linears + core + _outer_mask(model, shares, n)


def _scores_bytes(model: Transformer, shares: Shares, n: int, sequence: int, e: int) -> int:
    """The softmax; with dropout its mask and its result too."""
    return (2 * e + 1 if model.dropout else e) * shares.inner(n, model.num_heads) * sequence


def _rotary_bytes(model: Transformer, sequence: int, e: int) -> int:
    """A cosine and a sine for each place and pair of features, of queries and of keys."""
    return 2 * sequence * model.head_dim * max(e, 4) if model.positions == "rotary" else 0


def mlp_bytes(model: Transformer, shares: Shares, n: int, e: int) -> int:
    """One layer's norm, entering linear, activation function's input, leaving linear and dropout."""
    linears = shares.entering(n, model.dim, model.up) + shares.leaving(n, model.width, model.dim)
    between = shares.inner(n, model.up)
    if model.activation == "swiglu":
        between += shares.inner(n, model.width)  # silu of the gate, a factor of the product
    return norm_bytes(model, shares, n, e) + e * (linears + between) + _outer_mask(model, shares, n)


def head_bytes(model: Transformer, shares: Shares, n: int, e: int) -> int:
    """The last norm, the head, the loss: exp(logits), two sums a token, where its target lies, and masks."""
    tokens, f = n // shares.inner_tokens, max(e, 4)
    loss = f * shares.inner(n, model.vocab_size) + tokens * (2 * f + ID + 1 + 1) + ID  # ID: how many count
    return norm_bytes(model, shares, n, e) + e * shares.entering(n, model.dim, model.vocab_size) + loss


def _outer_mask(model: Transformer, shares: Shares, n: int) -> int:
    return shares.outer(n, model.dim) if model.dropout else 0
