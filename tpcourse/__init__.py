"""tpcourse: tensor parallelism, from one column-split matrix to 3D parallelism.

``spawn``, ``World`` and the cell magic ``%%ranks`` run code on real ranks; ``ledger`` and ``saved_activations`` count what
it costs. The rooms: ``launch``, ``comm``, ``measure``, ``layers``, ``show`` and ``grade``.
"""

from tpcourse.launch import RankError, World, spawn
from tpcourse.launch.magic import load_ipython_extension
from tpcourse.measure import ledger, saved_activations

__all__ = ["RankError", "World", "ledger", "load_ipython_extension", "saved_activations", "spawn"]
