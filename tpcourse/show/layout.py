"""Which rank holds which block of a tensor, as plain data: described, read from a DTensor, or found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpcourse.comm.groups import split_sizes

Range = tuple[int, int]  # start, stop
Split = dict[int, "str | tuple[str, ...]"]


@dataclass(frozen=True)
class Layout:
    """The block of each rank: `blocks[rank][dim]` is (start, stop) in the tensor of `shape`.

    Plain data, so a rank can return it. `mesh` maps each mesh dimension's name to its size, the last varying
    fastest. Along the mesh dimensions in `partial` ranks with the same block hold no copies but the terms of
    a sum that is yet to be made.
    """

    shape: tuple[int, ...]
    mesh: dict[str, int]
    blocks: tuple[tuple[Range, ...], ...]
    partial: tuple[str, ...] = ()

    def holders(self) -> dict[tuple[Range, ...], list[int]]:
        """The ranks that hold each distinct block; blocks without elements are left out."""
        found: dict[tuple[Range, ...], list[int]] = {}
        for rank, block in enumerate(self.blocks):
            if all(stop > start for start, stop in block):
                found.setdefault(block, []).append(rank)
        return found

    def empty_ranks(self) -> list[int]:
        """The ranks that hold no element."""
        return [rank for rank, block in enumerate(self.blocks) if any(stop <= start for start, stop in block)]


def describe(shape: Sequence[int], mesh: dict[str, int], split: Split | None = None,
             partial: str | tuple[str, ...] = ()) -> Layout:
    """The layout of a tensor whose dimension d is split over mesh dimension(s) `split[d]`.

    Blocks of one dimension differ by at most one element, the larger ones first, as `torch.tensor_split`
    makes them. With several mesh dimensions, each splits what the one before it left. Along the mesh
    dimension(s) `partial` ranks hold terms of a sum; along the others, which split nothing, copies.

    Raises:
        ValueError: a tensor dimension or mesh dimension that is not there, or a mesh dimension used twice.
    """
    axes = {dim: (names,) if isinstance(names, str) else tuple(names) for dim, names in (split or {}).items()}
    terms = (partial,) if isinstance(partial, str) else tuple(partial)
    used = [*(name for names in axes.values() for name in names), *terms]
    for dim in axes:
        if not 0 <= dim < len(shape):
            raise ValueError(f"split names dimension {dim}; shape {tuple(shape)} has 0 to {len(shape) - 1}")
    for name in used:
        if name not in mesh:
            raise ValueError(f"split names mesh dimension {name!r}; the mesh has {', '.join(mesh)}")
        if used.count(name) > 1:
            twice = "is both split and partial" if name in terms else "splits two dimensions"
            raise ValueError(f"mesh dimension {name!r} {twice}; it can split only one")
    return _cut(tuple(shape), dict(mesh), axes, _even, terms)


def layout(tensor: Any) -> Layout:
    """The layout of a real DTensor; a rank calls and returns it, and `show.blocks(outs[0])` draws it.

    Args:
        tensor: a DTensor whose placements are `Shard`, `Replicate` or `Partial` (a sum); its uneven blocks are
            `torch.chunk`'s.

    Raises:
        ValueError: another placement, a mesh that is not all ranks in order (such as `mesh["dp"]` of two
            dimensions), or a local tensor that is not the block which the placements promise.
    """
    ranks, world = tensor.device_mesh.mesh.flatten().tolist(), torch.distributed.get_world_size()
    if ranks != list(range(world)):
        raise ValueError(f"the tensor's mesh holds ranks {ranks}, not 0 to {world - 1} in order; distribute "
                         "it over the whole mesh, with Replicate() along the dimensions that do not split it")
    sizes, names = tensor.device_mesh.shape, tensor.device_mesh.mesh_dim_names
    names = names or tuple(f"dim{i}" for i in range(len(sizes)))
    axes: dict[int, tuple[str, ...]] = {}
    terms: tuple[str, ...] = ()
    for name, placement in zip(names, tensor.placements):
        if type(placement) is torch.distributed.tensor.Shard:
            axes[placement.dim] = axes.get(placement.dim, ()) + (name,)
        elif placement == torch.distributed.tensor.Partial():
            terms += (name,)
        elif not placement.is_replicate():
            raise ValueError(f"placement {placement} over {name!r} is neither Shard, Replicate nor a sum")
    found = _cut(tuple(tensor.shape), dict(zip(names, sizes)), axes, _chunked, terms)
    flat = 0
    for size, coordinate in zip(sizes, tensor.device_mesh.get_coordinate()):
        flat = flat * size + coordinate
    promised, local = tuple(b - a for a, b in found.blocks[flat]), tuple(tensor.to_local().shape)
    if promised != local:
        raise ValueError(f"the local tensor has shape {local}; {tensor.placements} promise {promised}")
    return found


def locate(full: torch.Tensor, parts: Sequence[torch.Tensor], mesh: dict[str, int] | None = None) -> Layout:
    """The layout of real shards: where each rank's part lies in `full`, found by looking for its values.

    Args:
        full: the whole tensor, its values all different (`torch.arange(...)` makes a good one).
        parts: one tensor per rank, as `tp.spawn` returns them.
        mesh: names and sizes of the mesh dimensions; one dimension "tp" where left out.

    Raises:
        ValueError: values of `full` that repeat, or a part that is no block of `full`.
    """
    if full.unique().numel() != full.numel():
        raise ValueError("values of the full tensor repeat, so a part's place is not known; use torch.arange")
    blocks = tuple(_place(full, part, rank) for rank, part in enumerate(parts))
    return Layout(tuple(full.shape), mesh or {"tp": len(parts)}, blocks)


def _place(full: torch.Tensor, part: torch.Tensor, rank: int) -> tuple[Range, ...]:
    if part.dim() == full.dim() and part.numel() == 0:
        return tuple((0, size) for size in part.shape)
    corner = (full == part.flatten()[0]).nonzero() if part.dim() == full.dim() else []
    if len(corner):
        block = tuple((start, start + size) for start, size in zip(corner[0].tolist(), part.shape))
        if torch.equal(full[tuple(slice(*edge) for edge in block)], part):
            return block
    shapes = f"shape {tuple(part.shape)}, is no block of the full tensor, shape {tuple(full.shape)}"
    raise ValueError(f"rank {rank}'s part, {shapes}")


def _cut(shape: tuple[int, ...], mesh: dict[str, int], axes: dict[int, tuple[str, ...]],
         edges: Callable[[int, int, int], Range], partial: tuple[str, ...]) -> Layout:
    blocks = []
    for place in itertools.product(*(range(size) for size in mesh.values())):
        at = dict(zip(mesh, place))
        block = [(0, size) for size in shape]
        for dim, names in axes.items():
            for name in names:
                start, stop = block[dim]
                low, high = edges(stop - start, mesh[name], at[name])
                block[dim] = (start + low, start + high)
        blocks.append(tuple(block))
    return Layout(shape, mesh, tuple(blocks), partial)


def _even(size: int, parts: int, index: int) -> Range:
    sizes = split_sizes(size, parts)
    return sum(sizes[:index]), sum(sizes[:index + 1])


def _chunked(size: int, parts: int, index: int) -> Range:
    step = math.ceil(size / parts)
    return min(index * step, size), min((index + 1) * step, size)
