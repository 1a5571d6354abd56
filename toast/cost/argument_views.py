"""Values that are arguments, or parts of them: they are in memory, not made by the step."""

from __future__ import annotations

import numpy as np

from toast.cost.entities import Floats, Ints
from toast.program import Program

#: Ops whose result is another part of their first operand in each run.
_PICKING = frozenset({"dynamic_slice", "dynamic_update_slice", "scatter"})

#: Ops whose result is their first operand in another shape, or a part of it.
_MOVING = frozenset({
    "bitcast_convert", "optimization_barrier", "reshape", "slice", "transpose",
})  # fmt: skip

#: Ops whose result is in memory if their first operand is.
_VIEWING = _PICKING | _MOVING | {"carry", "convert"}


def argument_views(program: Program) -> Floats:
    """``[values]`` how often an argument, or a part of one, is copied; 0 for others.

    Loops read the copy of an argument from fast memory: one that is rounded, gathered or carried.
    It is made once, before the loop, and that of a part in each run.
    """
    views = np.zeros(len(program.values))
    views[list(program.argument_values)] = 1.0
    for number, op in enumerate(program.ops):
        kind = program.kind(number)
        if kind in _VIEWING and (runs := views[op.operands[0]]):
            views[op.results[0]] = program.repeats[number] if kind in _PICKING else runs
    return views


def whole_arguments(program: Program, product_operands: str) -> Ints:
    """``[values]`` the argument that it is, which loops read from memory in each run; -1 for none.

    Products round arguments of type float32 to ``product_operands``, if that is not empty, so that
    they read a copy.
    """
    own = np.full(len(program.values), -1, dtype=np.int64)
    for value in program.argument_values:
        if not product_operands or program.values[value].type.dtype != "f32":
            own[value] = value
    for number, op in enumerate(program.ops):
        if program.kind(number) in _MOVING:
            own[op.results[0]] = own[op.operands[0]]
    return own


__all__ = ["argument_views", "whole_arguments"]
