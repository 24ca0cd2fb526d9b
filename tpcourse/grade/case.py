"""One call of a learner's code: inputs for each rank, what must come back, and what may be sent."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tpcourse.grade.hub import Message

Mistake = tuple[
    str, list[Tensor]
]  # what it means, and what every rank returns then; with no values: when nothing else fits
Traffic = Callable[[list[Message]], str | None]  # a sentence when the ranks sent what they should not


@dataclass
class Case:
    """A call on ``ranks`` ranks through one of `tpcourse.grade.drivers`.

    inputs and expected: one entry per rank. mistakes: for an output, the wrong values that people arrive at.
    praise: said when it passes. holds: bytes of parameters that a rank may hold. keeps: bytes that forward may
    leave behind for backward, besides its inputs and its result. absolute: how far a number may be off, besides
    1e-9 of itself. slow: said when time or memory runs out. refuses: the error that the call must raise, with
    the numbers ``says`` in its message.
    """

    title: str
    ranks: int
    do: str
    settings: dict
    inputs: list[list[Tensor]]
    expected: list[dict[str, Tensor]]
    mistakes: dict[str, list[Mistake]] = field(default_factory=dict)
    traffic: Traffic = lambda messages: None
    praise: str = ""
    holds: int | None = None
    keeps: int | None = None
    absolute: float = 1e-12
    slow: str = ""
    refuses: str | None = None
    says: tuple[int, ...] = ()


def randn(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def odd(rng: torch.Generator, low: int, high: int) -> int:
    """An odd number between ``low`` and ``high``."""
    return int(torch.randint(low // 2, (high + 1) // 2, (), generator=rng)) * 2 + 1


def bytes_text(count: float) -> str:
    return f"{count:,.0f} bytes" if count < 1 << 20 else f"{count / (1 << 20):.1f} MiB"


def ranks_text(n: int) -> str:
    return "1 rank" if n == 1 else f"{n} ranks"
