"""How often a step reshards the value of each use."""

from __future__ import annotations

import numpy as np

from toast.cost.conditionals import branch_runs
from toast.cost.entities import Ints
from toast.cost.liveness import BARRIERS
from toast.cost.program_loops import loops_of
from toast.program import Program

#: Ops that XLA does not move out of a loop.
_STAYING = BARRIERS | {"join"}


def reshard_runs(program: Program, use_op: Ints, use_value: Ints, *, partitioned: bool) -> Ints:
    """``[uses]`` how often a step reshards their values: as often as these change.

    XLA reshards what a loop does not change before the loop, except behind barriers, and what
    follows from these.  It moves nothing out of the branches of conditionals.  What a loop carries
    changes in each iteration, and is resharded there for its body and for the next iteration.  A
    stack that a loop fills, and does not read, is resharded after the loop.  If the program is not
    ``partitioned`` by XLA, its collectives stay in the loop.
    """
    changes = [1] * len(program.values)
    inside = {
        op: program.repeats[loop.last_carry + 1]
        for loop in loops_of(program)
        for op in range(loop.begin, loop.last_carry + 1)
    }
    stacks = _stacks(program, {*inside}, use_op, use_value)
    branches = branch_runs(program)
    least_runs = branches.tolist()
    for number, op in enumerate(program.ops):
        kind, runs = program.kinds[number], program.repeats[number]
        if kind == "carry":
            runs = inside[number]
        elif op.results and op.results[0] in stacks:
            runs = program.repeats[stacks[op.results[0]]]
        elif kind not in _STAYING:
            runs = min(runs, max([changes[value] for value in op.operands], default=1))
            runs = max(runs, least_runs[number])
        for value in op.results:
            changes[value] = runs
    least = branches if partitioned else np.array(program.repeats, dtype=np.int64)
    return np.maximum(np.array(changes, dtype=np.int64)[use_value], least[use_op])


def _stacks(program: Program, carries: set[int], use_op: Ints, use_value: Ints) -> dict[int, int]:
    """Stacks that a loop has filled in an iteration, with the ``carry`` of each.

    They are updates of what it carries that only its next iteration uses, or another update.  The
    iteration does not read what is carried, either.
    """
    stacks: dict[int, int] = {}
    for number, op in enumerate(program.ops):
        if program.kinds[number] == "dynamic_update_slice":
            before = op.operands[0]
            carry = stacks.get(before, program.makers[before])
            if carry in carries:
                stacks[op.results[0]] = carry
    users: dict[int, list[int]] = {value: [] for value in stacks}
    for carry in {*stacks.values()}:
        users[program.ops[carry].results[0]] = []
    for number, value in zip(use_op.tolist(), use_value.tolist(), strict=True):
        if value in users:
            users[value].append(number)
    read = set[int]()  # carries whose stacks the iteration reads
    for value, ops in users.items():
        for number in ops:
            op, kind = program.ops[number], program.kind(number)
            updated = kind == "dynamic_update_slice" and op.operands[0] == value
            if kind != "yield" and not (updated and op.results[0] in stacks):
                read.add(stacks.get(value, program.makers[value]))
    return {value: carry for value, carry in stacks.items() if carry not in read}


__all__ = ["reshard_runs"]
