"""Known-wrong solutions, each a mistake that people make: the reference with one change, and what the check
must say of it.
"""

from dataclasses import dataclass

from tpcourse.grade.notebook import source


@dataclass(frozen=True)
class Wrong:
    """``changes``: pairs (old, new) made in the reference cell of ``task``; ``says``: what the verdict must
    contain; ``ranks``: on how many; ``seconds``: that a call may take.
    """

    task: str
    mistake: str
    says: str
    changes: tuple[tuple[str, str], ...]
    ranks: int = 3
    seconds: float = 10


def whole(body: str) -> tuple[tuple[str, str], ...]:
    """The whole cell replaced."""
    return (("*", body),)


def with_cell(notebook: dict, task: str, text: str) -> dict:
    """A copy of ``notebook`` in which the cell of ``task`` is ``text``."""
    cells = [
        {**cell, "source": text} if cell["metadata"].get("nbgrader", {}).get("grade_id") == task else cell
        for cell in notebook["cells"]
    ]
    return {**notebook, "cells": cells}


def cell_of(notebook: dict, task: str) -> str:
    return next(
        source(cell)
        for cell in notebook["cells"]
        if cell["metadata"].get("nbgrader", {}).get("grade_id") == task
    )


EXCHANGE = """
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, chunks[send], (rank + 1) % n),
            dist.P2POp(dist.irecv, arriving, (rank - 1) % n),
        ])
        for work in works:
            work.wait()
"""
PASS_WHOLE = """
def {name}(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    total, passing = x.clone(), x.clone()
    for _ in range(n - 1):
        arriving = torch.empty_like(x)
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, passing, (rank + 1) % n),
            dist.P2POp(dist.irecv, arriving, (rank - 1) % n),
        ])
        for work in works:
            work.wait()
        total, passing = total + arriving, arriving
    return {result}
"""
FORWARD = "torch.nn.functional.linear(x, weight, bias)"

