"""Programs in flat SSA form, and the shardings of their values."""

from toast.program.kernel_costs import QUANTITIES, KernelCost
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
    "QUANTITIES",
    "Attribute",
    "Builder",
    "KernelCost",
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
