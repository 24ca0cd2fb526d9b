"""The parallel layers: local matrix products between two collectives."""

from tpcourse.layers.column import ColumnParallelLinear

__all__ = ["ColumnParallelLinear"]
