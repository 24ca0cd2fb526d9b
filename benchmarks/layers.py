"""How long forward and backward of the parallel layers take, beside the same layers of three other libraries.

    pip install --no-deps fairscale==0.4.13 megatron-core==0.16.1   # or -e ".[bench]", with what launch.py needs
    python benchmarks/layers.py                 # 2 and 4 ranks, small and large shapes, some minutes
    python benchmarks/layers.py --quick         # 2 ranks, small shapes, about a minute
    python benchmarks/layers.py --markdown      # all of it, and the table goes into README.md

The models of `tpcourse.models` are written against a scheme, and here each library is one: DTensor's parallel
styles, fairscale and megatron-core make the linears, norms, embeddings and losses, while everything between
them (the core of attention, activations, residuals) is the same code. All get the same weights and the same
inputs in float32. Outputs and every gradient are first compared with those of one process, and the run ends
where they differ. Then the libraries take turns on the same ranks, one thread each, so that whatever else the
machine does hits all alike. What is not installed is shown as such; DTensor always takes part.
"""

import argparse
import contextlib
import importlib.util
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel, SequenceParallel,
                                               loss_parallel, parallelize_module)

from report import aligned, machine, markdown, put_into

import tpcourse as tp
from tpcourse.comm import my_slice
from tpcourse.layers import Layout, model_layouts
from tpcourse.measure import ledger
from tpcourse.models import MLP, Attention, Block
from tpcourse.schemes import Dense, OneD

ROOT = Path(__file__).parents[1]
LIMIT_S = 600  # of one row of the table
TOLERANCE = 1e-5  # of the greatest entry: sums of float32 in another order


@dataclass(frozen=True)
class Size:
    """Shapes of a layer, and how often it is timed: in each round `steps` times in a row."""

    batch: int
    sequence: int
    dim: int
    heads: int
    vocab: int
    rounds: int
    steps: int

    def __str__(self) -> str:
        return (f"{self.batch} x {self.sequence} tokens, {self.dim} features, {self.heads} heads, "
                f"vocabulary of {self.vocab:,}")


SIZES = {"small": Size(2, 32, 64, 4, 512, rounds=31, steps=5),
         "large": Size(2, 256, 512, 8, 8192, rounds=11, steps=1)}
LAYERS = ("MLP", "attention", "embedding + loss", "block")


class EmbeddingAndLoss(nn.Module):
    """Both ends of a language model, which meet in the vocabulary."""

    def __init__(self, scheme: Dense | OneD, vocab: int, dim: int) -> None:
        super().__init__()
        self.scheme, self.vocab = scheme, vocab
        self.embedding, self.head = scheme.embedding(vocab, dim), scheme.head(dim, vocab)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        return self.scheme.loss(self.head(self.embedding(ids)), target, self.vocab)


def build(layer: str, scheme: Dense | OneD, size: Size) -> nn.Module:
    if layer == "MLP":
        return MLP(scheme, size.dim, 4 * size.dim)
    if layer == "embedding + loss":
        return EmbeddingAndLoss(scheme, size.vocab, size.dim)
    return {"attention": Attention, "block": Block}[layer](scheme, size.dim, size.heads)


def do_nothing(model: nn.Module) -> None:
    pass


@dataclass
class Contender:
    """One library's model on this rank, and what a step with it takes besides forward and backward."""

    model: nn.Module
    context: Callable = contextlib.nullcontext  # around the step
    finish: Callable[[nn.Module], None] = do_nothing  # after backward: what the library leaves to its trainer


# The libraries: each function makes one layer of one library on this rank.

class Parts(OneD):
    """A library whose layers are cut as OneD's are, by what makes them."""

    def __init__(self, group: DeviceMesh, column: Callable, row: Callable, embedding: Callable,
                 cross_entropy: Callable) -> None:
        super().__init__(group)
        self.column, self.row, self.table, self.cross_entropy = column, row, embedding, cross_entropy

    def entering_linear(self, in_features, out_features, bias=True, stride=1):
        return self.column(in_features, out_features, bias=bias)

    def leaving_linear(self, in_features, out_features, bias=True):
        return self.row(in_features, out_features, bias=bias)

    def qkv_linear(self, in_features, head_dim, num_heads, num_kv_heads, bias=True):
        return self.column(in_features, (num_heads + 2 * num_kv_heads) * head_dim, bias=bias)

    def norm(self, dim, kind):
        return nn.LayerNorm(dim)

    def embedding(self, num_embeddings, dim):
        return self.table(num_embeddings, dim)

    def head(self, dim, vocab_size, embedding=None):
        return self.column(dim, vocab_size, bias=False)

    def loss(self, logits, target, vocab_size):
        return self.cross_entropy(logits, target).mean()


