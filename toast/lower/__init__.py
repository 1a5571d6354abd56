"""Eighth stage: the SPMD partitioner, from a plan to the program of one device (GShard, 3.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toast import lazy

if TYPE_CHECKING:
    from toast.lower.lowering import GatheredOp, LocalCollective, LocalProgram, lower
    from toast.lower.op_sharding import OpFactors

__all__ = ["GatheredOp", "LocalCollective", "LocalProgram", "OpFactors", "lower"]

# Lazy, because plans are priced and explained without JAX.
lazy.package(
    __name__,
    {
        "lowering": ("GatheredOp", "LocalCollective", "LocalProgram", "lower"),
        "op_sharding": ("OpFactors",),
    },
)
