"""Checkpoints that any number of ranks writes and any other reads: layouts say where each piece lies.

torch.distributed.checkpoint stores every owned piece as a chunk of the whole tensor, and finds for a piece
to load the chunks that overlap it.
"""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (ChunkStorageMetadata, Metadata, MetadataIndex,
                                                   TensorProperties, TensorStorageMetadata)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tpcourse.comm import Group, group_of, group_rank
from tpcourse.layers.layout import Layout, Piece, model_layouts, replicated

Held = dict[str, tuple[Tensor, Layout]]  # by name, what this rank holds, and where it lies in the whole


def save(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group | None,
         extra: object) -> None:
    """Writes the model, the optimizer and `extra` to the folder `path`; every entry is written by its owner.

    All ranks of the group make the call, with a path on a disk that all see; without a group this process
    has the whole model. `extra` is any object that pickles; rank 0's is saved. The checkpoint is written
    beside `path` and then renamed to it, so that a crash leaves what was there before: `load` finds it.
    Of several replicas of the model one makes the call, or each with a path of its own.
    Raises ValueError, on all ranks, if something is at `path` that is no checkpoint, or the optimizer keeps
    what is neither one number nor in the shape of its parameter, for a parameter that is split.
    """
    _check_free(Path(path))
    path, first = Path(path), group is None or group_rank(group) == 0
    new, old = _beside(path, "new"), _beside(path, "old")
    if first:
        shutil.rmtree(new, ignore_errors=True)  # what a crash left
    _wait(group)
    named = _model_state(model, group) | _optimizer_state(model, optimizer, group)
    state = {name: _Pieces(*held) for name, held in named.items()}
    if first:
        state["rest"] = {"extra": extra, "groups": _options(optimizer)}
    planner = _SavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=new, planner=planner, **_among(group))
    if first:
        _replace(path, new, old)
    _wait(group)


def load(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group | None) -> object:
    """Loads what `save` wrote, on any number of ranks, into a model and its optimizer; returns `extra`.

    All ranks of the group make the call. Values are converted to the dtypes that model and optimizer have.
    The folder must come from a trusted source: reading it unpickles.
    Raises FileNotFoundError if there is no checkpoint; ValueError, before anything is changed, if it has a
    parameter that the model lacks, or the other way round, or of another shape, or more or fewer groups of
    parameters than the optimizer.
    """
    path = _last_whole(Path(path))
    metadata = dcp.FileSystemReader(path).read_metadata()
    named = _model_state(model, group)
    _check(_shapes_in(metadata, "model."), named, path)
    rest = _read({"rest": None}, path, group)["rest"]
    _check_groups(rest["groups"], optimizer)
    moments = _room_for_moments(metadata, model, optimizer, group)
    _read({name: _Pieces(*held) for name, held in (named | moments).items()}, path, group)
    _give(optimizer, model, moments, rest["groups"])
    return rest["extra"]


def export_safetensors(model: nn.Module, path: str | Path, group: Group | None) -> None:
    """Writes the whole parameters and buffers to one safetensors file, under the names of the dense model.

    A shared parameter has one name, its first. All ranks of the group make the call; rank 0 puts the tensors
    together one by one, needs memory for all of them, and writes.
    """
    path, wholes, first = Path(path), {}, group is None or group_rank(group) == 0
    for name, (own, layout) in _model_state(model, group).items():
        whole = own.new_zeros(layout.shape)
        for piece in layout.pieces:
            if piece.owned:
                whole[piece.there] = own[piece.here]
        if group is not None:
            dist.reduce(whole.view(-1).view(torch.uint8), group=group_of(group), group_dst=0)  # exact: bytes
        if first:
            wholes[name.removeprefix("model.")] = whole.cpu()
    if first:
        save_file(wholes, _beside(path, "new"))
        _beside(path, "new").replace(path)
    _wait(group)


def import_safetensors(model: nn.Module, path: str | Path, group: Group | None) -> None:
    """Loads this rank's part of each tensor in a file that `export_safetensors` wrote, or a dense model's.

    Raises ValueError, before anything is changed, if the file and the model do not have the same parameters.
    """
    named = _model_state(model, group)
    with safe_open(path, "pt") as file:
        shapes = {f"model.{name}": tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        _check(shapes, named, path)
        for name, (own, layout) in named.items():
            own.copy_(layout.take(file.get_tensor(name.removeprefix("model."))))


def _among(group: Group | None) -> dict:
    """Who takes part, as torch.distributed.checkpoint wants to be told."""
    return {"no_dist": True} if group is None else {"process_group": group_of(group)}


def _wait(group: Group | None) -> None:
    if group is not None:
        dist.barrier(group_of(group))


def _read(state: dict, path: Path, group: Group | None) -> dict:
    """The state, filled with what the checkpoint has under its names."""
    planner = _LoadPlanner(flatten_state_dict=False)
    dcp.load(state, checkpoint_id=path, planner=planner, **_among(group))
    return state


class _Pieces:
    """What this rank holds of a tensor, as the protocol of torch.distributed.checkpoint asks for it."""

    def __init__(self, own: Tensor, layout: Layout) -> None:
        self.own, self.layout = own, layout

    def size(self) -> torch.Size:
        return torch.Size(self.layout.shape)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.own)
        return [WriteItem(MetadataIndex(name, _offset(piece)), WriteItemType.SHARD,
                          tensor_data=TensorWriteData(_chunk(piece), properties, self.size()))
                for piece in self.layout.pieces if piece.owned]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(piece) for piece in self.layout.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(self.own[piece.here] for piece in self.layout.pieces if _offset(piece) == index.offset)


