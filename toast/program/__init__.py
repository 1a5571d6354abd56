"""Programs in flat SSA form, and the shardings of their values."""

from toast.program.callback_targets import callback_ops, calls_python, has_callback_functions
from toast.program.kernel_costs import QUANTITIES, CausalQueries, KernelCost
from toast.program.memory_policy import (
    PRESETS,
    Block,
    BlockPolicy,
    Choice,
    MemoryPolicy,
    Residual,
    TracedMemory,
    is_residual_label,
    label_of_result,
    label_parts,
    preset,
    residual_label,
    survey,
)
from toast.program.passes import Pass
from toast.program.program import (
    Attribute,
    Builder,
    Location,
    Op,
    PaddedDimension,
    Program,
    Signature,
    TensorType,
    Value,
    element_bytes,
    has_collective,
)
from toast.program.run_ranges import RunRange
from toast.program.shardings import Shardings, Spec
from toast.program.trip_counts import UncountedLoop, uncounted_loops, with_trip_counts

__all__ = [
    "PRESETS",
    "QUANTITIES",
    "Attribute",
    "Block",
    "BlockPolicy",
    "Builder",
    "CausalQueries",
    "Choice",
    "KernelCost",
    "Location",
    "MemoryPolicy",
    "Op",
    "PaddedDimension",
    "Pass",
    "Program",
    "Residual",
    "RunRange",
    "Shardings",
    "Signature",
    "Spec",
    "TensorType",
    "TracedMemory",
    "UncountedLoop",
    "Value",
    "callback_ops",
    "calls_python",
    "element_bytes",
    "has_callback_functions",
    "has_collective",
    "is_residual_label",
    "label_of_result",
    "label_parts",
    "preset",
    "residual_label",
    "survey",
    "uncounted_loops",
    "with_trip_counts",
]
