"""How often a step reshards the value of each use."""

from __future__ import annotations

import numpy as np

from toast.cost.entities import Ints
from toast.cost.liveness import BARRIERS, LoopOps, loops_of
from toast.program import Program

#: Ops that XLA does not move out of a loop.
_STAYING = BARRIERS | {"optimization_barrier", "yield"}


def reshard_runs(program: Program, use_op: Ints, use_value: Ints, *, partitioned: bool) -> Ints:
    """``[uses]`` how often a step reshards their values: as often as these change.

    XLA computes and reshards what a loop does not change before the loop, except behind barriers.
    What a loop carries changes in each iteration, and is resharded there for its body and for the
    next iteration.  A stack that a loop has filled is resharded after the loop.  If the program is
    not ``partitioned`` by XLA, its collectives stay in the loop.
    """
    changes = np.ones(len(program.values), dtype=np.int64)
    inside = {
        op: program.repeats[loop.last_carry + 1]
        for loop in loops_of(program)
        for op in range(loop.begin, loop.last_carry + 1)
    }
    for number, op in enumerate(program.ops):
        kind, runs = program.kind(number), program.repeats[number]
        if kind == "carry":
            runs = inside[number]
        elif kind == "dynamic_update_slice" and program.makers[op.operands[0]] in inside:
            runs = program.repeats[program.makers[op.operands[0]]]
        elif kind not in _STAYING:
            runs = min(runs, max((int(changes[value]) for value in op.operands), default=1))
        changes[list(op.results)] = runs
    if partitioned:
        return np.asarray(changes[use_value])
    return np.maximum(changes[use_value], np.array(program.repeats, dtype=np.int64)[use_op])


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
