"""What it really cost: bytes on the wire, bytes kept for backward, seconds."""

from .ledger import ledger
from .table import Row, Table
from .wire import wire_bytes

__all__ = ["Row", "Table", "ledger", "wire_bytes"]
