"""Values that are arguments, or parts of them: they are in memory, not made by the step."""

from __future__ import annotations

import numpy as np

from toast.cost.entities import Bools
from toast.program import Program

#: Ops whose result is in memory if their first operand is.  A loop carries such values, too.
_VIEWING = frozenset({
    "bitcast_convert", "carry", "convert", "dynamic_slice", "dynamic_update_slice",
    "optimization_barrier", "reshape", "scatter", "slice", "transpose",
})  # fmt: skip


def argument_views(program: Program) -> Bools:
    """``[values]`` whether a value is an argument, a part of one, or an updated one."""
    views = np.zeros(len(program.values), dtype=bool)
    views[list(program.argument_values)] = True
    for number, op in enumerate(program.ops):
        if program.kind(number) in _VIEWING and views[op.operands[0]]:
            views[op.results[0]] = True
    return views


__all__ = ["argument_views"]
