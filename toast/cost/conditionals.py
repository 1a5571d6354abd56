"""The conditionals of a program: which ops are in their branches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from toast.cost.entities import Ints
from toast.cost.liveness import SOURCES
from toast.cost.program_loops import LoopOps, loops_of
from toast.program import Program

#: Ops that are in no branch.
_OUTSIDE = SOURCES | {"argument", "return"}


def branch_runs(program: Program) -> Ints:
    """``[ops]`` the runs in a step of the branch around each op; 0 for ops in no branch.

    The flat program does not say where a branch begins.  An op is in one if nothing but that branch
    needs it: an op before a conditional that only one of its branches needs is taken for a part of
    this branch.
    """
    runs = np.zeros(len(program.ops), dtype=np.int64)
    if "join" not in program.kinds:
        return runs
    bits, conditionals = _branches(program)
    yields = _yields(program)
    outside = np.zeros(len(program.values), dtype=bool)  # values needed outside of branches
    outside[[*program.result_values]] = True
    needed = [0] * len(program.values)  # the branches that need a value, as bits
    for number in range(len(program.ops) - 1, -1, -1):
        op, kind = program.ops[number], program.kind(number)
        # The results of a loop are all in one branch, or none.
        results = yields.get(number, op.results)
        branches = 0
        for value in results:
            branches |= needed[value]
        # What several branches of a conditional need is before it.
        around, often = 0, 0
        while branches:
            here = conditionals[branches.bit_length() - 1]
            mine = branches & here.bits
            branches &= ~here.bits
            if mine.bit_count() == 1:
                around, often = around | mine, max(often, here.runs)
        needs = bool(results) and not outside[[*results]].any()
        inside = around > 0 and kind not in _OUTSIDE and needs
        if inside:
            runs[number] = often
        elif needs and not any(needed[value] for value in results):
            continue  # nothing needs it
        if kind == "join":
            for index, value in enumerate(op.operands):
                needed[value] |= bits[number] << index
        for value in op.operands:
            if inside:
                needed[value] |= around
            elif kind != "join":
                outside[value] = True
    return runs


class _Conditional(NamedTuple):
    """A conditional: the bits of its branches, and how often it runs in a step."""

    bits: int
    runs: int


def _branches(program: Program) -> tuple[dict[int, int], list[_Conditional]]:
    """The bit of the first branch of each ``join``, and the conditional of each bit.

    A conditional has a ``join`` for each result, one after the other.
    """
    bits: dict[int, int] = {}
    conditionals: list[_Conditional] = []
    results = set[int]()  # of the last conditional
    for number, op in enumerate(program.ops):
        if program.kind(number) != "join":
            continue
        before, many = bits.get(number - 1), len(op.operands)
        same = before is not None and len(program.ops[number - 1].operands) == many
        if before is not None and same and not results & {*op.operands}:
            bits[number] = before
        else:
            width, results = len(conditionals), set()
            bits[number] = 1 << width
            every = ((1 << many) - 1) << width
            conditionals += [_Conditional(every, program.repeats[number])] * many
        results |= {*op.results}
    return bits, conditionals


def _yields(program: Program) -> Mapping[int, tuple[int, ...]]:
    """The results of the loop of each ``yield``."""
    results: dict[int, tuple[int, ...]] = {}
    for loop in loops_of(program):
        ends = _ends(loop)
        every = tuple(value for end in ends for value in program.ops[end].results)
        results |= dict.fromkeys(ends, every)
    return results


def _ends(loop: LoopOps) -> range:
    return range(loop.end - (loop.last_carry - loop.begin), loop.end + 1)


__all__ = ["branch_runs"]
