"""What was rejected beside a plan: plans that differ in one thing, and why they are not better."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tpcourse.models.block import RECOMPUTE
from tpcourse.plan.cost import Cost, cost, prices
from tpcourse.plan.layout import Plan, name
from tpcourse.plan.options import Degrees, schemes_for, why_not
from tpcourse.plan.search import emptiest_plan, fastest_plan
from tpcourse.plan.stages import Stages
from tpcourse.plan.words import too_much
from tpcourse.predict import OneD
from tpcourse.predict.volume import Formulas

if TYPE_CHECKING:
    from tpcourse.predict.machine import Machine


@dataclass(frozen=True)
class Rejected:
    """A change of the plan, and why it was not made; what it would cost, where it can be made."""

    change: str
    reason: str
    cost: Cost | None = None


def rejected(plan: Plan, machine: Machine, memory: float, e: int, stages: int) -> Iterator[Rejected]:
    """Beside a plan: other degrees, each with the best plan there; one part in another scheme; other recomputation.

    `stages`: how many there may be.
    """
    own = cost(plan, machine, e=e)
    for change, degrees in other_degrees(plan):
        if degrees.stages > stages:
            yield Rejected(change, f"not more than {stages} were asked for")
            continue
        other = _best_there(plan, degrees, machine, memory, e)
        if isinstance(other, str):
            yield Rejected(change, other)
        else:
            yield _judged(change, own, cost(other, machine, e=e), memory)
    for change, other in [*other_schemes(plan, machine, e), *other_recomputation(plan)]:
        yield _judged(change, own, cost(other, machine, e=e), memory)


def other_degrees(plan: Plan) -> Iterator[tuple[str, Degrees]]:
    """Twice or half the ranks, the stages, the micro-batch; replicas take what is left."""
    own = Degrees(plan.replicas, plan.stages, plan.ranks, plan.micro_batch)
    for key in ("ranks", "stages", "micro_batch"):
        for up, down in ((2, 1), (1, 2)):
            value, odd = divmod(getattr(own, key) * up, down)
            replicas, rest = divmod(own.replicas * down, up) if key != "micro_batch" else (own.replicas, 0)
            if not odd and value and not rest and replicas:
                yield f"{key.replace('_', '-')}: {value}", replace(own, **{key: value, "replicas": replicas})


def other_schemes(plan: Plan, machine: Machine, e: int) -> Iterator[tuple[str, Plan]]:
    """One part in the fastest other scheme of each kind: all attentions, all MLPs, embedding or head."""
    ends = {"embedding and head": ("embedding", "head")} if plan.model.tied else {
        "embedding": ("embedding",), "head": ("head",)}
    for part, fields in ({"attention": (), "MLP": ()} | ends).items():
        kinds = {}
        for scheme in schemes_for(plan.model, plan.ranks, plan.micro_batch):
            other = _with(plan, part, fields, scheme)
            seconds = cost(other, machine, e=e).total
            if other != plan and seconds < kinds.get(type(scheme), (float("inf"),))[0]:
                kinds[type(scheme)] = seconds, f"{part}: {name(scheme)}", other
        yield from (found[1:] for found in kinds.values())


def other_recomputation(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """All layers in another mode."""
    for mode in RECOMPUTE:
        layers = tuple(replace(layer, recompute=mode) for layer in plan.layers)
        if layers != plan.layers:
            yield f"recomputed: {mode}", replace(plan, layers=layers)


def _with(plan: Plan, part: str, fields: tuple[str, ...], scheme: Formulas) -> Plan:
    if fields:
        return replace(plan, **dict.fromkeys(fields, scheme))
    return replace(plan, layers=tuple(replace(layer, **{part.lower(): scheme}) for layer in plan.layers))


def _best_there(plan: Plan, degrees: Degrees, machine: Machine, memory: float, e: int) -> Plan | str:
    """The best plan at these degrees; the emptiest if none fits; what does not split if there is none."""
    model, batch = plan.model, plan.global_batch
    if model.num_layers % degrees.stages:
        return f"{model.num_layers} layers do not split into {degrees.stages} stages"
    if batch % (degrees.replicas * degrees.micro_batch):
        return f"{batch} sequences do not split over {degrees.replicas} replicas into {degrees.micro_batch} each"
    stages = Stages(prices(model, machine, e), degrees, batch)
    if not stages.schemes:
        return why_not(model, OneD(degrees.ranks), degrees.micro_batch) or "nothing splits"
    found = fastest_plan(stages, memory, within=1e-3)
    return found[1] if found else emptiest_plan(stages)


def _judged(change: str, own: Cost, other: Cost, memory: float) -> Rejected:
    """Too full, or slower: by what, most of all."""
    if other.memory > memory:
        return Rejected(change, f"{too_much(other.memory, memory)}: {other.growth(own)}", other)
    longer = {kind: seconds - own.seconds.get(kind, 0.0) for kind, seconds in other.seconds.items()}
    slower = 100 * (other.total / own.total - 1)
    if abs(slower) < 1e-9:
        return Rejected(change, "no difference", other)
    if slower < 0:
        return Rejected(change, f"{-slower:.2f} % faster, within the search's tolerance", other)
    much = f"{slower:.1f}" if slower >= 0.1 else "under 0.1"
    return Rejected(change, f"{much} % slower: {max(longer, key=longer.get)}", other)
