"""Values that are arguments, or parts of them: they are in memory, not made by the step."""

from __future__ import annotations

import numpy as np

from toast.cost.entities import Floats
from toast.program import Program

#: Ops whose result is in memory if their first operand is; it is another one in each run.
_PICKING = frozenset({"carry", "dynamic_slice", "dynamic_update_slice", "scatter"})

#: Ops whose result is in memory if their first operand is; it is the same one in each run.
_VIEWING = _PICKING | {
    "bitcast_convert", "convert", "optimization_barrier", "reshape", "slice", "transpose",
}  # fmt: skip


def argument_views(program: Program) -> Floats:
    """``[values]`` how often an argument, a part of one, or an updated one changes; 0 for others.

    A loop that reads the same argument in each of its iterations reads it from memory once.
    """
    views = np.zeros(len(program.values))
    views[list(program.argument_values)] = 1.0
    for number, op in enumerate(program.ops):
        kind = program.kind(number)
        if kind in _VIEWING and (runs := views[op.operands[0]]):
            views[op.results[0]] = program.repeats[number] if kind in _PICKING else runs
    return views


__all__ = ["argument_views"]
