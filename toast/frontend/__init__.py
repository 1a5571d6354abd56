"""First stage: a JAX function or StableHLO becomes a :class:`Program` (flat SSA)."""

from toast.program import (
    Builder,
    Location,
    Op,
    Program,
    Signature,
    TensorType,
    Value,
    element_bytes,
)

__all__ = [
    "Builder",
    "Location",
    "Op",
    "Program",
    "Signature",
    "TensorType",
    "Value",
    "element_bytes",
]
