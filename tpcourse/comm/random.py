"""Random numbers in parallel: one stream that all ranks share, and one that each rank has for itself."""

import hashlib
from collections.abc import Sequence

import torch

from tpcourse.comm.groups import Group, group_rank, group_size


class RandomStates:
    """Two generators: `replicated` draws the same numbers on every rank, `sharded` others on each rank.

    Where ranks hold equal activations they must draw equal masks, and where they hold shards of one
    activation their masks must not repeat each other. Every draw advances its own stream only.

    On a mesh of several dimensions, activations may be equal along one of them and shards along the others:
    with `shards`, a group over the latter, `replicated` draws the same on ranks of the same place in it only.

    `seed` is the same on all ranks; the generators live on the default device (on the CPU if that is meta).
    Without a group it is the only rank, rank 0. Copies and pickles keep their place.

    Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053), appendix B.2.
    """

    def __init__(self, seed: int, group: Group | None, shards: Group | None = None) -> None:
        self.seed, rank = seed, 0 if group is None else group_rank(group)
        shard = "" if shards is None or group_size(shards) == 1 else f" {group_rank(shards)}"
        self.replicated = _generator(f"{seed} replicated{shard}")
        self.sharded = _generator(f"{seed} sharded {rank}")

    def get_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where both streams are, `replicated` first: two uint8 tensors on the CPU, for `set_state`."""
        return self.replicated.get_state(), self.sharded.get_state()

    def set_state(self, state: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Puts both streams where they were when `get_state` returned `state`."""
        for generator, own in zip((self.replicated, self.sharded), state, strict=True):
            generator.set_state(own)


class JointStates:
    """The streams of several `RandomStates`, which stand and are put somewhere together."""

    def __init__(self, states: Sequence[RandomStates]) -> None:
        self.states = tuple(states)

    def get_state(self) -> tuple:
        """Where all streams are: what each of the states says, in order."""
        return tuple(random.get_state() for random in self.states)

    def set_state(self, state: tuple) -> None:
        """Puts all streams where they were when `get_state` returned `state`."""
        for random, own in zip(self.states, state, strict=True):
            random.set_state(own)


def _generator(name: str) -> torch.Generator:
    """A generator on the default device whose numbers depend on the name alone."""
    device = torch.get_default_device()
    generator = torch.Generator("cpu" if device.type == "meta" else device)
    # A hash: with seed + rank, seed 1 on rank 0 would repeat seed 0 on rank 1.
    return generator.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]))
