"""Values that are arguments, or parts of them: they are in memory, not made by the step."""

from __future__ import annotations

import numpy as np

from toast.cost.entities import Bools, Floats, Ints
from toast.program import Program

#: Ops whose result is another part of their first operand in each run.
_PICKING = frozenset({"dynamic_slice", "dynamic_update_slice", "scatter"})

#: Ops whose result is their first operand in another shape.
_MOVING = frozenset({"bitcast_convert", "optimization_barrier", "reshape", "transpose"})

#: Ops whose result has the dimensions of their operand.
_SAME_DIMENSIONS = frozenset({"convert", "optimization_barrier", "slice"})

#: Ops whose result is in memory if their first operand is.
_VIEWING = _PICKING | _MOVING | {"carry", "convert", "slice"}


def argument_views(program: Program) -> Floats:
    """``[values]`` in how many runs a step reads an argument, or a part, from memory; 0 for others.

    Loops read the copy of an argument from fast memory: one that is rounded, gathered, sliced or
    carried.  It is made once, before the loop, so that only one run reads the memory.  A part that
    each run picks anew has a copy in each.
    """
    views = [0.0] * len(program.values)
    for value in program.argument_values:
        views[value] = 1.0
    for number, kind in enumerate(program.kinds):
        if kind in _VIEWING:
            op = program.ops[number]
            if runs := views[op.operands[0]]:
                views[op.results[0]] = program.repeats[number] if kind in _PICKING else runs
    return np.array(views, dtype=np.float64)


def whole_arguments(program: Program, *, parts: bool = False) -> Ints:
    """``[values]`` the argument that a value is, in another shape at most; -1 for other values.

    With ``parts``, also those of which it is a slice.
    """
    moving = _MOVING | {"slice"} if parts else _MOVING
    own = [-1] * len(program.values)
    for value in program.argument_values:
        own[value] = value
    for op, kind in zip(program.ops, program.kinds, strict=True):
        if kind in moving:
            own[op.results[0]] = own[op.operands[0]]
    return np.array(own, dtype=np.int64)


def static_slices(program: Program) -> Bools:
    """``[values]`` static slices of any value, in another shape or element type at most."""
    slices, moving = [False] * len(program.values), _MOVING | {"convert", "slice"}
    for op, kind in zip(program.ops, program.kinds, strict=True):
        if kind in moving:
            slices[op.results[0]] = kind == "slice" or slices[op.operands[0]]
    return np.array(slices, dtype=bool)


def reshaped(program: Program, value: int) -> bool:
    """Whether a form or a part of an argument has other dimensions than the argument."""
    while (kind := program.kinds[program.makers[value]]) != "argument":
        if kind not in _SAME_DIMENSIONS:
            return True
        (value,) = program.ops[program.makers[value]].operands
    return False


__all__ = ["argument_views", "reshaped", "static_slices", "whole_arguments"]
