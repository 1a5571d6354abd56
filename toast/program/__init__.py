"""Programs in flat SSA form, and the shardings of their values."""

from toast.program.program import (
    Attribute,
    Builder,
    Location,
    Op,
    Program,
    Signature,
    TensorType,
    Value,
    element_bytes,
)
from toast.program.shardings import Shardings, Spec

__all__ = [
    "Attribute",
    "Builder",
    "Location",
    "Op",
    "Program",
    "Shardings",
    "Signature",
    "Spec",
    "TensorType",
    "Value",
    "element_bytes",
]
