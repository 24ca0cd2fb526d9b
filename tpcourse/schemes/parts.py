"""A scheme for each part of a model: embedding, every layer's attention and MLP, head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from tpcourse.comm import Group, JointStates, RandomStates, group_of
from tpcourse.schemes.base import Scheme


@dataclass(frozen=True)
class Layer:
    """One layer: the schemes of its attention and of its MLP, each with its norm, and what is recomputed."""

    attention: Scheme
    mlp: Scheme
    recompute: str = "none"


@dataclass(frozen=True)
class Parts:
    """The schemes of a model's parts: the embedding, with its positions; each layer; the head, with the loss.

    Between parts of different outer layouts the residual stream is redistributed. All schemes are on the same
    ranks. Parts that are cut alike should have one scheme, not equal ones: each has streams of random numbers
    and process groups of its own.

    Raises ValueError if the schemes are not all on the same ranks.
    """

    embedding: Scheme
    layers: tuple[Layer, ...]
    head: Scheme

    def __post_init__(self) -> None:
        ranks = {str(_ranks(scheme)) for scheme in self.schemes}
        if len(ranks) > 1:
            raise ValueError(f"the schemes of one model are on the ranks {' and '.join(sorted(ranks))}; make "
                             "their meshes of the same ranks")

    @classmethod
    def alike(cls, scheme: Scheme, num_layers: int, recompute: str = "none") -> Parts:
        """One scheme for all parts."""
        return cls(scheme, num_layers * (Layer(scheme, scheme, recompute),), scheme)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """Each scheme once, in the order of its first part."""
        layers = [scheme for layer in self.layers for scheme in (layer.attention, layer.mlp)]
        return tuple({id(scheme): scheme for scheme in (self.embedding, *layers, self.head)}.values())

    @property
    def group(self) -> Group | None:
        """All ranks that hold a part of the model; None: one process."""
        return self.embedding.group

    @property
    def random(self) -> RandomStates | JointStates:
        """Where dropout draws from."""
        return joint([scheme.random for scheme in self.schemes])

    @property
    def batch_ranks(self) -> int:
        """What must divide the batch."""
        return math.lcm(*(scheme.batch_ranks for scheme in self.schemes))

    def loss(self, logits: Tensor, target: Tensor, vocab_size: int) -> Tensor:
        """The head's."""
        return self.head.loss(logits, target, vocab_size)

    def gather_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        """The head's."""
        return self.head.gather_logits(logits, vocab_size)


def joint(states: list[RandomStates]) -> RandomStates | JointStates:
    """Streams to be saved and restored together; several times the same ones count once."""
    states = list({id(random): random for random in states}.values())
    return states[0] if len(states) == 1 else JointStates(states)


def _ranks(scheme: Scheme) -> list[int] | None:
    return None if scheme.group is None else dist.get_process_group_ranks(group_of(scheme.group))
