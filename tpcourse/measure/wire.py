"""What one rank puts on the wire in one operation, when no byte travels that need not."""

from __future__ import annotations

OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter",
    "send", "recv", "barrier",
)  # fmt: skip


def wire_bytes(
    op: str, message_bytes: int, group_size: int, *, kept_bytes: int | None = None, from_root: int = 0
) -> int | float:
    """Bytes that this rank sends in one `op`, under the bandwidth-optimal algorithm.

    With S = `message_bytes`, n = `group_size`:

    | op | S is | this rank sends |
    |---|---|---|
    | all_reduce | the tensor | 2 (n-1)/n S (reduce-scatter, then all-gather) |
    | all_gather | the gathered tensor | (n-1)/n S (its own piece and n-2 that it passes on) |
    | reduce_scatter | the tensor before it is scattered | (n-1)/n S |
    | all_to_all | what this rank hands in | S less `kept_bytes`, the part addressed to itself |
    | broadcast | the tensor | S (a pipeline root, root+1, ...; the last in it sends 0) |
    | reduce | the tensor | S (the same pipeline, run backwards; the root sends 0) |
    | gather | the gathered tensor | S/n, the root 0 |
    | scatter | the tensor before it is scattered | the root (n-1)/n S, others 0 |
    | send | the tensor | S |
    | recv, barrier | the tensor, 0 | 0 |

    S follows nccl-tests (doc/PERFORMANCE.md). That all_reduce needs no more and cannot do with less is shown
    by Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    Rooted operations: every other rank must receive (or give up) its part once, and the pipeline sends
    nothing else, (n-1) S over all ranks; for other algorithms and their costs see Thakur, Rabenseifner and
    Gropp, "Optimization of collective communication operations in MPICH", 2005. Where pieces differ in size,
    all_gather and reduce_scatter give the mean over the ranks.

    `kept_bytes`: all_to_all only; S/n (even splits) unless given. `from_root`: for the rooted operations,
    (rank - root) mod n; 0 is the root. The result is an int where the division has no remainder.

    Raises ValueError for an operation that is not in `OPERATIONS`.
    """
    if op not in OPERATIONS:
        raise ValueError(f"unknown operation {op!r}; it must be one of {', '.join(OPERATIONS)}")
    n, size = group_size, message_bytes
    others = _divide((n - 1) * size, n)
    kept = _divide(size, n) if kept_bytes is None else kept_bytes
    is_root, is_last = from_root == 0, from_root == n - 1
    sent = {
        "all_reduce": _divide(2 * (n - 1) * size, n),
        "all_gather": others,
        "reduce_scatter": others,
        "all_to_all": size - kept,
        "broadcast": 0 if is_last else size,
        "reduce": 0 if is_root else size,
        "gather": 0 if is_root else _divide(size, n),
        "scatter": others if is_root else 0,
        "send": size,
    }
    return sent.get(op, 0)


def _divide(a: int, b: int) -> int | float:
    return a // b if a % b == 0 else a / b
