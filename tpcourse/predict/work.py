"""What a rank computes: operations of matrix products, bytes through memory for all else."""

from tpcourse.predict.model import Transformer
from tpcourse.predict.shares import Shares

Parts = dict[str, tuple[float, float]]  # of each part of the model: flop, bytes


def forward_work(model: Transformer, shares: Shares, batch: int, sequence: int, e: int) -> Parts:
    """Of one forward: 2 n k m operations a product of [n, k] and [k, m], a rank's share of them.

    Bytes are what elementwise kernels read and write, where each norm, residual with its dropout, activation
    function and softmax is one kernel, as Megatron-LM fuses them (Narayanan et al. 2021, section 4.2).
    """
    n, dim = batch * sequence, model.dim
    outer, scores = shares.outer(n, dim), shares.inner(n, model.num_heads) * sequence
    qkv, around = shares.inner(n, model.qkv(shares.inner_features)), 2 * outer + 3 * outer  # norm; residual
    core = 4 * scores * model.head_dim  # Q K^T and its product with V
    attention = linear(shares, n, dim, model.qkv(shares.inner_features) + dim) + core
    mlp = linear(shares, n, dim, model.up + model.width)
    return {
        "embedding": (0, e * 2 * outer),
        "attention": (model.num_layers * attention, model.num_layers * e * (
            around + 2 * qkv + (4 if model.dropout else 2) * scores)),  # heads apart; softmax and dropout
        "mlp": (model.num_layers * mlp, model.num_layers * e * (
            around + shares.inner(n, model.up) + shares.inner(n, model.width))),
        "head": (linear(shares, n, dim, model.vocab_size),
                 e * 2 * outer + (e + max(e, 4)) * shares.inner(n, model.vocab_size)),
    }


def linear(shares: Shares, n: int, k: int, m: int) -> float:
    """A rank's share of 2 n k m operations; `looked_up` are the ranks over which tokens alone are split."""
    return 2 * n * k * m / (shares.outer_features * shares.inner_features * shares.looked_up)
