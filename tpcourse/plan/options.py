"""What there is to choose from: degrees, and for each part the schemes that its ranks allow."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from tpcourse.predict import OneD, ThreeD, Transformer, TwoD
from tpcourse.predict.shares import check
from tpcourse.predict.volume import Formulas


@dataclass(frozen=True)
class Degrees:
    """Data-, pipeline- and tensor-parallel degrees, and how many sequences a replica takes at a time."""

    replicas: int
    stages: int
    ranks: int
    micro_batch: int

    def __str__(self) -> str:
        return (f"{self.replicas} replicas x {self.stages} stages x {self.ranks} ranks, micro-batches of "
                f"{self.micro_batch}")

    def micro_batches(self, global_batch: int) -> int:
        """How many of them a replica takes in a step."""
        return global_batch // (self.replicas * self.micro_batch)


def divisors(n: int) -> list[int]:
    """All of them, in order."""
    return [d for d in range(1, n + 1) if n % d == 0]


def all_degrees(model: Transformer, gpus: int, global_batch: int) -> list[Degrees]:
    """Every way to use all GPUs in which layers and batch split evenly."""
    found = []
    for stages, ranks in product(divisors(model.num_layers), divisors(gpus)):
        replicas, rest = divmod(gpus, stages * ranks)
        if rest == 0 and replicas and global_batch % replicas == 0:
            found += [Degrees(replicas, stages, ranks, size) for size in divisors(global_batch // replicas)]
    return found


def all_schemes(ranks: int) -> Iterator[Formulas]:
    """Every scheme of this package on so many ranks, each once: 1 x P x 1 is 1D, and stands there."""
    yield OneD(ranks)
    if ranks == 1:
        return
    yield OneD(ranks, sequence_parallel=True)
    for q in range(2, ranks + 1):
        if ranks % q**2 == 0:
            yield TwoD(q, ranks // q**2)
    for i, j in product(divisors(ranks), repeat=2):
        if ranks % (i * j) == 0 and j < ranks:
            for leave, keep in product(("reduce_scatter", "all_reduce"), (True, False)):
                yield ThreeD(i, j, ranks // (i * j), leave, keep)


@cache
def schemes_for(model: Transformer, ranks: int, micro_batch: int) -> list[Formulas]:
    """Those over which the model's sizes and a micro-batch of whole sequences split evenly."""
    return [scheme for scheme in all_schemes(ranks) if why_not(model, scheme, micro_batch) is None]


def why_not(model: Transformer, scheme: Formulas, micro_batch: int) -> str | None:
    """What does not split over this scheme's ranks; None if all does."""
    try:
        check(model, scheme.shares, micro_batch, model.context, "none")
        if scheme.shares.storage > 1 and scheme.shares.inner_features > model.kv_heads:
            return f"{model.kv_heads} KV heads for {scheme.shares.inner_features} ranks whose rows others store"
    except ValueError as error:
        return str(error)
    return None
