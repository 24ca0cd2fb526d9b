"""The GPT as a program: trains on real text, byte by byte, on one rank or several.

    python -m tpcourse.train --tp 4 --steps 300 --save run
    torchrun --nproc-per-node 4 -m tpcourse.train --tp 4 --steps 300 --save run

Both do the same and give the same losses. The text is Python's own reference manual, which comes with Python,
or `--text FILE`. With `--save` a checkpoint is written every `--every` steps, and the same command goes on
from the last one: bit for bit on as many ranks, and on another number of ranks from the same weights.

With `--plan FILE` the model's sizes, the batch, the ranks and what each of them holds are those of a plan that
`Plan.save` wrote. From Python the same is, for a plan or its file,

    tpcourse.train.run(tpcourse.train.Config(plan=plan, steps=300, save="run"))
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpcourse.comm import Group, group_of, group_size
from tpcourse.launch import RankRaised, spawn
from tpcourse.layers import checkpoint
from tpcourse.layers.clip import clip_grad_norm_
from tpcourse.models import GPT, generate
from tpcourse.models.step import gradients
from tpcourse.plan import Plan
from tpcourse.plan.options import why_not
from tpcourse.plan.real import parts_of
from tpcourse.schemes import OneD

KEPT = 2  # checkpoints in a folder: the last and the one before it
BYTES = 256  # the words that this program knows
LONG_S = 7 * 24 * 3600  # no run is stopped for being slow; ranks that wait for each other are


def _option(default: object, says: str, *choices: str) -> dataclasses.Field:
    return dataclasses.field(default=default, metadata={"help": says, "choices": choices or None})


@dataclasses.dataclass(frozen=True)
class Config:
    """What is trained, on what, and how; each field is an option of the program.

    `plan`: a plan or its file; the fields that it decides have its values: sizes of the model, batch, and the
    ranks of a replica.
    Raises ValueError for numbers that make no sense, alone or together; for a plan that this program cannot
    run, and what is said otherwise than in the plan.
    """

    tp: int = _option(1, "ranks")
    sequence_parallel: bool = _option(False, "split tokens over the ranks between attention and MLP")
    recompute: str = _option("none", "what backward computes again", "none", "selective", "full")
    dim: int = _option(64, "features of a token")
    layers: int = _option(2, "blocks")
    heads: int = _option(4, "attention heads")
    kv_heads: int = _option(0, "key-value heads; 0: as many as heads")
    positions: str = _option("learned", "how a token knows its place", "learned", "rotary")
    activation: str = _option("gelu", "of the MLP", "gelu", "swiglu")
    norm: str = _option("layer", "LayerNorm or RMSNorm", "layer", "rms")
    untied: bool = _option(False, "give the head a weight of its own")
    context: int = _option(64, "bytes that the model looks back")
    batch: int = _option(16, "sequences a step")
    steps: int = _option(200, "steps in all, those of earlier runs included")
    lr: float = _option(3e-3, "learning rate of AdamW")
    clip: float = _option(1.0, "greatest norm of the gradient")
    dropout: float = _option(0.0, "share of activations that is dropped")
    seed: int = _option(0, "of weights, batches, dropout and sample")
    text: str = _option("", "a file to learn; without it Python's reference manual")
    save: str = _option("", "a folder for checkpoints, losses and their plot")
    every: int = _option(100, "steps between checkpoints")
    sample: int = _option(200, "bytes to write at the end")
    plan: str | Plan = _option("", "a plan's file: model sizes, batch and layout come from it")

    def __post_init__(self) -> None:
        if self.plan:
            self._take(Plan.load(self.plan) if isinstance(self.plan, str | os.PathLike) else self.plan)
        for name in ("tp", "dim", "layers", "heads", "context", "batch", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("kv_heads", "steps", "sample", "lr"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.sequence_parallel and self.context % self.tp:
            raise ValueError(f"context={self.context} does not divide by tp={self.tp}, and with sequence "
                             "parallelism each rank takes a share; make it "
                             f"{self.context + -self.context % self.tp}")

    def _take(self, plan: Plan) -> None:
        """Gives the fields that a plan decides its values."""
        _check_plan(plan)
        model = plan.model
        said = {"tp": plan.ranks, "batch": plan.global_batch, "dim": model.dim, "layers": model.num_layers,
                "heads": model.num_heads, "kv_heads": model.num_kv_heads or 0, "untied": not model.tied,
                "sequence_parallel": False, "recompute": "none"}  # these two each part has for itself
        said |= {name: getattr(model, name) for name in ("positions", "activation", "norm", "context", "dropout")}
        for field in dataclasses.fields(self):
            own, value = getattr(self, field.name), said.get(field.name)
            if field.name in said and own not in (field.default, value):
                raise ValueError(f"{field.name}={own!r}, and the plan has {value!r}; leave it out")
        for name, value in (said | {"plan": plan}).items():
            object.__setattr__(self, name, value)

    @property
    def mesh(self) -> dict[str, int]:
        """The ranks: those of the model; with a plan its replicas before them."""
        return {"dp": self.plan.replicas, "tp": self.tp} if self.plan else {"tp": self.tp}

    def model(self) -> dict:
        """The fields that decide which numbers are trained: a checkpoint goes on only with the same ones."""
        free = ("tp", "sequence_parallel", "recompute", "steps", "save", "every", "sample", "plan")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in free}


@dataclasses.dataclass(frozen=True)
class Result:
    """The loss of every step, in nats per byte, from the first on; and what the model wrote at the end."""

    losses: list[float]
    sample: str


def read_text(config: Config) -> Tensor:
    """The text's bytes, [length], 0 to 255. Raises ValueError if the file is not there or too short."""
    path = pathlib.Path(config.text)
    if config.text and not path.is_file():
        raise ValueError(f"--text {path}: there is no such file")
    text = path.read_bytes() if config.text else "\n\n".join(topics.values()).encode()
    if len(text) <= config.context:
        raise ValueError(f"--text {path}: {len(text)} bytes do not fill a context of {config.context} and "
                         "the byte after it; pass a longer text or a smaller --context")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.get_default_device())


