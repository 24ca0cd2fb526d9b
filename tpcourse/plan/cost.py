"""What a plan costs: seconds of a step, bytes that a rank sends and holds, stage by stage and part by part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from tpcourse.comm.placement import Placement
from tpcourse.measure import Row, Table
from tpcourse.plan.layout import Plan
from tpcourse.predict.memory import Memory, memory
from tpcourse.predict.messages import Axis, again, message, times
from tpcourse.predict.model import Transformer
from tpcourse.predict.moves import moved
from tpcourse.predict.time import step_time
from tpcourse.predict.training import ADAM_BYTES
from tpcourse.predict.volume import Formulas, volume

if TYPE_CHECKING:
    from tpcourse.predict.machine import Machine


@dataclass(frozen=True)
class Piece:
    """One part of the model on one rank: seconds and messages of a micro-batch, and the bytes it holds.

    `seconds` by kind, which add up; of memory the activations are those of one micro-batch.
    """

    seconds: dict[str, float]
    sent: Table
    held: Memory

    @property
    def total(self) -> float:
        """All seconds."""
        return sum(self.seconds.values())

    @property
    def state(self) -> int:
        """Bytes of parameters, gradients and optimizer."""
        return self.held.total - self.held.activations


class Prices:
    """What parts, moves and updates cost for one model on one machine, each worked out once.

    Numbers have `e` bytes. `apart`: in a pipeline of several stages a tied head has a copy of the table; the
    first and the last stage then both hold it.
    """

    def __init__(self, model: Transformer, machine: Machine, e: int) -> None:
        self.model, self.machine, self.e = model, machine, e
        self._known: dict[tuple, dict[str, Piece]] = {}

    def part(self, name: str, scheme: Formulas, micro_batch: int, recompute: str = "none",
             apart: bool = False) -> Piece:
        """The embedding, one layer's attention or mlp, or the head.

        Raises ValueError if its sizes do not split over the scheme's ranks.
        """
        key = scheme, micro_batch, recompute
        if key not in self._known:
            self._known[key] = self._priced(scheme, micro_batch, recompute)
        return self._known[key]["head apart" if apart and name == "head" else name]

    def _priced(self, scheme: Formulas, micro_batch: int, recompute: str) -> dict[str, Piece]:
        one, options = replace(self.model, num_layers=1), {"e": self.e, "recompute": recompute}
        sent = volume(one, scheme, micro_batch, **options)
        held = memory(one, scheme, micro_batch, **options)
        spent = step_time(one, scheme, self.machine, micro_batch, sent=sent, **options)
        pieces = {part: Piece(_seconds(spent[part]), sent[part], held[part]) for part in sent}
        copy = memory(replace(one, tied=False), scheme, micro_batch, **options)["head"]
        return pieces | {"head apart": replace(pieces["head"], held=copy)}

    def move(self, source: Placement, target: Placement, micro_batch: int, repeated: bool = False) -> Piece:
        """The residual stream from one layout to another, and its gradient back; `repeated`: recomputed."""
        n = micro_batch * self.model.context
        rows = moved(source, target, n, self.model.dim, self.e)
        rows += again(rows) if repeated else []
        seconds = sum(self._message(row, min(row.group_size, self.machine.node)) for row in rows)
        return Piece({"layout changes": seconds}, Table(rows), Memory(0, 0, 0, 0))

    def boundary(self, home: Placement, plan_size: tuple[int, int], micro_batch: int, sends: int) -> Piece:
        """One rank's block of a micro-batch to the next stage, or its gradient to the one before.

        `plan_size`: ranks of a stage times replicas, and stages. `sends`: 1 for the ends of a pipeline, else 2.
        """
        around, stages = plan_size
        tokens, features = home.parts
        size = micro_batch * self.model.context // tokens * (self.model.dim // features) * self.e
        rows = times(message("send", Axis("stages", min(2, stages)), size, "forward"), sends)
        here = 2 if around * stages <= self.machine.node else 1  # the slowest boundary counts
        return Piece({"stages": sum(self._message(row, here) for row in rows)}, Table(rows), Memory(0, 0, 0, 0))

    def update(self, state: int, ranks: int, replicas: int) -> Piece:
        """Once a step: the sum of the gradients over replicas, and the optimizer's pass over all it holds.

        state: bytes of parameters on a rank. `ranks`: of a stage.
        """
        rows = message("all_reduce", Axis("replicas", replicas), state, "forward")  # after backward
        here = min(replicas, max(1, self.machine.node // ranks))
        seconds = {"gradients": sum(self._message(row, here) for row in rows),
                   "optimizer": self.machine.kernel("optimizer", ADAM_BYTES * state // self.e)}
        return Piece(seconds, Table(rows), Memory(0, 0, 0, 0))

    def tie(self, scheme: Formulas, apart: bool) -> Piece:
        """Once a step: the sum of the gradients of a tied head's table, if first and last stage both hold it."""
        table = scheme.shares.weight(self.model.dim, self.model.vocab_size) * self.e * (apart and self.model.tied)
        rows = message("all_reduce", Axis("ends", 2), table, "forward")  # after backward
        return Piece({"gradients": sum(self._message(row, 1) for row in rows)}, Table(rows), Memory(0, 0, 0, 0))

    def _message(self, row: Row, here: int) -> float:
        return self.machine.message(row, here)


def _seconds(time: object) -> dict[str, float]:
    return {"products": time.matmul, "elementwise": time.elementwise,
            "messages": time.total - time.matmul - time.elementwise}


