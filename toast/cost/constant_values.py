"""Values that are computed from constants alone."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from toast.cost.entities import Bools
from toast.cost.liveness import BARRIERS, ROOTS, SOURCES
from toast.program import Program
from toast.space import BOUNDARY

#: Ops whose results depend on more than their operands, or are those of one device.
_ELSEWHERE = BOUNDARY | {"join"}


def constant_values(program: Program) -> Bools:
    """``[values]`` whether a value is computed from constants alone, by cheap ops."""
    return _constant(program, BARRIERS)


def remade_values(program: Program) -> Bools:
    """``[values]`` whether a device-local program computes a value anew for another sharding.

    These are constants that XLA fuses with their use: a device computes its shard only.
    """
    return _constant(program, BARRIERS | ROOTS)


def _constant(program: Program, excluded: Set[str]) -> Bools:
    constant, depends = [False] * len(program.values), set[int]()
    never = excluded | _ELSEWHERE
    for number, op in enumerate(program.makers):
        operands, kind = program.ops[op].operands, program.kinds[op]
        known = depends.isdisjoint(operands) if operands else kind in SOURCES
        constant[number] = known and kind not in never
        if not constant[number]:
            depends.add(number)
    return np.array(constant, dtype=bool)


__all__ = ["constant_values", "remade_values"]
