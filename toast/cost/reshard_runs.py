"""How often a step reshards the value of each use."""

from __future__ import annotations

import numpy as np

from toast.cost.entities import Ints
from toast.cost.liveness import LoopOps, loops_of
from toast.program import Program


def reshard_runs(program: Program, use_value: Ints) -> Ints:
    """``[uses]`` how often a step reshards their values: as often as these are computed.

    XLA reshards what a loop does not change before the loop.  What a loop carries changes in each
    iteration, and is resharded there for its body and for the next iteration.  A stack that a loop
    fills is resharded before or after the loop.
    """
    made = np.array([program.repeats[op] for op in program.makers], dtype=np.int64)
    for loop in loops_of(program):
        for op in range(loop.begin, loop.last_carry + 1):
            made[list(program.ops[op].results)] = program.repeats[loop.last_carry + 1]
    for number, op in enumerate(program.ops):
        if program.kind(number) == "dynamic_update_slice":
            carry = program.makers[op.operands[0]]
            if program.kind(carry) == "carry":
                made[[op.operands[0], *op.results]] = program.repeats[carry]
    return np.asarray(made[use_value])


def loops_around(program: Program) -> list[LoopOps | None]:
    """``[ops]`` the innermost loop in whose body an op uses its operands, if any."""
    ends = {loop.last_carry: loop for loop in loops_of(program)}
    loops: list[LoopOps | None] = []
    around: list[LoopOps | None] = [None]
    for op in range(len(program.ops)):
        while (last := around[-1]) is not None and op > last.end:
            around.pop()
        loops.append(around[-1])
        if op in ends:
            around.append(ends[op])
    return loops


__all__ = ["loops_around", "reshard_runs"]