def tpcourse(layer: str, size: Size, group: DeviceMesh, sequence_parallel: bool) -> Contender:
    return Contender(build(layer, OneD(group, sequence_parallel), size))


def dtensor(layer: str, size: Size, group: DeviceMesh, sequence_parallel: bool) -> Contender:
    """torch's own modules, rewritten by parallel styles; the rows of Q|K|V lie in the order of the ranks."""
    class Scheme(Dense):
        def local_heads(self, num_heads, num_kv_heads):
            return num_heads // group.size(), num_kv_heads // group.size()

    outer = Shard(0) if sequence_parallel else Replicate()
    entering, leaving = ColwiseParallel(input_layouts=outer), RowwiseParallel(output_layouts=outer)
    styles = {"up": entering, "qkv": entering, "down": leaving, "proj": leaving,
              "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=outer),
              "head": ColwiseParallel(input_layouts=outer, output_layouts=Shard(-1), use_local_output=False)}
    if sequence_parallel:
        styles |= dict.fromkeys(("norm1", "norm2"), SequenceParallel(sequence_dim=0))
    model = build(layer, Scheme(), size)
    for name, module in list(model.named_modules()):
        if style := styles.get(name.rpartition(".")[2]):
            parallelize_module(module, group, style)
    context = loss_parallel if layer == "embedding + loss" else contextlib.nullcontext
    return Contender(model, context, sum_partial)


def sum_partial(model: nn.Module) -> None:
    """Adds up the gradients that DTensor leaves as terms of a sum."""
    for p in model.parameters():
        if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)


def fairscale(layer: str, size: Size, group: DeviceMesh, sequence_parallel: bool) -> Contender:
    from fairscale.nn import model_parallel as library
    from fairscale.nn.model_parallel.cross_entropy import vocab_parallel_cross_entropy
    if not library.initialize.model_parallel_is_initialized():
        with contextlib.redirect_stdout(None):
            library.initialize_model_parallel(group.size())
    column = partial(library.ColumnParallelLinear, gather_output=False)
    row = partial(library.RowParallelLinear, input_is_parallel=True)
    return Contender(build(layer, Parts(group, column, row, library.VocabParallelEmbedding,
                                        vocab_parallel_cross_entropy), size))


def megatron(layer: str, size: Size, group: DeviceMesh, sequence_parallel: bool) -> Contender:
    """Without the CUDA kernels that it runs without. Its buffers go to the CPU by way of `current_device`."""
    warnings.filterwarnings("ignore")  # of kernels that are not there, and names that torch has changed
    from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel as library
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(group.size(), create_gloo_process_groups=False)
    torch.cuda.current_device = lambda: "cpu"
    config = ModelParallelConfig(tensor_model_parallel_size=group.size(), sequence_parallel=sequence_parallel,
                                 use_cpu_initialization=True, perform_initialization=False)
    also = {"config": config, "init_method": nn.init.zeros_, "tp_group": group.get_group()}
    column = partial(first_result(library.ColumnParallelLinear), **also)
    row = partial(first_result(library.RowParallelLinear), input_is_parallel=True, skip_bias_add=False,
                  **also)
    table = partial(megatron_embedding(library), reduce_scatter_embeddings=sequence_parallel, **also)
    model = build(layer, Parts(group, column, row, table, library.vocab_parallel_cross_entropy), size)
    return Contender(model, finish=partial(sum_over_tokens, group) if sequence_parallel else do_nothing)


def first_result(linear: type[nn.Module]) -> type[nn.Module]:
    class Linear(linear):
        def forward(self, x):
            return super().forward(x)[0]  # without the bias that it may leave to others
    return Linear


