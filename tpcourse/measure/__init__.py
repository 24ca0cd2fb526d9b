"""What it really cost: bytes on the wire, bytes kept for backward, seconds."""

from .activations import Saved, SavedActivations, saved_activations
from .clock import bus_bandwidth, fit_alpha_beta, time_collective
from .dry import DryRun, dry_run
from .ledger import ledger
from .table import Row, Table
from .wire import wire_bytes

__all__ = [
    "DryRun", "Row", "Saved", "SavedActivations", "Table", "bus_bandwidth", "dry_run", "fit_alpha_beta",
    "ledger", "saved_activations", "time_collective", "wire_bytes",
]  # fmt: skip
