"""Which share of everything a rank holds: over how many ranks a scheme splits it."""

from dataclasses import dataclass

from tpcourse.models.block import RECOMPUTE
from tpcourse.predict.model import Transformer


@dataclass(frozen=True)
class Shares:
    """Numbers of ranks. Activations [tokens, features] are split in two ways, outer and inner: see `Scheme`.

    A weight is split over outer and inner features, and once more over `storage`; an entering linear's bias
    over inner features and storage, a leaving one's over outer features and storage. `looked_up`: the ranks
    over which the embedding splits the ids that it looks up. `keeps_gathered`: linears keep, for backward,
    tokens split over `storage` alone, and the weight gathered from there.
    """

    outer_tokens: int
    outer_features: int
    inner_tokens: int
    inner_features: int
    looked_up: int = 1
    storage: int = 1
    keeps_gathered: bool = False

    def outer(self, n: int, features: int) -> int:
        """Numbers that a rank holds of an outer activation."""
        return n // self.outer_tokens * (features // self.outer_features)

    def inner(self, n: int, features: int) -> int:
        """Numbers that a rank holds of an inner activation."""
        return n // self.inner_tokens * (features // self.inner_features)

    def weight(self, k: int, m: int) -> int:
        """Numbers that a rank stores of a weight."""
        return k * m // (self.outer_features * self.inner_features * self.storage)

    def gathered_weight(self, k: int, m: int) -> int:
        """Numbers of the copy of a weight that a linear keeps; none where it keeps the parameter itself."""
        return self.storage * self.weight(k, m) if self.keeps_gathered and self.storage > 1 else 0

    def entering(self, n: int, k: int, m: int) -> int:
        """Numbers that an entering linear with k inputs and m outputs keeps for backward."""
        tokens = self.storage if self.keeps_gathered else self.outer_tokens
        return n // tokens * (k // self.outer_features) + self.gathered_weight(k, m)

    def leaving(self, n: int, k: int, m: int) -> int:
        """The same of a leaving linear."""
        tokens = self.storage if self.keeps_gathered else self.inner_tokens
        return n // tokens * (k // self.inner_features) + self.gathered_weight(k, m)


def check(model: Transformer, shares: Shares, batch: int, sequence: int, recompute: str) -> None:
    """Raises ValueError if a size does not split evenly, for then no formula holds on all ranks.

    Also for a `recompute` of another name, and a sequence that the model does not take.
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute!r} is not one of {', '.join(map(repr, RECOMPUTE))}")
    if not 0 < sequence <= model.context:
        raise ValueError(f"sequence={sequence} is not between 1 and context={model.context}")
    outer, inner, storage = shares.outer_features, shares.inner_features, shares.storage
    _check_split("num_heads", model.num_heads, inner)
    few, many = sorted((model.kv_heads, inner))
    if many % few:
        raise ValueError(f"of num_kv_heads={model.kv_heads} and the {inner} ranks that heads are split over "
                         "neither divides the other; take another number of either")
    _check_split("batch", batch, shares.inner_tokens)
    _check_split("batch * sequence", batch * sequence, shares.outer_tokens)
    _check_split("dim", model.dim, outer * storage)
    _check_split("hidden", model.width, inner)
    _check_split("vocab_size", model.vocab_size, inner * storage)
    _check_split("the outputs of queries, keys and values", model.qkv(inner), inner * storage)
    _check_split("the outputs of the MLP's first linear", model.up, inner * storage)


def _check_split(name: str, size: int, ranks: int) -> None:
    if size < 1 or size % ranks:
        raise ValueError(f"{name}={size} does not split evenly over {ranks} ranks; make it "
                         f"{max(size + -size % ranks, ranks)} or use other ranks")
