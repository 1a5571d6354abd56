"""Copies of the stacks that a loop reads beside values from the memory of the host.

Such a loop fetches for the next iteration, so that XLA for TPUs runs one iteration outside of it.
Norms add up the width of a layer's input.  If the sequence is longer, it is in the lanes of tiles
inside the loop, but the width is outside of it.  XLA copies the whole stack before the loop.
"""

from __future__ import annotations

import numpy as np

from toast.cost.entities import Entity, Floats
from toast.cost.host_memory import fetching_loops
from toast.cost.layout import Layout
from toast.cost.liveness import Lifetimes, LiveRanges
from toast.cost.terms.term import Term
from toast.program import Program
from toast.space import PRODUCTS

#: The share of such stacks that are copied.  In compiled programs, most were if parameters were
#: sharded over all devices, and none if a device had a part of the heads.
_COPIED = 0.5

#: Ops between a slice of the stack and the sum of a norm, at most.
_MOST_OPS = 12

#: The dimension of the sequence: that of iterations and that of the batch come before.
_SEQUENCE = 2


class StackCopies(Term):
    """Copies of stacks in another layout, one for each loop that fetches."""

    name, scope, label = "stack copies", Entity.VALUE_CLASS, "copy"

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes | None:
        program, rows = ranges.program, dict[tuple[int, int], int]()
        for loop in fetching_loops(program):
            for op in range(loop.last_carry + 1, loop.end):
                if program.kinds[op] != "dynamic_slice":
                    continue
                value = program.ops[op].operands[0]
                shape = program.values[value].type.shape
                if (
                    program.makers[value] < loop.begin and len(shape) > _SEQUENCE + 1
                    and shape[_SEQUENCE] >= shape[-1]
                    and ranges.live.exists[value] and not ranges.host[value]
                    and ranges.size[value] > ranges.floor
                    and _is_normed(program, program.ops[op].results[0])
                ):  # fmt: skip
                    rows[value, loop.begin] = loop.end + 1
        if not rows:
            return None
        values, begin = np.array([*rows], dtype=np.int64).T
        end = np.array([*rows.values()], dtype=np.int64)
        return Lifetimes(ranges.value_class[values], begin, end, values)

    def bytes(self, layout: Layout) -> Floats:
        share = _COPIED if layout.machine.hardware.lanes > 1 else 0.0
        return np.asarray(layout.value_memory * share)


def _is_normed(program: Program, value: int) -> bool:
    """Whether elementwise ops lead from a value to a sum over its last dimension."""
    width = program.values[value].type.shape[-1]
    seen, pending = {value}, [(value, 0)]
    while pending:
        here, ops = pending.pop()
        for op in program.users[here]:
            kind, result = program.kinds[op], next(iter(program.ops[op].results), here)
            shape = program.values[result].type.shape
            if kind == "reduce" and program.values[here].type.shape == (*shape, width):
                return True
            passed = kind != "reduce" and kind not in PRODUCTS and shape[-1:] == (width,)
            if passed and result not in seen and ops < _MOST_OPS:
                seen.add(result)
                pending.append((result, ops + 1))
    return False


__all__ = ["StackCopies"]
