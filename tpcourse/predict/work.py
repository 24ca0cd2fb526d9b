"""What a rank computes: matrix products by their shapes, all other kernels by the bytes they touch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tpcourse.measure import Row
from tpcourse.predict.model import Transformer
from tpcourse.predict.one_d import OneD
from tpcourse.predict.three_d import ThreeD
from tpcourse.predict.two_d import TwoD
from tpcourse.predict.volume import Formulas

# The kinds of kernels in a forward; in backward each has another one, "... backward".
KINDS = ("layer norm", "rms norm", "split layer norm", "split rms norm", "gelu", "swiglu", "residual",
         "residual, dropout", "heads", "rotary", "softmax", "softmax, dropout", "embedding", "loss")
SUM, OPTIMIZER = "sum", "optimizer"  # of two gradients of one parameter; all of an update


@dataclass(frozen=True)
class Product:
    """`count` times [n, k] @ [k, m] on one rank, of `batch` matrices each."""

    n: int
    k: int
    m: int
    count: int = 1
    batch: int = 1

    @property
    def flop(self) -> int:
        """2 n k m operations each."""
        return 2 * self.n * self.k * self.m * self.batch * self.count

    @property
    def to_inputs(self) -> Product:
        """Backward's dX = dY W^T: [n, m] @ [m, k]."""
        return replace(self, k=self.m, m=self.k)

    @property
    def to_weights(self) -> Product:
        """Backward's dW = X^T dY: [k, n] @ [n, m]."""
        return replace(self, n=self.k, k=self.n)


@dataclass(frozen=True)
class Linear:
    """A linear's product in forward, and what it sends; `enters`: the dimension along which tokens come in."""

    product: Product
    rows: tuple[Row, ...]
    enters: str | None


@dataclass(frozen=True)
class Kernel:
    """A kernel of forward that reads and writes so many bytes; that of backward touches twice as many."""

    kind: str
    nbytes: float


@dataclass(frozen=True)
class Work:
    """What a rank computes of a part in forward, `layers` times over.

    `core`: the two products of attention. `summed`: bytes that backward reads and writes to fill a table's
    gradient and to add another one to it.
    """

    linears: tuple[Linear, ...] = ()
    core: tuple[Product, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    layers: int = 1
    summed: float = 0

    @property
    def products(self) -> list[Product]:
        """All matrix products."""
        return [*(linear.product for linear in self.linears), *self.core]


def forward_work(model: Transformer, scheme: Formulas, batch: int, sequence: int, e: int) -> dict[str, Work]:
    """Of each part, a rank's share.

    Each norm, residual with its bias and dropout, activation function and softmax is one kernel, as Megatron-LM
    fuses them (Narayanan et al. 2021, section 4.2).
    """
    n, dim, shares = batch * sequence, model.dim, scheme.shares
    outer, width = e * shares.outer(n, dim), model.width
    norm = Kernel(("split " if shares.outer_features > 1 else "") + f"{model.norm} norm", 2 * outer)
    around = norm, Kernel(_dropped("residual", model), 3 * outer)
    between = Kernel(model.activation, e * (shares.inner(n, model.up) + shares.inner(n, width)))
    loss = Kernel("loss", (e + max(e, 4)) * shares.inner(n, model.vocab_size))
    table = e * shares.storage * shares.weight(dim, model.vocab_size)
    core, kernels = _core(model, scheme, n, sequence, e)

    def linear(k: int, m: int, leaving: bool = False) -> Linear:
        return _linear(scheme, n, k, m, leaving, e)

    return {
        "embedding": Work(kernels=(Kernel("embedding", 2 * outer),), summed=(4 if model.tied else 1) * table),
        "attention": Work((linear(dim, model.qkv(shares.inner_features)), linear(dim, dim, True)), core,
                          (*around, *kernels), model.num_layers),
        "mlp": Work((linear(dim, model.up), linear(width, dim, True)), (), (*around, between), model.num_layers),
        "head": Work((linear(dim, model.vocab_size),), (), (norm, loss))}


def recomputed_work(forward: dict[str, Work], model: Transformer, scheme: Formulas, recompute: str
                    ) -> dict[str, Work]:
    """What backward computes once more, of each part: a block's forward, or attention's core.

    It stops before a last product whose result nothing keeps: the core's with V, and in one dimension a block's
    last linear, unless dropout's mask is behind it. SUMMA's and the cube's linears are run whole.
    """
    if recompute == "full":
        mlp = forward["mlp"]
        if isinstance(scheme, OneD) and not model.dropout:
            mlp = replace(mlp, linears=mlp.linears[:1], kernels=mlp.kernels[:1] + mlp.kernels[2:])
        return {"attention": forward["attention"], "mlp": mlp}
    if recompute == "selective":
        own = forward["attention"]
        kernels = tuple(kernel for kernel in own.kernels if kernel.kind.startswith(("softmax", "rotary")))
        return {"attention": replace(own, linears=(), core=own.core[:1], kernels=kernels)}
    return {}


def _linear(scheme: Formulas, n: int, k: int, m: int, leaving: bool, e: int) -> Linear:
    """From k to m features on n tokens; SUMMA has q products, one for each panel."""
    shares, panels = scheme.shares, scheme.q if isinstance(scheme, TwoD) else 1
    parts = shares.outer_features, shares.inner_features
    over_k, over_m = parts[::-1] if leaving else parts
    rows = (scheme.leaving_linear if leaving else scheme.entering_linear)(n, k, m, False, e)
    enters = None if leaving else scheme.names[0] if isinstance(scheme, TwoD) else scheme.heads
    if isinstance(scheme, ThreeD) and leaving:
        enters = scheme.names[2]
    return Linear(Product(n // (shares.looked_up * panels), k // over_k, m // over_m, panels), tuple(rows), enters)


def _core(model: Transformer, scheme: Formulas, n: int, sequence: int, e: int
          ) -> tuple[tuple[Product, ...], tuple[Kernel, ...]]:
    """Attention between its linears: heads apart, Q K^T, softmax, and its product with V, head by head.

    Queries that share a key are rows of one product.
    """
    shares, dropout = scheme.shares, model.dropout > 0
    keys = max(model.kv_heads, shares.inner_features)  # copies counted
    qkv, served = model.qkv(shares.inner_features), model.num_heads // keys
    scores = Product(served * sequence, model.head_dim, sequence, batch=shares.inner(n // sequence, keys))
    softmax = (4 if dropout else 2) * shares.inner(n, model.num_heads) * sequence
    kernels = [Kernel("heads", 2 * e * shares.inner(n, qkv)), Kernel(_dropped("softmax", model), e * softmax)]
    if model.positions == "rotary":
        kernels.append(Kernel("rotary", 2 * e * shares.inner(n, qkv - keys * model.head_dim)))
    return (scores, replace(scores, k=sequence, m=model.head_dim)), tuple(kernels)


def _dropped(kind: str, model: Transformer) -> str:
    return f"{kind}, dropout" if model.dropout else kind