def megatron_embedding(library: ModuleType) -> type[nn.Module]:
    class Embedding(library.VocabParallelEmbedding):
        def forward(self, ids):  # where it scatters it takes [batch, sequence] to [sequence, batch, dim]
            scatters = self.reduce_scatter_embeddings
            return super().forward(ids[None]).squeeze(1) if scatters else super().forward(ids)
    return Embedding


def sum_over_tokens(group: DeviceMesh, model: nn.Module) -> None:
    """What Megatron's trainer does under sequence parallelism, in one message for all such parameters."""
    seen = [p for name, p in model.named_parameters()
            if "norm" in name or name.endswith(("down.bias", "proj.bias"))]
    if seen:
        total = torch.cat([p.grad for p in seen])
        dist.all_reduce(total, group=group.get_group())
        for p, grad in zip(seen, total.split([len(p) for p in seen])):
            p.grad = grad


LIBRARIES = {  # the package to look for, and who makes the layer
    "tpcourse": ("torch", tpcourse),
    "DTensor": ("torch", dtensor),
    "fairscale": ("fairscale", fairscale),
    "megatron-core": ("megatron", megatron),
}
ONLY_WITHOUT = "fairscale"  # has no sequence parallelism


def taking_part(sequence_parallel: bool) -> list[str]:
    return [name for name, (package, _) in LIBRARIES.items()
            if importlib.util.find_spec(package) and not (sequence_parallel and name == ONLY_WITHOUT)]


# On a rank.

@dataclass
class Step:
    """What goes into a layer on this rank, and the gradient that comes back to it from what follows."""

    inputs: list
    upstream: Tensor | None  # None: the output is a loss

    def run(self, contender: Contender) -> Tensor:
        with contender.context():
            y = contender.model(*self.inputs)
            y.backward(self.upstream)
        contender.finish(contender.model)
        return y

    def forget(self, contender: Contender) -> None:
        for tensor in [*contender.model.parameters(), *self.inputs]:
            if isinstance(tensor, Tensor):
                tensor.grad = None


def make_step(layer: str, size: Size, rows: slice) -> Step:
    """The same numbers on all ranks, of which each takes its `rows` of the tokens."""
    random, tokens = torch.Generator().manual_seed(1), size.batch * size.sequence
    if layer == "embedding + loss":
        ids, target = torch.randint(size.vocab, (2, tokens), generator=random)
        return Step([ids, target], None)
    x, upstream = torch.randn(2, tokens, size.dim, generator=random)
    x = x[rows].clone().requires_grad_()
    return Step([x] if layer == "MLP" else [x, size.sequence], upstream[rows].clone())


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def results(step: Step, contender: Contender) -> dict[str, Tensor]:
    """Output and gradients of one step."""
    step.forget(contender)
    found = {"output": local(step.run(contender)).detach()}
    if step.inputs[0].requires_grad:
        found["input"] = step.inputs[0].grad
    found |= {name: local(p.grad) for name, p in contender.model.named_parameters()}
    return found