class _SavePlanner(dcp.DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> object:
        held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index) if isinstance(held, _Pieces) else super().lookup_object(index)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def set_up_planner(self, state_dict: dict, metadata: Metadata | None = None,
                       is_coordinator: bool = False) -> None:
        self.original_state_dict = self.state_dict = state_dict  # the default drops what is no tensor
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


def _offset(piece: Piece) -> torch.Size:
    return torch.Size(part.start for part in piece.there)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(_offset(piece), torch.Size(part.stop - part.start for part in piece.there))


def _model_state(model: nn.Module, group: Group | None) -> Held:
    """Parameters, and the buffers that a state dict has, which are whole on every rank."""
    layouts, kept = model_layouts(model, group), model.state_dict().keys()
    state = {name: (p.detach(), layouts[name]) for name, p in model.named_parameters()}
    state |= {name: (b, replicated(b.shape, group)) for name, b in model.named_buffers() if name in kept}
    return {f"model.{name}": held for name, held in state.items()}


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, group: Group | None) -> Held:
    """What the optimizer keeps for each parameter: moments lie as it does, numbers are on every rank."""
    layouts, state = model_layouts(model, group), {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                whole = value.shape != parameter.shape
                if whole and value.numel() > 1 and layouts[name].shape != parameter.shape:
                    raise ValueError(f"the optimizer's {key} of {name} has shape {tuple(value.shape)}, for a "
                                     f"part {tuple(parameter.shape)} of {layouts[name].shape}: where it lies "
                                     "is not known; use an optimizer entry by entry, such as SGD or AdamW")
                layout = replicated(value.shape, group) if whole else layouts[name]
                state[f"optimizer.{key}.{name}"] = value, layout
    return state


def _room_for_moments(metadata: Metadata, model: nn.Module, optimizer: torch.optim.Optimizer,
                      group: Group | None) -> Held:
    """Room for what the checkpoint has of this optimizer's parameters."""
    layouts, parameters, room = model_layouts(model, group), dict(model.named_parameters()), {}
    steered = {p for options in optimizer.param_groups for p in options["params"]}
    for full, stored in metadata.state_dict_metadata.items():
        name = full.split(".", 2)[-1]
        if full.startswith("optimizer.") and parameters[name] in steered:
            like, shape = parameters[name], tuple(stored.size)
            layout = layouts[name] if shape == layouts[name].shape else replicated(shape, group)
            device = like.device if layout is layouts[name] else "cpu"
            room[full] = torch.zeros(layout.local_shape, dtype=stored.properties.dtype, device=device), layout
    return room


def _options(optimizer: torch.optim.Optimizer) -> list[dict]:
    """Learning rates and the like, for each group of parameters."""
    return [{k: v for k, v in options.items() if k != "params"} for options in optimizer.param_groups]


def _check_groups(saved: list[dict], optimizer: torch.optim.Optimizer) -> None:
    if len(saved) != len(optimizer.param_groups):
        raise ValueError(f"the checkpoint has {len(saved)} groups of parameters and the optimizer "
                         f"{len(optimizer.param_groups)}; build it with as many")


def _give(optimizer: torch.optim.Optimizer, model: nn.Module, moments: Held, options: list[dict]) -> None:
    """Puts loaded moments and options into the optimizer, whose state dict numbers parameters by group."""
    numbers = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    parameters, state = dict(model.named_parameters()), optimizer.state_dict()
    state["state"] = {}
    for full, (value, _) in moments.items():
        _, key, name = full.split(".", 2)
        state["state"].setdefault(numbers[parameters[name]], {})[key] = value
    for group, saved in zip(state["param_groups"], options):
        group.update(saved)
    optimizer.load_state_dict(state)


def _shapes_in(metadata: Metadata, prefix: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(stored.size) for name, stored in metadata.state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(stored, TensorStorageMetadata)}


def _check(stored: dict[str, tuple[int, ...]], named: Held, path: str | Path) -> None:
    """Raises ValueError if not the same names are there, or not with the same shapes."""
    wanted = {name: tuple(layout.shape) for name, (_, layout) in named.items()}
    for name in sorted(stored.keys() | wanted.keys()):
        if stored.get(name) != wanted.get(name):
            there, here = (f"shape {shapes[name]}" if name in shapes else "no such parameter"
                           for shapes in (stored, wanted))
            raise ValueError(f"{name.removeprefix('model.')} has {there} in {path} and {here} in the model; "
                             "build the model that was saved")


def _beside(path: Path, what: str) -> Path:
    """A hidden sibling, on the same disk, that is renamed to or from `path`."""
    return path.with_name(f".{path.name}.{what}")


def is_checkpoint(path: str | Path) -> bool:
    """Whether `save` has written this folder."""
    return (Path(path) / ".metadata").is_file()


def _check_free(path: Path) -> None:
    if path.exists() and not is_checkpoint(path):
        raise ValueError(f"{path} exists and is no checkpoint, which saving would replace; pass another path")


def _last_whole(path: Path) -> Path:
    """`path`, or what a crash between the two renamings of `_replace` has left of it."""
    for folder in (path, _beside(path, "old")):
        if is_checkpoint(folder):
            return folder
    raise FileNotFoundError(f"{path.parent} holds no checkpoint {path.name}; pass the path given to save")


def _replace(path: Path, new: Path, old: Path) -> None:
    """Renames `new` to `path`; at every moment `path` or `old` is a whole checkpoint, if there was one."""
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)
