"""Seconds of a step from what is computed and sent: no overlap, every kernel at a fixed share of its best."""

from dataclasses import dataclass

from tpcourse.measure import Row
from tpcourse.predict import cluster as cluster_module
from tpcourse.predict.cluster import Cluster
from tpcourse.predict.model import Transformer
from tpcourse.predict.shares import Shares, check
from tpcourse.predict.volume import Formulas, volume
from tpcourse.predict.work import forward_work

@dataclass(frozen=True)
class Time:
    """Seconds on one rank, in matrix products, in everything else that is computed, and in messages."""

    matmul: float
    elementwise: float
    messages: float

    @property
    def total(self) -> float:
        """One after the other."""
        return self.matmul + self.elementwise + self.messages


def step_time(model: Transformer, scheme: Formulas, cluster: Cluster, batch: int, sequence: int | None = None,
              *, e: int = 2, recompute: str = "none") -> dict[str, Time]:
    """Forward, backward and recomputation of `batch` sequences, for each part of the model, as in `volume`.

    Backward computes twice what forward does. Ranks fill the nodes in order, the mesh's last dimension first.
    The optimizer's step is not in it.

    Raises ValueError as `volume` does.
    """
    sequence = sequence or model.context
    check(model, scheme.shares, batch, sequence, recompute)
    work = forward_work(model, scheme.shares, batch, sequence, e)
    again = recomputed_work(model, scheme.shares, batch, sequence, e, recompute)
    sent = volume(model, scheme, batch, sequence, e=e, recompute=recompute)
    times = {}
    for part, (flop, moved) in work.items():
        more_flop, more_moved = again.get(part, (0, 0))
        times[part] = Time((3 * flop + more_flop) / (cluster_module.MATMUL * cluster.gpu.matmul),
                           cluster.kernel("elementwise", 3 * moved + more_moved),
                           sum(cluster.message(row, ranks_in_node(row, scheme, cluster))
                               for row in sent[part].rows))
    return times


def recomputed_work(model: Transformer, shares: Shares, batch: int, sequence: int, e: int,
                    recompute: str) -> dict[str, tuple[float, float]]:
    """What backward computes once more, of each part: flop, bytes."""
    work = forward_work(model, shares, batch, sequence, e)
    if recompute == "full":
        return {part: work[part] for part in ("attention", "mlp")}
    if recompute == "selective":
        scores = model.num_layers * shares.inner(batch * sequence, model.num_heads) * sequence
        return {"attention": (4 * scores * model.head_dim, e * (4 if model.dropout else 2) * scores)}
    return {}


def ranks_in_node(row: Row, scheme: Formulas, cluster: Cluster) -> int:
    """How many of a group's ranks lie in one node: nodes take the mesh's fastest dimensions first."""
    dim = scheme.heads if row.dim == "kv_copies" else row.dim  # these are consecutive ranks of that dimension
    stride, here = 1, 1
    for name, size in reversed(scheme.mesh.items()):
        if dim == "world" or f"_{name}_" in f"_{dim}_":
            here *= min(size, max(1, cluster.node // stride))
        stride *= size
    return min(here, row.group_size)