def check(name: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raises ValueError if a library does not compute what one process does."""
    for what, want in expected.items():
        if found[what].shape != want.shape:
            raise ValueError(f"{name}: {what} has shape {tuple(found[what].shape)}, not {tuple(want.shape)}")
        difference = ((found[what] - want).abs().max() / want.abs().max()).item()
        if not difference < TOLERANCE:
            raise ValueError(f"{name}: {what} differs from one process' by {difference:.0e} of its greatest")


def compare(mesh: DeviceMesh, layer: str, size: Size, sequence_parallel: bool,
            names: list[str]) -> dict[str, tuple]:
    """For each library the seconds of a step in every round, and this rank's calls and bytes in one."""
    group, tokens = mesh["tp"], size.batch * size.sequence
    rows = my_slice(tokens, group) if sequence_parallel else slice(0, tokens)
    contenders = {name: LIBRARIES[name][1](layer, size, group, sequence_parallel) for name in names}
    start, expected = reference(layer, size, rows, model_layouts(contenders["tpcourse"].model, group))
    step, sent = make_step(layer, size, rows), {}
    for name, contender in contenders.items():
        with torch.no_grad():
            for key, p in contender.model.named_parameters():
                local(p).copy_(start[key])
        check(name, results(step, contender), expected)
        with ledger() as book:
            step.run(contender)
        sent[name] = book.total("calls"), book.total("wire_bytes")
    seconds = take_turns(step, contenders, size)
    return {name: (seconds[name], *sent[name]) for name in contenders}


def reference(layer: str, size: Size, rows: slice, layouts: dict[str, Layout]) -> tuple[dict, dict]:
    """This rank's parts of the weights that all start with, and of what one process then makes of them."""
    torch.manual_seed(0)
    dense = Contender(build(layer, Dense(), size))
    for p in dense.model.parameters():
        nn.init.normal_(p, std=0.3 if p.dim() == 1 else p.size(-1) ** -0.5)
    found = results(make_step(layer, size, slice(0, size.batch * size.sequence)), dense)
    parts = {name: layout.take(found[name]) for name, layout in layouts.items()}
    parts |= {what: found[what][rows] if found[what].dim() else found[what]
              for what in ("output", "input") if what in found}
    return {name: layout.take(dense.model.get_parameter(name)) for name, layout in layouts.items()}, parts


def take_turns(step: Step, contenders: dict[str, Contender], size: Size) -> dict[str, list[float]]:
    """Seconds a step, of each round; in each another library begins, and the first round does not count."""
    seconds, names = {name: [] for name in contenders}, list(contenders)
    for turn in range(size.rounds + 1):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(size.steps):
                step.forget(contenders[name])
                step.run(contenders[name])
            seconds[name].append((time.perf_counter() - begun) / size.steps)
    return {name: times[1:] for name, times in seconds.items()}


# The table.

@dataclass(frozen=True)
class Row:
    """One layer at one size on so many ranks, as all libraries did it."""

    ranks: int
    shapes: str
    layer: str
    sequence_parallel: bool


def seconds_of_rounds(outcomes: list[dict], name: str) -> list[float]:
    """What a round took: what its slowest rank took."""
    return [max(ranks) for ranks in zip(*(outcome[name][0] for outcome in outcomes))]


def show_cell(outcomes: list[dict], name: str) -> str:
    """Median milliseconds, the median of how many times tpcourse's of the same round, calls and bytes."""
    if name not in outcomes[0]:
        return "-" if importlib.util.find_spec(LIBRARIES[name][0]) else "not installed"
    seconds, ours = seconds_of_rounds(outcomes, name), seconds_of_rounds(outcomes, "tpcourse")
    _, calls, sent = outcomes[0][name]
    ratio = statistics.median(theirs / mine for theirs, mine in zip(seconds, ours))
    median = statistics.median(seconds) * 1e3
    return (f"{median:,.{0 if median >= 20 else 1}f} ms" + (f" (x{ratio:.2f})" if name != "tpcourse" else "")
            + f"; {calls} calls, {sent / 1e3:,.0f} kB")


def table(measured: dict[Row, list[dict]]) -> list[list[str]]:
    rows = [["ranks", "shapes", "layer", *LIBRARIES]]
    for row, outcomes in measured.items():
        layer = row.layer + (", sequence parallel" if row.sequence_parallel else "")
        rows.append([str(row.ranks), row.shapes, layer, *(show_cell(outcomes, name) for name in LIBRARIES)])
    return rows


def measure(ranks: list[int], shapes: list[str]) -> dict[Row, list[dict]]:
    measured = {}
    for count in ranks:
        with tp.World(mesh={"tp": count}) as world:
            for row in (Row(count, s, layer, sp) for s in shapes for layer in LAYERS for sp in (False, True)):
                print(*vars(row).values(), file=sys.stderr)
                measured[row] = world.run(compare, row.layer, SIZES[row.shapes], row.sequence_parallel,
                                          taking_part(row.sequence_parallel), record=False, timeout=LIMIT_S)
    return measured


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="2 ranks, small shapes")
    parser.add_argument("--markdown", action="store_true", help="put the table into README.md")
    options = parser.parse_args(argv)
    notes = [machine()]
    measured = measure([2], ["small"]) if options.quick else measure(options.ranks, list(SIZES))
    notes[0] += f", {os.getloadavg()[0]:.1f} at the end"
    shapes = dict.fromkeys(row.shapes for row in measured)
    notes += [f"{name}: {SIZES[name]}" for name in shapes]
    rows = table(measured)
    print("\n".join([aligned(rows), "", *notes]))
    if options.markdown:
        put_into(ROOT / "README.md", "layers", markdown(rows, notes))


if __name__ == "__main__":
    main()
