"""The SPMD partitioner: from a plan to the program of one device (paper, 2.1; GShard, 3.3)."""

from toast.lower.lowering import GatheredOp, LocalCollective, LocalProgram, lower

__all__ = ["GatheredOp", "LocalCollective", "LocalProgram", "lower"]
