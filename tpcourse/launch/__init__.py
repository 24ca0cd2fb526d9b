"""How a function gets onto N ranks: a clean fork server, persistent worlds, the cell magic, and what failures say."""

from tpcourse.launch.failures import CollectiveMismatch, RankDied, RankError, RankRaised, RanksStuck, Unsendable, WorldClosed
from tpcourse.launch.world import World, spawn

__all__ = [
    "CollectiveMismatch", "RankDied", "RankError", "RankRaised", "RanksStuck", "Unsendable", "World", "WorldClosed", "spawn",
]
