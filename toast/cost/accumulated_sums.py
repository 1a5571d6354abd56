"""Sums over devices that XLA moves behind a loop.

If a loop does nothing with a partial sum but add it to a total, the sums of the devices can be
added up first: XLA replaces the all-reduces of all iterations with one behind the loop.  This is
how a recurrence accumulates the gradient of its weights.
"""

from __future__ import annotations

from toast.cost.liveness import loop_ties
from toast.program import Program

#: Ops between a partial sum and the addition that XLA moves it past.
_PASSED = frozenset({"convert", "reshape", "transpose", "optimization_barrier"})


def sum_runs(program: Program) -> list[int]:
    """``[values]`` how often a step sums each value over devices, if its sum is an all-reduce."""
    runs = [program.repeats[op] for op in program.makers]
    ties = [*loop_ties(program)]
    if not ties:
        return runs
    uses: list[list[int]] = [[] for _ in program.values]
    for number, op in enumerate(program.ops):
        for value in op.operands:
            uses[value].append(number)
    for end, begin in ties:
        (added,), (total,) = program.ops[end].operands, program.ops[begin].results
        addition = program.makers[added]
        if program.kinds[addition] != "add" or uses[total] != [addition] or uses[added] != [end]:
            continue
        outside = program.repeats[begin]
        for value in program.ops[addition].operands:
            before, user = value, addition
            while before != total and uses[before] == [user]:
                runs[before] = outside
                user = program.makers[before]
                if program.kinds[user] not in _PASSED:
                    break
                (before,) = program.ops[user].operands
    return runs
