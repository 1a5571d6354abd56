"""The loops of a program: which ops are in the body of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from toast.program import Program


class LoopOps(NamedTuple):
    """A loop: its first ``carry``, its last one, and its last ``yield``."""

    begin: int
    last_carry: int
    end: int


def loop_ties(program: Program) -> Iterator[tuple[int, int]]:
    """The ``yield`` and the ``carry`` of each value that a loop carries."""
    for end, begin in program.ties:
        if (program.kinds[end], program.kinds[begin]) == ("yield", "carry"):
            yield end, begin


def loops_of(program: Program) -> list[LoopOps]:
    """The loops of a program, inner ones first where they are nested."""
    loops: list[LoopOps] = []
    for end, begin in loop_ties(program):
        if loops and (end, begin) == (loops[-1].end + 1, loops[-1].last_carry + 1):
            loops[-1] = loops[-1]._replace(last_carry=begin, end=end)
        else:
            loops.append(LoopOps(begin, begin, end))
    return loops


def loops_around(program: Program) -> list[LoopOps | None]:
    """``[ops]`` the innermost loop in whose body an op uses its operands, if any."""
    ends = {loop.last_carry: loop for loop in loops_of(program)}
    if not ends:
        return [None] * len(program.ops)
    loops: list[LoopOps | None] = []
    around: list[LoopOps | None] = [None]
    for op in range(len(program.ops)):
        while (last := around[-1]) is not None and op > last.end:
            around.pop()
        loops.append(around[-1])
        if op in ends:
            around.append(ends[op])
    return loops


def loop_with_runs(
    program: Program, loops: Sequence[LoopOps | None], op: int, runs: int
) -> LoopOps | None:
    """The innermost loop around ``op`` whose body runs at most ``runs`` times a step.

    What runs less often than the body was moved out of the loop.  ``loops`` are those of
    :func:`loops_around`.
    """
    loop = loops[op]
    while loop is not None and runs < program.repeats[loop.last_carry + 1]:
        loop = loops[loop.begin]
    return loop


__all__ = ["LoopOps", "loop_ties", "loop_with_runs", "loops_around", "loops_of"]
