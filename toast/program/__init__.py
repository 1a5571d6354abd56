"""The program, as flat SSA, and the shardings of its values: between frontends and backends."""

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
