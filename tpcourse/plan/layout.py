"""A plan: which part of a model is cut how, over which ranks; as data, on disk and in words."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from tpcourse.models.block import RECOMPUTE
from tpcourse.predict import OneD, ThreeD, Transformer, TwoD
from tpcourse.predict.volume import Formulas

SCHEMES = {scheme.__name__: scheme for scheme in (OneD, TwoD, ThreeD)}


@dataclass(frozen=True)
class LayerPlan:
    """One layer: the schemes of its attention and its MLP, each with its norm, and what is recomputed."""

    attention: Formulas
    mlp: Formulas
    recompute: str = "none"


@dataclass(frozen=True)
class Plan:
    """Everything that a training step needs to know about who holds and sends what.

    `replicas` pipelines of `stages`, each stage on `ranks` ranks that share every part in it. A replica takes
    its share of the `global_batch` sequences in micro-batches of `micro_batch`. A stage has as many layers as
    every other; the first one has the embedding too, the last one the head. Between stages activations are laid
    out as the embedding leaves them.

    Raises ValueError if batch or layers do not split, if the schemes are on different numbers of ranks, and
    for a tied head on another scheme than the embedding.
    """

    model: Transformer
    global_batch: int
    micro_batch: int
    replicas: int
    stages: int
    embedding: Formulas
    layers: tuple[LayerPlan, ...]
    head: Formulas

    def __post_init__(self) -> None:
        for field in ("global_batch", "micro_batch", "replicas", "stages"):
            if not isinstance(getattr(self, field), int) or getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)!r} must be a whole number, at least 1")
        wrong = {layer.recompute for layer in self.layers} - set(RECOMPUTE)
        if wrong:
            raise ValueError(f"recompute={wrong.pop()!r} is not one of {', '.join(RECOMPUTE)}")
        if self.global_batch % (self.replicas * self.micro_batch):
            raise ValueError(f"global_batch={self.global_batch} does not split over {self.replicas} replicas "
                             f"into micro-batches of {self.micro_batch}; make it a multiple of "
                             f"{self.replicas * self.micro_batch}")
        if len(self.layers) != self.model.num_layers or self.model.num_layers % self.stages:
            raise ValueError(f"{len(self.layers)} layers of {self.model.num_layers} do not split into "
                             f"{self.stages} stages; plan each layer, and take stages that divide them")
        ranks = {math.prod(scheme.mesh.values()) for scheme in self.schemes}
        if len(ranks) > 1:
            raise ValueError(f"the parts are on {sorted(ranks)} ranks; every part of a stage is on all of them")
        if self.model.tied and self.head != self.embedding:
            raise ValueError(f"a tied head has the embedding's weight, and they are cut as {name(self.head)} and "
                             f"{name(self.embedding)}; take one scheme for both, or an untied model")

    @property
    def schemes(self) -> list[Formulas]:
        """Of all parts, in order."""
        layers = [scheme for layer in self.layers for scheme in (layer.attention, layer.mlp)]
        return [self.embedding, *layers, self.head]

    @property
    def ranks(self) -> int:
        """The ranks of a stage: its tensor-parallel degree."""
        return math.prod(self.embedding.mesh.values())

    @property
    def micro_batches(self) -> int:
        """How many a replica takes in a step."""
        return self.global_batch // (self.replicas * self.micro_batch)

    def stage(self, number: int) -> tuple[LayerPlan, ...]:
        """The layers of a stage, counted from 0."""
        size = len(self.layers) // self.stages
        return self.layers[number * size:(number + 1) * size]

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, for `load`."""
        data = asdict(self) | {"embedding": _pack(self.embedding), "head": _pack(self.head), "layers": [
            {"attention": _pack(l.attention), "mlp": _pack(l.mlp), "recompute": l.recompute} for l in self.layers]}
        Path(path).write_text(json.dumps(data, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """What `save` wrote. Raises ValueError if the file is no plan."""
        try:
            data = json.loads(Path(path).read_text())
            layers = tuple(LayerPlan(_unpack(layer["attention"]), _unpack(layer["mlp"]), layer["recompute"])
                           for layer in data["layers"])
            return cls(**data | {"model": Transformer(**data["model"]), "layers": layers, "head": _unpack(
                data["head"]), "embedding": _unpack(data["embedding"])})
        except (OSError, KeyError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
            raise ValueError(f"{path} is no plan ({type(error).__name__}: {error}); write one with "
                             "Plan.save") from None

    def __str__(self) -> str:
        lines = [f"replicas x stages x ranks = {self.replicas} x {self.stages} x {self.ranks}, "
                 f"{self.micro_batches} micro-batches of {self.micro_batch} a replica",
                 f"embedding       {name(self.embedding)}"]
        for (first, last), layer in groups(self.layers):
            which = f"layer {first}" if first == last else f"layers {first}-{last}"
            lines.append(f"{which:<15} attention {name(layer.attention)}, MLP {name(layer.mlp)}, "
                         f"recomputed: {layer.recompute}")
        return "\n".join([*lines, f"head            {name(self.head)}"])


def groups(layers: Iterable[LayerPlan]) -> list[tuple[tuple[int, int], LayerPlan]]:
    """Consecutive layers of one kind: the first and the last of each group, and what they are."""
    found = []
    for layer, members in groupby(enumerate(layers), lambda item: item[1]):
        numbers = [number for number, _ in members]
        found.append(((numbers[0], numbers[-1]), layer))
    return found


def name(scheme: Formulas) -> str:
    """A scheme in a few letters, with its mesh."""
    if isinstance(scheme, OneD):
        return f"1D{'+SP' if scheme.sequence_parallel else ''} {scheme.size}"
    if isinstance(scheme, TwoD):
        return f"2D {scheme.q}x{scheme.q}" if scheme.d == 1 else f"2.5D {scheme.q}x{scheme.q}x{scheme.d}"
    options = ["" if scheme.scatter else "all-reduce", "" if scheme.keep_gathered else "again"]
    return " ".join([f"3D {scheme.i}x{scheme.j}x{scheme.l}", *filter(None, options)])


def _pack(scheme: Formulas) -> dict:
    return {"scheme": type(scheme).__name__, **asdict(scheme)}


def _unpack(data: dict) -> Formulas:
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return SCHEMES[options.pop("scheme")](**options)
