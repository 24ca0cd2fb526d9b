"""tpcourse: tensor parallelism, from one column-split matrix to 3D parallelism.

``spawn``, ``World`` and the cell magic ``%%ranks`` run code on real ranks; ``ledger`` and ``saved_activations`` count
what it costs, ``dry_run`` on more ranks than there are; ``calibrate`` measures the machine for predictions, and
``plan`` says which parallelism to use where. The rooms: ``launch``, ``comm``, ``measure``, ``layers``, ``schemes``,
``models``, ``predict``, ``plan``, ``show`` and ``grade``; ``train`` is a program.
"""

import importlib

from tpcourse.launch import RankError, World, spawn
from tpcourse.launch.magic import load_ipython_extension
from tpcourse.measure import dry_run, ledger, saved_activations
from tpcourse.plan import plan
from tpcourse.predict import calibrate

__all__ = ["RankError", "World", "calibrate", "dry_run", "ledger", "load_ipython_extension", "plan",
           "saved_activations", "spawn"]


def __getattr__(name: str) -> object:
    """`tp.train`, imported when it is asked for: `python -m tpcourse.train` is to be the first that does."""
    if name == "train":
        return importlib.import_module("tpcourse.train")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
