"""Which parts of a whole parameter a rank holds: what initialisation, norms and checkpoints need to know."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tpcourse.comm import Group, even_sizes, group_rank, my_slice


@dataclass(frozen=True)
class Piece:
    """A block of a rank's parameter: local[here] is whole[there].

    `owned` is true on exactly one of the ranks that hold a copy of the block.
    """

    here: tuple[slice, ...]
    there: tuple[slice, ...]
    owned: bool


@dataclass(frozen=True)
class Layout:
    """Where a rank's parameter lies in the whole one of `shape`; its pieces cover it, each entry once."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return tuple(max(piece.here[dim].stop for piece in self.pieces) for dim in range(len(self.shape)))

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, copied: contiguous, in memory of its own, without gradient.

        Raises ValueError if the tensor does not have the shape of the whole.
        """
        if whole.shape != self.shape:
            raise ValueError(f"the whole has shape {tuple(whole.shape)}, not {self.shape}; pass the "
                             "tensor of all ranks together")
        part = torch.empty(self.local_shape, dtype=whole.dtype, device=whole.device)
        for piece in self.pieces:
            part[piece.here] = whole.detach()[piece.there]
        return part


def replicated(shape: Sequence[int], group: Group | None) -> Layout:
    """Whole on every rank, and owned by the first; without a group this process is the only one."""
    everything = tuple(slice(0, n) for n in shape)
    return Layout(tuple(shape), (Piece(everything, everything, group is None or group_rank(group) == 0),))


def split_along(dim: int, shape: Sequence[int], spans: Sequence[slice],
                owned: Sequence[bool] | None = None) -> Layout:
    """This rank holds `spans` of dimension `dim`, one after the other, and the other dimensions whole.

    Without `owned`, no other rank holds any of them.
    """
    pieces, start = [], 0
    for span, is_owned in zip(spans, owned or [True] * len(spans)):
        here, there = ([slice(0, n) for n in shape] for _ in range(2))
        here[dim], there[dim] = slice(start, start + span.stop - span.start), span
        pieces.append(Piece(tuple(here), tuple(there), is_owned))
        start = here[dim].stop
    return Layout(tuple(shape), tuple(pieces))


def block_sizes(out_features: int, stride: int | Sequence[int], group: Group) -> list[int]:
    """The widths of the matrices that lie side by side: `stride` equal ones, or those it lists.

    Raises ValueError if they do not add up to out_features, or P does not divide one of them.
    """
    if isinstance(stride, int):
        if stride < 1 or out_features % stride:
            raise ValueError(f"out_features={out_features} are not stride={stride} equal blocks; pass "
                             "stride as the list of the blocks' sizes")
        stride = [out_features // stride] * stride
    if sum(stride) != out_features:
        raise ValueError(f"the blocks of stride={list(stride)} add up to {sum(stride)}, not to out_features="
                         f"{out_features}; pass blocks that do")
    for block in stride:
        one = len(stride) == 1
        even_sizes(block, group, f"out_features={block}" if one else f"a block of {block} in {list(stride)}")
    return list(stride)


def block_spans(blocks: Sequence[int], group: Group) -> list[slice]:
    """This rank's share of each of the blocks that lie one after the other along a dimension.

    Raises ValueError if P does not divide a block.
    """
    starts = [sum(blocks[:i]) for i in range(len(blocks))]
    shares = [my_slice(n, group) for n in blocks]
    return [slice(start + own.start, start + own.stop) for start, own in zip(starts, shares)]


def keep_own(layer: nn.Module, layouts: Mapping[str, Layout], whole: nn.Module) -> None:
    """Gives `layer` its part of each parameter that `whole` has itself; what is frozen stays frozen."""
    for name in whole._parameters:  # also those that are None
        parameter = getattr(whole, name)
        if parameter is not None:
            parameter = nn.Parameter(layouts[name].take(parameter), parameter.requires_grad)
        layer.register_parameter(name, parameter)


def check_shared(weight: nn.Parameter, own: nn.Parameter, group_text: str) -> nn.Parameter:
    """`weight`, if it can stand in for the layer's `own`; ValueError if it has another shape."""
    if weight.shape != own.shape:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, not {tuple(own.shape)} as this rank's "
                         f"part over {group_text}; pass that part of the weight to share")
    return weight


def model_layouts(model: nn.Module, group: Group | None) -> dict[str, Layout]:
    """The layout of every parameter of the model, by its full name; a shared one has one name, its first.

    A module says it of its own parameters by `layouts()`; those of modules without it are whole on all ranks.
    """
    layouts = {}
    for prefix, module in model.named_modules():
        said = module.layouts() if hasattr(module, "layouts") else {}
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            layouts[full] = said[name] if name in said else replicated(parameter.shape, group)
    return {name: layouts[name] for name, _ in model.named_parameters()}