def _check_plan(plan: Plan) -> None:
    """Raises ValueError for a plan that this program cannot run."""
    if plan.stages > 1:
        raise ValueError(f"the plan has {plan.stages} stages, and this program has no pipeline; plan for one "
                         "stage")
    if plan.model.vocab_size < BYTES:
        raise ValueError(f"the plan has vocab_size={plan.model.vocab_size}, and there are {BYTES} different "
                         f"bytes; plan for {BYTES} or more")
    for scheme in plan.schemes:
        if why := why_not(plan.model, scheme, plan.micro_batch):
            raise ValueError(f"the plan cannot be run: {why}")


def batch(text: Tensor, step: int, config: Config) -> tuple[Tensor, Tensor]:
    """Step `step`'s windows of the text and the bytes that follow: [batch, context] twice.

    Seed and step alone choose them, so that every rank, and a run that goes on, reads the same.
    """
    generator = torch.Generator(device="cpu").manual_seed(config.seed * 1_000_003 + step)
    start = torch.randint(len(text) - config.context, (config.batch, 1), generator=generator, device="cpu")
    window = text[(start + torch.arange(config.context + 1, device="cpu")).to(text.device)].long()
    return window[:, :-1], window[:, 1:]


def build(config: Config, mesh: DeviceMesh) -> tuple[GPT, torch.optim.Optimizer]:
    """The model's part for this rank, and its optimizer."""
    if config.plan:
        parts = parts_of(config.plan, mesh, config.seed)
        model = GPT(parts, **dataclasses.asdict(config.plan.model), seed=config.seed)
        return model, torch.optim.AdamW(model.parameters(), lr=config.lr)
    scheme = OneD(mesh["tp"], config.sequence_parallel, config.seed)
    model = GPT(scheme, BYTES, config.context, config.dim, config.layers, config.heads,
                num_kv_heads=config.kv_heads or None, positions=config.positions, norm=config.norm,
                activation=config.activation, tied=not config.untied, dropout=config.dropout,
                recompute=config.recompute, seed=config.seed)
    return model, torch.optim.AdamW(model.parameters(), lr=config.lr)


def train(mesh: DeviceMesh, config: Config) -> Result:
    """What each rank runs: goes on from the folder's last checkpoint, if there is one."""
    text = read_text(config)
    model, optimizer = build(config, mesh)
    losses = resume(config, model, optimizer, mesh)
    replicas, size = (mesh["dp"], config.plan.micro_batch) if config.plan else (None, config.batch)
    clock = time.perf_counter()
    for step in range(len(losses), config.steps):
        optimizer.zero_grad()
        loss = gradients(model, *batch(text, step, config), size, replicas)
        clip_grad_norm_(model, config.clip, mesh["tp"])
        optimizer.step()
        losses.append(_mean(loss, replicas).item())
        clock = _progress(mesh, config, losses, clock)
        if config.save and (step + 1 == config.steps or (step + 1) % config.every == 0):
            save(config, model, optimizer, mesh, losses)
    return Result(losses, _speak(model, text, config))


def _mean(loss: Tensor, replicas: Group | None) -> Tensor:
    """The loss of the whole batch, from those of each replica's share."""
    if replicas is not None and group_size(replicas) > 1:
        dist.all_reduce(loss, group=group_of(replicas))
        loss /= group_size(replicas)
    return loss


