"""tpcourse: tensor parallelism, from one column-split matrix to 3D parallelism.

``spawn``, ``World`` and the cell magic ``%%ranks`` run code on real ranks; ``ledger`` and ``saved_activations`` count what
it costs. The rooms: ``launch``, ``comm``, ``measure``, ``layers``, ``show`` and ``grade``.
"""

from tpcourse.launch import RankError, World, spawn
from tpcourse.launch.magic import load_ipython_extension

__all__ = ["RankError", "World", "load_ipython_extension", "spawn"]
