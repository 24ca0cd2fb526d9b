"""Seconds of a training step with all three: tensor, pipeline and data parallelism."""

import math
from dataclasses import dataclass, replace

from tpcourse.predict.machine import Machine
from tpcourse.predict.memory import parameters
from tpcourse.predict.messages import Axis, message
from tpcourse.predict.model import Transformer
from tpcourse.predict.time import step_time
from tpcourse.predict.volume import Formulas

ADAM_BYTES = 28  # a parameter: its gradient read, master copy and moments read and written, itself written


@dataclass(frozen=True)
class Training:
    """Seconds of a step: what the slowest stage computes and sends, the pipeline's bubble, and the update."""

    stage: float
    neighbours: float
    bubble: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """One after the other."""
        return self.stage + self.neighbours + self.bubble + self.gradients + self.optimizer


def training_time(model: Transformer, scheme: Formulas, machine: Machine, batch: int, *, micro_batch: int = 1,
                  stages: int = 1, chunks: int = 1, replicas: int = 1, recompute: str = "none") -> Training:
    """One step of `batch` sequences in 16 bits on `replicas` pipelines of `stages`, each a scheme's ranks.

    Each stage has as many layers, in `chunks` that take turns; the last one has the head. Nodes take the
    scheme's ranks first, then replicas, then stages. All ranks of a stage send to the next one, each its part
    of the activations; gathering them there is not counted. The bubble is what the other stages take for one
    chunk of a micro-batch, while the slowest waits.

    Raises ValueError if the layers do not split into stages and chunks, or the batch into micro-batches, and
    as `volume` does.
    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2 (bubble, interleaving), 4.1 (boundaries).
    """
    if model.num_layers % (stages * chunks) or batch % (replicas * micro_batch):
        raise ValueError(f"{model.num_layers} layers do not split into {stages} stages of {chunks} chunks, "
                         f"or {batch} sequences over {replicas} replicas into micro-batches of {micro_batch}")
    count = batch // (replicas * micro_batch)
    stage = replace(model, num_layers=model.num_layers // stages)
    times = {part: time.total
             for part, time in step_time(stage, scheme, machine, micro_batch, recompute=recompute).items()}
    layers = times["attention"] + times["mlp"]
    ends = [times["embedding"] + times["head"]] if stages == 1 else [times["embedding"], times["head"]]
    numbers = parameters(stage, scheme.shares)
    own = sum(numbers.values()) if stages == 1 else sum(numbers.values()) - numbers["head"]
    boundary = _boundary(stage, scheme, machine, micro_batch, stages, replicas)
    return Training(
        stage=count * (layers + max(ends)), neighbours=count * chunks * boundary,
        bubble=((stages - 1) * (layers + chunks * boundary) + sum(ends) - max(ends)) / chunks,
        gradients=_gradients(2 * own, scheme, machine, replicas),
        optimizer=machine.kernel("optimizer", ADAM_BYTES * own))


def _boundary(model: Transformer, scheme: Formulas, machine: Machine, micro_batch: int, stages: int,
              replicas: int) -> float:
    """Activations to the next stage, and their gradients back."""
    ranks = math.prod(scheme.mesh.values())
    size = micro_batch * model.context * model.dim * 2 / ranks
    here = 2 if ranks * replicas * stages <= machine.node else 1  # the slowest boundary counts
    rows = message("send", Axis("stages", min(stages, 2)), size, "forward", calls=2)
    return sum(machine.message(row, here) for row in rows)


def _gradients(size: float, scheme: Formulas, machine: Machine, replicas: int) -> float:
    """The sum of the gradients over the replicas, in one message."""
    here = min(replicas, max(1, machine.node // math.prod(scheme.mesh.values())))
    return sum(machine.message(row, here)
               for row in message("all_reduce", Axis("replicas", replicas), size, "backward"))
