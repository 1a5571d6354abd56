"""Values that are arguments, or parts of them: they are in memory, not made by the step."""

from __future__ import annotations

import numpy as np

from toast.cost.entities import Floats, Ints
from toast.program import Program

#: Ops whose result is another part of their first operand in each run.
_PICKING = frozenset({"dynamic_slice", "dynamic_update_slice", "scatter"})

#: Ops whose result is their first operand in another shape.
_MOVING = frozenset({"bitcast_convert", "optimization_barrier", "reshape", "transpose"})

#: Ops whose result is in memory if their first operand is.
_VIEWING = _PICKING | _MOVING | {"carry", "convert", "slice"}


def argument_views(program: Program) -> Floats:
    """``[values]`` in how many runs a step reads an argument, or a part, from memory; 0 for others.

    Loops read the copy of an argument from fast memory: one that is rounded, gathered, sliced or
    carried.  It is made once, before the loop, so that only one run reads the memory.  A part that
    each run picks anew has a copy in each.
    """
    views = np.zeros(len(program.values))
    views[list(program.argument_values)] = 1.0
    for number, op in enumerate(program.ops):
        kind = program.kind(number)
        if kind in _VIEWING and (runs := views[op.operands[0]]):
            views[op.results[0]] = program.repeats[number] if kind in _PICKING else runs
    return views


def whole_arguments(program: Program) -> Ints:
    """``[values]`` the argument that a value is, in another shape at most; -1 for other values.

    Loops read it from memory in each run, if they need it as it is.
    """
    own = np.full(len(program.values), -1, dtype=np.int64)
    own[[*program.argument_values]] = program.argument_values
    for number, op in enumerate(program.ops):
        if program.kind(number) in _MOVING:
            own[op.results[0]] = own[op.operands[0]]
    return own


__all__ = ["argument_views", "whole_arguments"]
