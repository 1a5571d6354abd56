"""Copies of the stacks that a loop reads beside values from the memory of the host.

Such a loop fetches for the next iteration, so that XLA for TPUs runs one iteration outside of it.
That one reads the stacks of activations in another layout than those inside: with the width in the
lanes, where the loop has the longer sequence.  XLA copies a stack as a whole before the loop.
"""

from __future__ import annotations

import numpy as np

from toast.cost.entities import Entity, Floats
from toast.cost.host_memory import fetching_loops
from toast.cost.layout import Layout
from toast.cost.liveness import Lifetimes, LiveRanges
from toast.cost.terms.term import Term

#: The share of such stacks that are copied.  In compiled programs, all were if parameters were
#: sharded over all devices, and none if a device had a part of the heads.
_COPIED = 0.5

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


__all__ = ["StackCopies"]
