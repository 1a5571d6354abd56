"""Sums over devices that XLA moves behind a loop.

If a loop does nothing with a partial sum but add it to a total, the sums of the devices can be
added up first: XLA replaces the all-reduces of all iterations with one behind the loop.  This is
how a recurrence accumulates the gradient of its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toast.cost.program_loops import loop_ties
from toast.program import Program

if TYPE_CHECKING:
    from toast.analysis import SignatureRule

#: Ops between a partial sum and the addition that XLA moves it past, if they are linear.
_PASSED = frozenset({"convert", "reshape", "transpose"})


def sum_runs(program: Program, rules: Sequence[SignatureRule]) -> list[int]:
    """``[values]`` how often a step sums each value over devices, if its sum is an all-reduce."""
    runs = [program.repeats[op] for op in program.makers]
    ties = [*loop_ties(program)]
    if not ties:
        return runs
    uses = program.users
    for end, begin in ties:
        (added,), (total,) = program.ops[end].operands, program.ops[begin].results
        addition = program.makers[added]
        if program.kinds[addition] != "add" or uses[total] != (addition,) or uses[added] != (end,):
            continue
        outside = program.repeats[begin]
        for operand in program.ops[addition].operands:
            before: int | None = operand
            user = addition
            while before is not None and before != total and uses[before] == (user,):
                user = program.makers[before]
                if rules[program.ops[user].signature].sums:
                    runs[before] = min(runs[before], outside)
                before = _passed(program, rules, user, before)
    return runs


def _passed(program: Program, rules: Sequence[SignatureRule], op: int, result: int) -> int | None:
    """The operand whose partial sums XLA moves past an op; ``None`` if there is none."""
    operands, kind = program.ops[op].operands, program.kinds[op]
    if kind == "optimization_barrier":
        return operands[program.ops[op].results.index(result)]
    passes = kind in _PASSED and 0 in rules[program.ops[op].signature].linearity.operands
    return operands[0] if passes else None
