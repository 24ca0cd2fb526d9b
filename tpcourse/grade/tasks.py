"""The tasks by name: what makes their cases, and the numbers of ranks that a learner's own check tries."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tpcourse.grade import attention, column, costs, cube, mlp, planner, ring, row, sequence, summa, vocabulary
from tpcourse.grade.case import Case


@dataclass(frozen=True)
class Task:
    """``cases(n, rng)`` draws the inputs for n ranks and works out what must come back."""

    name: str
    cases: Callable[[int, torch.Generator], list[Case]]
    ranks: tuple[int, ...] = (2, 4)


TASKS = {
    task.name: task
    for task in (
        Task("ring_reduce_scatter", ring.reduce_scatter),
        Task("ring_all_gather", ring.all_gather),
        Task("ring_all_reduce", ring.all_reduce),
        Task("column_parallel_forward", column.forward),
        Task("ColumnParallelFunction", column.autograd),
        Task("ColumnParallelLinear", column.module),
        Task("row_parallel_forward", row.forward),
        Task("RowParallelLinear", row.module),
        Task("ParallelMLP", mlp.module),
        Task("shard_gate_up", mlp.shard_gate_up),
        Task("vocab_parallel_embedding", vocabulary.embedding),
        Task("vocab_parallel_cross_entropy", vocabulary.cross_entropy),
        Task("VocabParallelCrossEntropy", vocabulary.cross_entropy_function),
        Task("shard_qkv", attention.shard_qkv),
        Task("ParallelAttention", attention.module),
        Task("kv_gradient", attention.kv_gradient),
        Task("sequence_parallel_norm", sequence.norm),
        Task("sequence_parallel_mlp", sequence.mlp),
        Task("activation_bytes", sequence.activation_bytes),
        Task("mlp_volume", costs.mlp_volume, ranks=(1,)),
        Task("fit_alpha_beta", costs.alpha_beta, ranks=(1,)),
        Task("summa_forward", summa.forward, ranks=(4, 9)),
        Task("SummaFunction", summa.autograd, ranks=(4, 9)),
        Task("cube_forward", cube.forward, ranks=(4, 8)),
        Task("CubeFunction", cube.autograd, ranks=(4, 8)),
        Task("split_layer_norm", cube.norm),
        Task("choose_mesh", cube.choose, ranks=(1,)),
        Task("front", planner.front, ranks=(1,)),
        Task("grow", planner.grow, ranks=(1,)),
        Task("plan", planner.plan, ranks=(1,)),
    )
}


def task(name: str) -> Task:
    """The task called ``name``. Raises ValueError with the names there are."""
    if name not in TASKS:
        raise ValueError(f"no task is called {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name]
