"""The bytes that one rank holds in training: parameters, what goes with them, activations."""

from dataclasses import dataclass

from tpcourse.predict.activations import activations
from tpcourse.predict.model import Transformer
from tpcourse.predict.shares import Shares, check
from tpcourse.predict.volume import Formulas


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank: parameters, their gradients, Adam's state, and what forward keeps for backward."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def memory(model: Transformer, scheme: Formulas, batch: int, sequence: int | None = None, *, e: int = 2,
           recompute: str = "none") -> dict[str, Memory]:
    """What one rank holds between forward and backward, for each part of the model, as `volume` cuts it.

    `e` bytes a number. With e = 2 Adam keeps 12 bytes a parameter, in float32: a master copy and two moments;
    else the two moments in e bytes each. Activations are what `saved_activations` counts of a model with
    `core_attention`; what backward computes again, a layer or its core at a time, and copies come on top.

    Raises ValueError for a `recompute` that no block has, and for sizes of which ranks get unequal shares.
    Source: mixed precision: Rajbhandari et al. 2020 (arXiv:1910.02054), section 3.1; activations:
    Korthikanti et al. 2022 (arXiv:2205.05198), section 4.
    """
    sequence = sequence or model.context
    check(model, scheme.shares, batch, sequence, recompute)
    kept = activations(model, scheme.shares, batch, sequence, e, recompute)
    adam = 12 if e == 2 else 2 * e
    return {part: Memory(e * n, e * n, adam * n, kept[part])
            for part, n in parameters(model, scheme.shares).items()}


def parameters(model: Transformer, shares: Shares) -> dict[str, int]:
    """How many parameters one rank stores of each part; a tied head has no weight of its own."""
    dim, width, layers = model.dim, model.width, model.num_layers
    norm = model.norm_parameters * dim // shares.outer_features
    table = shares.weight(dim, model.vocab_size)
    places = model.context * dim // shares.outer_features if model.positions == "learned" else 0
    into, out = shares.inner_features * shares.storage, shares.outer_features * shares.storage
    attention = norm + shares.weight(dim, model.qkv(shares.inner_features)) + shares.weight(dim, dim)
    mlp = norm + shares.weight(dim, model.up) + shares.weight(width, dim)
    if model.bias:
        attention += model.qkv(shares.inner_features) // into + dim // out
        mlp += model.up // into + dim // out
    return {"embedding": table + places, "attention": layers * attention, "mlp": layers * mlp,
            "head": norm + (0 if model.tied else table)}
