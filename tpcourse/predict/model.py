"""A transformer as numbers, from which formulas start and the real model can be built."""

from dataclasses import asdict, dataclass

from tpcourse.models import GPT
from tpcourse.schemes import Scheme


@dataclass(frozen=True)
class Transformer:
    """The sizes of a `GPT`; names and defaults are the model's own.

    Raises ValueError for names that the model does not know, and for heads that do not divide.
    """

    vocab_size: int
    context: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    hidden: int | None = None
    activation: str = "gelu"
    norm: str = "layer"
    positions: str = "learned"
    tied: bool = True
    bias: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name, known in (("activation", ("gelu", "swiglu")), ("norm", ("layer", "rms")),
                            ("positions", ("learned", "rotary"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {known}")
        if self.dim % self.num_heads or self.num_heads % self.kv_heads:
            raise ValueError(f"dim={self.dim} must be divisible by num_heads={self.num_heads}, and that by "
                             f"num_kv_heads={self.kv_heads}")

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Key-value heads: as many as query heads unless said otherwise."""
        return self.num_kv_heads or self.num_heads

    def qkv(self, ranks: int) -> int:
        """Outputs of queries, keys and values: of fewer KV heads than `ranks` each rank has a copy of one."""
        return (self.num_heads + 2 * max(self.kv_heads, ranks)) * self.head_dim

    @property
    def width(self) -> int:
        """Hidden units of the MLP: 4 dim unless said otherwise."""
        return self.hidden or 4 * self.dim

    @property
    def up(self) -> int:
        """Outputs of the MLP's entering linear: with a gate, twice the hidden units."""
        return self.width * (2 if self.activation == "swiglu" else 1)

    @property
    def norm_parameters(self) -> int:
        """Numbers a feature that a norm learns: weight and bias, or weight alone."""
        return 2 if self.norm == "layer" else 1

    def build(self, scheme: Scheme, recompute: str = "none") -> GPT:
        """The model itself, on a scheme."""
        return GPT(scheme, **asdict(self), recompute=recompute)