@dataclass(frozen=True)
class Stage:
    """One rank of a stage: seconds of a step by kind, all that it sends, and what it holds, by part."""

    seconds: dict[str, float]
    sent: dict[str, Table]
    held: dict[str, Memory]

    @property
    def total(self) -> float:
        """Seconds that it works."""
        return sum(self.seconds.values())

    @property
    def memory(self) -> int:
        """Bytes that it holds when most micro-batches are under way."""
        return sum(part.total for part in self.held.values())


@dataclass(frozen=True)
class Cost:
    """A plan's stages, and what a step takes with them."""

    stages: tuple[Stage, ...]
    micro_batches: int

    @property
    def slowest(self) -> Stage:
        """The stage that works longest."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fullest(self) -> Stage:
        """The stage that holds most."""
        return max(self.stages, key=lambda stage: stage.memory)

    @property
    def seconds(self) -> dict[str, float]:
        """By kind, which add up: the slowest stage's, and the bubble, in which it waits for the others.

        A pipeline fills and drains: every other stage works once, on one micro-batch, while this one cannot.
        Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1.
        """
        others = sum(stage.total for stage in self.stages) - self.slowest.total
        return self.slowest.seconds | {"bubble": others / self.micro_batches}

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def memory(self) -> int:
        """Bytes on a rank of the fullest stage."""
        return self.fullest.memory

    def growth(self, other: Cost) -> str:
        """What the fullest rank holds most more of than the other's, as "activations of MLP"."""
        own, their = _amounts(self.fullest), _amounts(other.fullest)
        return max(own, key=lambda what: own[what] - their.get(what, 0))

    @property
    def mostly(self) -> str:
        """What the fullest rank holds most of."""
        held = _amounts(self.fullest)
        return max(held, key=held.get)

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a step, in the stage that sends most."""
        return max(sum(table.total() for table in stage.sent.values()) for stage in self.stages)


def cost(plan: Plan, machine: Machine, *, e: int = 2) -> Cost:
    """What a step of this plan costs on this machine, numbers of `e` bytes.

    Memory is `memory`'s, with the activations of as many micro-batches as are under way: stages - s in
    stage s (Narayanan et al. 2021, section 2.2.1, 1F1B).
    Raises ValueError if something does not split over the ranks.
    """
    known = prices(plan.model, machine, e)
    return Cost(tuple(_stage(plan, number, known) for number in range(plan.stages)), plan.micro_batches)


@lru_cache(8)
def prices(model: Transformer, machine: Machine, e: int) -> Prices:
    """The same `Prices` each time, with all that they have worked out."""
    return Prices(model, machine, e)


def in_flight(stage: int, stages: int, micro_batches: int) -> int:
    """Micro-batches whose activations a stage keeps at once."""
    return min(stages - stage, micro_batches)


def _stage(plan: Plan, number: int, prices: Prices) -> Stage:
    kept = in_flight(number, plan.stages, plan.micro_batches)
    seconds, sent, held = {}, {}, {}
    for name, piece in _pieces(plan, number, prices):
        for kind, time in piece.seconds.items():
            seconds[kind] = seconds.get(kind, 0) + plan.micro_batches * time
        sent[name] = Table(sent[name].rows if name in sent else [])
        sent[name].calls += times(piece.sent.rows, plan.micro_batches)
        held[name] = _add(held.get(name), piece.held, kept)
    parameters = sum(part.parameters for part in held.values())
    update = [prices.update(parameters, plan.ranks, plan.replicas)]
    update += [prices.tie(plan.embedding, plan.stages > 1)] if number in (0, plan.stages - 1) else []
    for piece in update:
        for kind, time in piece.seconds.items():
            seconds[kind] = seconds.get(kind, 0) + time
    return Stage(seconds, sent | {"gradients": Table(row for piece in update for row in piece.sent.rows)}, held)


def _pieces(plan: Plan, number: int, prices: Prices) -> Iterator[tuple[str, Piece]]:
    """What a stage does with a micro-batch, in order; `home` is the layout between stages."""
    home, last, size = plan.embedding.outer, plan.stages - 1, plan.micro_batch
    here = home
    if number == 0:
        yield "embedding", prices.part("embedding", plan.embedding, size)
    for layer in plan.stage(number):
        yield "moves", prices.move(here, layer.attention.outer, size)
        yield "attention", prices.part("attention", layer.attention, size, layer.recompute)
        yield "moves", prices.move(layer.attention.outer, layer.mlp.outer, size, layer.recompute == "full")
        yield "mlp", prices.part("mlp", layer.mlp, size, layer.recompute)
        here = layer.mlp.outer
    yield "moves", prices.move(here, plan.head.outer if number == last else home, size)
    if number == last:
        yield "head", prices.part("head", plan.head, size, apart=last > 0)
    if last:
        yield "stages", prices.boundary(home, (plan.ranks * plan.replicas, plan.stages), size,
                                        1 if number in (0, last) else 2)


def _amounts(stage: Stage) -> dict[str, int]:
    """Bytes of each kind of each part."""
    return {f"{kind} of {part.replace('mlp', 'MLP')}": nbytes
            for part, held in stage.held.items() for kind, nbytes in asdict(held).items()}


def _add(before: Memory | None, piece: Memory, kept: int) -> Memory:
    now = replace(piece, activations=kept * piece.activations)
    if before is None:
        return now
    return Memory(*(getattr(before, kind) + getattr(now, kind) for kind in Memory.__dataclass_fields__))