WRONG = [
    Wrong(
        "ring_reduce_scatter",
        "sends to the wrong neighbour",
        "rank 0 sends to rank 2, which receives from rank 1",
        (("(rank + 1) % n", "(rank + 2) % n"),),
    ),
    Wrong(
        "ring_reduce_scatter",
        "goes around the other way with the same chunks",
        "different chunks were mixed",
        (
            ("(rank + 1) % n", "(rank - 1) % n"),
            ("irecv, arriving, (rank - 1) % n", "irecv, arriving, (rank + 1) % n"),
        ),
    ),
    Wrong(
        "ring_reduce_scatter",
        "chunk off by one",
        "rank r returned chunk (r + 1) % 3 instead of chunk r",
        (
            ("(rank - step - 1) % n, (rank - step - 2) % n", "(rank - step) % n, (rank - step - 1) % n"),
            ("return chunks[rank]", "return chunks[(rank + 1) % n]"),
        ),
    ),
    Wrong(
        "ring_reduce_scatter",
        "sends the whole tensor",
        "in 2 messages of the whole tensor; a ring sends one chunk",
        whole(PASS_WHOLE.format(name="ring_reduce_scatter", result="total.chunk(n)[rank].clone()")),
    ),
    Wrong(
        "ring_reduce_scatter",
        "changes its input",
        "the function must leave its input as it was",
        (("x.clone()", "x"),),
    ),
    Wrong(
        "ring_reduce_scatter",
        "leaves out the last step",
        "nothing was added",
        (("range(n - 1)", "range(n - 2)"),),
    ),
    Wrong(
        "ring_reduce_scatter",
        "overwrites where it should add",
        "that is one rank's chunk",
        (("chunks[receive] += arriving", "chunks[receive] = arriving"),),
    ),
    Wrong(
        "ring_reduce_scatter",
        "averages",
        "divided by 3: the task adds, it does not average",
        (("return chunks[rank]", "return chunks[rank] / n"),),
    ),
    Wrong(
        "ring_reduce_scatter",
        "receives into float32",
        "torch.empty_like(x) takes x's dtype",
        (("torch.empty_like(chunks[receive])", "torch.empty(chunks[receive].shape)"),),
    ),
    Wrong(
        "ring_reduce_scatter",
        "works in float32",
        "expected dtype torch.float64, got torch.float32",
        (("x.clone()", "x.float()"),),
    ),
    Wrong(
        "ring_reduce_scatter",
        "does not wait",
        "started send on line 12 and never waited for it",
        (("for work in works:\n            work.wait()", "works[1].wait()"),),
    ),
    Wrong(
        "ring_reduce_scatter",
        "forgets to return",
        "it is not written yet, or its return is missing",
        (("return chunks[rank]", "chunks[rank]"),),
    ),
    Wrong(
        "ring_reduce_scatter",
        "rank 0 does nothing",
        "Some ranks returned while others still wait for them",
        (("range(n - 1)", "range(n - 1 if rank else 0)"),),
    ),
    Wrong(
        "ring_reduce_scatter",
        "calls the collective through a wrapper of torch",
        "your code called reduce_scatter (line 4)",
        whole("""
def ring_reduce_scatter(x):
    out = x.new_empty(x.numel() // dist.get_world_size())
    dist.reduce_scatter_tensor(out, x)
    return out
"""),
    ),
    Wrong(
        "ring_reduce_scatter",
        "stops to be debugged",
        "no keyboard",
        (("return chunks[rank]", "breakpoint()\n    return chunks[rank]"),),
    ),
    Wrong(
        "ring_reduce_scatter",
        "only receives",
        "Someone waits for a message that nobody sends",
        (("dist.P2POp(dist.isend, chunks[send], (rank + 1) % n),", ""),),
    ),
    Wrong(
        "ring_reduce_scatter",
        "calls all_reduce",
        "your code called all_reduce (line 4)",
        whole("""
def ring_reduce_scatter(x):
    total = x.clone()
    dist.all_reduce(total)
    return total.chunk(dist.get_world_size())[dist.get_rank()].clone()
"""),
    ),
    Wrong(
        "ring_reduce_scatter",
        "everyone sends first",
        "Every rank sends before it receives",
        (
            (
                EXCHANGE,
                """
        dist.send(chunks[send], (rank + 1) % n)
        dist.recv(arriving, (rank - 1) % n)
""",
            ),
        ),
    ),
    Wrong(
        "ring_reduce_scatter",
        "the package's own",
        "tpcourse.comm.reduce_scatter comes from the package",
        whole("""
from tpcourse.comm import reduce_scatter

def ring_reduce_scatter(x):
    return reduce_scatter(x, dist.group.WORLD, 0)
"""),
    ),
    Wrong(
        "ring_all_gather",
        "own chunk first",
        "not in the order of ranks: rank r's list begins with the chunk of rank r",
        (("torch.cat(chunks)", "torch.cat([chunks[(rank - i) % n] for i in range(n)])"),),
    ),
    Wrong(
        "ring_all_gather",
        "leaves out the last step",
        "a chunk never arrived",
        (("range(n - 1)", "range(n - 2)"), ("torch.empty_like(x) for", "torch.zeros_like(x) for")),
    ),
    Wrong(
        "ring_all_gather",
        "calls all_gather",
        "your code called all_gather (line 4)",
        whole("""
def ring_all_gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)
"""),
    ),
    Wrong(
        "ring_all_gather",
        "sends everything it has",
        "in 3 messages of the whole tensor; a ring sends one chunk",
        whole(
            """
def ring_all_gather(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    have = torch.zeros(n, x.numel(), dtype=x.dtype)
    have[rank] = x
    for _ in range(n):
        arriving = torch.empty_like(have)
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, have, (rank + 1) % n), dist.P2POp(dist.irecv, arriving, (rank - 1) % n)])
        for work in works:
            work.wait()
        have = torch.where(have == 0, arriving, have)
    return have.flatten()
""".replace("range(n):", "range(n if n > 1 else 0):")
        ),
    ),
    Wrong(
        "ring_all_gather",
        "sends to everybody",
        "in a ring every rank sends only to its right neighbour",
        whole("""
def ring_all_gather(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = [x.clone() if i == rank else torch.empty_like(x) for i in range(n)]
    others = [i for i in range(n) if i != rank]
    works = [dist.isend(x, i) for i in others] + [dist.irecv(chunks[i], i) for i in others]
    for work in works:
        work.wait()
    return torch.cat(chunks)
"""),
    ),
    Wrong(
        "ring_all_gather",
        "adds what arrives",
        "the chunks were added up",
        (("return torch.cat(chunks)", "return sum(chunks)"),),
    ),
    Wrong(
        "ring_all_gather",
        "sends its own chunk in every step",
        "a chunk is in the wrong place, or came twice",
        (("(rank - step) % n,", "rank,"),),
    ),
    Wrong(
        "ring_all_gather",
        "receives into float32",
        "torch.empty_like(x) takes x's dtype",
        (("torch.empty_like(x)", "torch.empty(x.shape)"),),
    ),
    Wrong(
        "ring_all_reduce",
        "calls all_reduce",
        "your code called all_reduce (line 4)",
        whole("""
def ring_all_reduce(x):
    total = x.clone()
    dist.all_reduce(total)
    return total
"""),
    ),
    Wrong(
        "ring_all_reduce",
        "passes whole tensors around",
        "in 2 messages of the whole tensor; a ring sends one chunk",
        whole(PASS_WHOLE.format(name="ring_all_reduce", result="total")),
    ),
    Wrong(
        "ring_all_reduce",
        "forgets the all-gather",
        "the all-gather is missing",
        (("ring_all_gather(ring_reduce_scatter(x))", "ring_reduce_scatter(x)"),),
    ),
    Wrong(
        "ring_all_reduce",
        "averages",
        "divided by 3: the task adds",
        (
            (
                "ring_all_gather(ring_reduce_scatter(x))",
                "ring_all_gather(ring_reduce_scatter(x)) / dist.get_world_size()",
            ),
        ),
    ),
    Wrong(
        "ring_all_reduce",
        "writes into its input",
        "the function must leave its input as it was",
        (
            (
                "return ring_all_gather(ring_reduce_scatter(x))",
                "return x.copy_(ring_all_gather(ring_reduce_scatter(x)))",
            ),
        ),
    ),
    Wrong(
        "ring_all_reduce",
        "chunks in the wrong places",
        "the chunks of the sum are in the wrong places",
        (
            (
                "ring_all_gather(ring_reduce_scatter(x))",
                "ring_all_gather(ring_reduce_scatter(x)).roll(x.numel() // dist.get_world_size())",
            ),
        ),
    ),
    Wrong(
        "column_parallel_forward",
        "gathers the weight",
        "forward moved the weight: all_gather of [3, ",
        (
            (FORWARD, "torch.nn.functional.linear(x, _all(weight, group), _all(bias, group))"),
            (
                "if not gather_output:\n        return y",
                (
                    "rank, n = group.rank(), group.size()\n    if not gather_output:\n"
                    "        return y.chunk(n, -1)[rank].contiguous()\n    return y"
                ),
            ),
            (
                "def column",
                (
                    "def _all(t, group):\n    if t is None:\n        return t\n    parts ="
                    " [torch.empty_like(t) for _ in range(group.size())]\n    dist.all_gather(parts, t,"
                    " group=group)\n    return torch.cat(parts)\n\n\ndef column"
                ),
            ),
        ),
    ),
    Wrong(
        "column_parallel_forward",
        "adds the bias P times",
        "the bias was added 3 times instead of once",
        ((FORWARD, "x @ weight.T + (0 if bias is None else group.size() * bias)"),),
    ),
    Wrong("column_parallel_forward", "forgets the bias", "the bias is missing", ((FORWARD, "x @ weight.T"),)),
    Wrong(
        "column_parallel_forward",
        "all-reduce in forward",
        "the ranks' columns were added up",
        (("if not gather", "dist.all_reduce(y, group=group)\n    if not gather"),),
    ),
    Wrong(
        "column_parallel_forward",
        "a message that nobody needs",
        "forward needs no message at all",
        (("if not gather", "dist.all_reduce(y.clone(), group=group)\n    if not gather"),),
    ),
    Wrong(
        "column_parallel_forward",
        "gathers always",
        "that is the whole Y: without gather_output",
        (("if not gather_output:\n        return y", ""),),
    ),
    Wrong(
        "column_parallel_forward",
        "joins along dim 0",
        "joined along dim 0, as all_gather_into_tensor lays them out",
        (("dim=-1", "dim=0"),),
    ),
    Wrong(
        "column_parallel_forward",
        "joins along dim 0 and reshapes",
        "which mixes tokens and columns",
        (("torch.cat(parts, dim=-1)", "torch.cat(parts).reshape(len(x), -1)"),),
    ),
    Wrong(
        "column_parallel_forward",
        "gathers by an all-reduce of zeros",
        "gathering the columns of Y takes",
        (
            (
                "parts = [torch.empty_like(y) for _ in range(group.size())]",
                "parts = [torch.zeros_like(y) for _ in range(group.size())]",
            ),
            ("dist.all_gather(parts, y, group=group)", "parts[group.rank()] = y"),
            (
                "return torch.cat(parts, dim=-1)",
                "whole = torch.cat(parts, dim=-1)\n    dist.all_reduce(whole, group=group)\n    return whole",
            ),
        ),
    ),
    Wrong(
        "column_parallel_forward",
        "one buffer for all ranks",
        "one and the same buffer 3 times",
        (("[torch.empty_like(y) for _ in range(group.size())]", "[torch.empty_like(y)] * group.size()"),),
    ),
    Wrong(
        "column_parallel_forward",
        "buffers for two ranks",
        "all_gather brings 3 tensors for 2 buffers",
        (("range(group.size())", "range(2)"),),
    ),
    Wrong(
        "column_parallel_forward",
        "forgets to gather",
        "those are this rank's columns only",
        (("if not gather_output:", "if True:"),),
    ),
    Wrong(
        "ColumnParallelFunction",
        "no all-reduce in backward",
        "summed with an all-reduce in backward",
        (("dist.all_reduce(dx, group=ctx.group)", "pass"),),
    ),
    Wrong(
        "ColumnParallelFunction",
        "all-reduce in forward",
        "forward needs no message at all",
        (("return torch.nn", "dist.all_reduce(x.detach().clone(), group=group)\n        return torch.nn"),),
    ),
    Wrong(
        "ColumnParallelFunction",
        "averages dX",
        "dX is divided by 3",
        (("return dx,", "return dx / ctx.group.size(),"),),
    ),
    Wrong(
        "ColumnParallelFunction",
        "sums dW over the ranks",
        "dW was summed over the ranks",
        (
            (
                "return dx, dy.T @ x",
                "dw = dy.T @ x\n        dist.all_reduce(dw, group=ctx.group)\n        return dx, dw",
            ),
        ),
    ),
    Wrong(
        "ColumnParallelFunction",
        "averages dW",
        "dW is divided by 3",
        (("dy.T @ x", "dy.T @ x / ctx.group.size()"),),
    ),
    Wrong(
        "ColumnParallelFunction",
        "db summed over everything",
        "sum over tokens only",
        (("dy.sum(0)", "dy.sum().expand(dy.shape[1])"),),
    ),
    Wrong(
        "ColumnParallelFunction",
        "db is a mean",
        "db is the mean over tokens; it is the sum",
        (("dy.sum(0)", "dy.mean(0)"),),
    ),
    Wrong(
        "ColumnParallelFunction",
        "no db",
        "db did not come back",
        (("dy.sum(0) if ctx.has_bias else None", "None"),),
    ),
    Wrong(
        "ColumnParallelFunction", "dW transposed", "invalid gradient at index 1", (("dy.T @ x", "x.T @ dy"),)
    ),
    Wrong(
        "ColumnParallelFunction",
        "sums dX twice",
        "dX is 3 times too large",
        (
            (
                "dist.all_reduce(dx, group=ctx.group)",
                "dist.all_reduce(dx, group=ctx.group)\n        dist.all_reduce(dx, group=ctx.group)",
            ),
        ),
    ),
    Wrong(
        "ColumnParallelLinear",
        "every rank draws the same",
        "all 3 shards are equal",
        (
            (
                "torch.nn.Linear(in_features, out_features, bias=bias)",
                "torch.nn.Linear(in_features, out_features // n, bias=bias)",
            ),
            (".chunk(n)[rank]", ""),
        ),
    ),
    Wrong(
        "ColumnParallelLinear",
        "every rank keeps the first rows",
        "all 3 shards are equal",
        ((".chunk(n)[rank]", ".chunk(n)[0]"),),
    ),
    Wrong(
        "ColumnParallelLinear",
        "holds the whole weight",
        "the rank holds the whole weight",
        ((".chunk(n)[rank]", ""),),
    ),
    Wrong(
        "ColumnParallelLinear",
        "holds a view of the whole",
        "Keep only this rank's part, as a copy",
        ((".clone()", ""),),
    ),
    Wrong(
        "ColumnParallelLinear",
        "keeps the whole layer beside",
        "Keep only this rank's part, as a copy",
        (("self.group, self", "self.spare = [whole.weight.detach(), whole.bias]\n        self.group, self"),),
    ),
    Wrong(
        "ColumnParallelLinear",
        "splits the wrong dimension",
        "that is a split along in_features",
        (("whole.weight.detach().chunk(n)[rank]", "whole.weight.detach().tensor_split(n, 1)[rank]"),),
    ),
    Wrong(
        "ColumnParallelLinear",
        "bias not split",
        "the rank holds the whole bias",
        (("whole.bias.detach().chunk(n)[rank]", "whole.bias.detach()"),),
    ),
    Wrong(
        "ColumnParallelLinear",
        "gather's backward sums",
        "3 times too large: with gather_output every rank gets the same",
        (
            (
                "return dy.chunk",
                "dy = dy.clone()\n        dist.all_reduce(dy, group=ctx.group)\n        return dy.chunk",
            ),
        ),
    ),
    Wrong(
        "ColumnParallelLinear",
        "ignores gather_output",
        "those are this rank's columns only",
        (("GatherColumns.apply(y, self.group) if self.gather_output else y", "y"),),
    ),
    Wrong(
        "ColumnParallelLinear",
        "gathers outside of autograd",
        "no dX: autograd finds no way back from Y",
        (("GatherColumns.apply(y, self.group)", "GatherColumns.forward(self, y, self.group)"),),
    ),
    Wrong(
        "ColumnParallelLinear",
        "a parameter too many",
        "the module's parameters are weight, bias, spare",
        (("self.group, self", "self.spare = torch.nn.Parameter(torch.ones(1))\n        self.group, self"),),
    ),
    Wrong(
        "ColumnParallelLinear",
        "an error without its numbers",
        "It must say both numbers, 10 and 3",
        (
            (
                'f"out_features={out_features} is not divisible by the {n} ranks of the group"',
                '"does not divide"',
            ),
        ),
    ),
    Wrong(
        "ColumnParallelLinear",
        "takes any out_features",
        "Expected ValueError, and your code went on",
        (("if out_features % n:", "if False:"),),
    ),
    Wrong(
        "ColumnParallelLinear",
        "the package's own",
        "tpcourse.layers.ColumnParallelLinear comes from the package",
        whole("""
from tpcourse.layers import ColumnParallelLinear
"""),
    ),
    Wrong(
        "ColumnParallelLinear",
        "a child of the package's own",
        "tpcourse.layers.ColumnParallelLinear comes from the package",
        whole("""
class ColumnParallelLinear(tp.layers.ColumnParallelLinear):
    pass
"""),
    ),
    Wrong(
        "ColumnParallelLinear",
        "torch's unsharded layer",
        "the rank holds the whole weight",
        whole("""
class ColumnParallelLinear(torch.nn.Linear):
    def __init__(self, in_features, out_features, group, bias=True, gather_output=False):
        super().__init__(in_features, out_features, bias)
"""),
    ),
]