def _progress(mesh: DeviceMesh, config: Config, losses: list[float], clock: float, lines: int = 10) -> float:
    step, now = len(losses), time.perf_counter()
    every = max(1, config.steps // lines)
    if step % every:
        return clock
    if mesh.get_rank() == 0:
        speed = every * config.batch * config.context / (now - clock)
        print(f"step {step:>6} of {config.steps}   loss {losses[-1]:.4f}   {speed:,.0f} bytes of text/s",
              flush=True)
    return now


def _speak(model: GPT, text: Tensor, config: Config) -> str:
    written = generate(model, text[:8].long(), config.sample, temperature=0.7, seed=config.seed)
    known = [word for word in written.tolist() if word < BYTES]  # a plan's vocabulary may be padded
    return bytes(known).decode(errors="replace")


def _checkpoints(config: Config) -> list[pathlib.Path]:
    return sorted(filter(checkpoint.is_checkpoint, pathlib.Path(config.save).glob("step_" + 8 * "[0-9]")))


def save(config: Config, model: GPT, optimizer: torch.optim.Optimizer, mesh: DeviceMesh,
         losses: list[float]) -> None:
    """A checkpoint, which the first replica writes, with the streams of all ranks; the folder keeps two."""
    random = [None] * mesh.size()
    dist.all_gather_object(random, model.scheme.random.get_state())
    extra = {"model": config.model(), "losses": losses, "random": random, "plan": str(config.plan)}
    path = pathlib.Path(config.save) / f"step_{len(losses):08}"
    if not config.plan or mesh.get_local_rank("dp") == 0:
        checkpoint.save(path, model, optimizer, mesh["tp"], extra)
    if mesh.get_rank() == 0:
        for old in _checkpoints(config)[:-KEPT]:
            shutil.rmtree(old)


def resume(config: Config, model: GPT, optimizer: torch.optim.Optimizer,
           mesh: DeviceMesh) -> list[float]:
    """Load the folder's last checkpoint, if there is one; the losses of the steps that it has behind it.

    Raises ValueError if it is of another model, and says in what.
    """
    saved = _checkpoints(config) if config.save else []
    if not saved:
        return []
    extra = checkpoint.load(saved[-1], model, optimizer, mesh["tp"])
    here = config.model()
    if extra["model"] != here:
        says = [f"{name}={was} there and {here[name]} here" for name, was in extra["model"].items()
                if was != here[name]]
        raise ValueError(f"{saved[-1]} is of another run: {', '.join(says)}; give the same options, or "
                         "another --save folder")
    as_saved = len(extra["random"]) == mesh.size() and extra.get("plan", "") == str(config.plan)
    if as_saved:  # on another number of ranks, or by another plan, dropout draws anew
        model.scheme.random.set_state(extra["random"][mesh.get_rank()])
    return extra["losses"]


def plot(losses: list[float], path: pathlib.Path) -> None:
    """The loss of every step as a picture."""
    from matplotlib.figure import Figure
    axes = Figure(figsize=(6.4, 3.6), layout="constrained").add_subplot()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(title="Learning the next byte", xlabel="step", ylabel="loss (nats per byte)")
    axes.figure.savefig(path)


def options() -> argparse.ArgumentParser:
    """The program's options: one for each field of `Config`."""
    parser = argparse.ArgumentParser("python -m tpcourse.train", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Config):
        name, kind, says = f"--{field.name.replace('_', '-')}", type(field.default), field.metadata["help"]
        if kind is bool:
            parser.add_argument(name, action="store_true", help=says)
        else:
            parser.add_argument(name, type=kind, default=field.default, choices=field.metadata["choices"],
                                metavar=None if field.metadata["choices"] else kind.__name__,
                                help=f"{says} (default {field.default!r})")
    return parser


def run(config: Config) -> Result:
    """Trains on ranks of its own or, in one that torchrun has started, on those.

    Raises ValueError or OSError, before any rank starts, for a text or a folder that cannot be used.
    """
    read_text(config)
    if config.save:
        pathlib.Path(config.save).mkdir(parents=True, exist_ok=True)
    return spawn(train, config, mesh=config.mesh, timeout=LONG_S)[0]


def main() -> None:
    """Train, and print the losses' end and a sample; with `--save`, also store the losses and their plot."""
    chosen = vars(options().parse_args())
    try:
        config = Config(**chosen)
        result = run(config)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
    except RankRaised as error:  # its first line has the message, the others where it was raised
        raise SystemExit(str(error).partition("\n")[0]) from None
    if int(os.environ.get("RANK", 0)) == 0:
        if result.losses:
            print(f"loss of the last step {result.losses[-1]!r}\n")
        print(result.sample)
        if config.save and result.losses:
            folder = pathlib.Path(config.save)
            folder.joinpath("losses.txt").write_text("\n".join(map(repr, result.losses)) + "\n")
            plot(result.losses, folder / "losses.png")


if __name__ == "__main__":
    main()
