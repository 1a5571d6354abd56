"""Which results of elementwise kernels overwrite an operand (paper, section 4.5).

XLA lets a kernel write into the buffer of an operand of the same type that it is the last to read.
A kernel with several results, such as a product that also adds up its rows for a softmax, writes
buffers that no other kernel overwrites.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from toast.cost.entities import Bools, Ints
from toast.program import Program

#: Ops after which elements are in other places.
_MOVING = frozenset({"transpose", "reverse", "slice", "pad", "concatenate", "gather"})


def overwriting(
    program: Program, kinds: list[str], exists: Bools, alone: Bools, last_read: Ints
) -> Bools:
    """``[values]`` whether the value overwrites an operand of its kernel.

    :param kinds: the kinds of ops.
    :param exists: ``[values]`` whether a value is in memory.
    :param alone: ``[values]`` whether an elementwise kernel computes nothing but the value.
    :param last_read: ``[values]`` the op of the last kernel that reads a value.
    """
    several = _of_several_results(program, kinds, exists)
    found = np.zeros(len(program.values), dtype=bool)
    for number in np.flatnonzero(alone & exists).tolist():
        value = program.values[number]
        found[number] = any(
            not moved
            and not several[source]
            and kinds[program.values[source].op] != "argument"
            and program.values[source].type.dtype == value.type.dtype
            and last_read[source] <= value.op
            for source, moved in _inputs(program, kinds, exists, value.op)
        )
    return found


def _of_several_results(program: Program, kinds: list[str], exists: Bools) -> Bools:
    """``[values]`` whether the product that computes a value also adds up its rows.

    Such are batched products in bfloat16 that a softmax follows, or that its gradient begins with.
    """
    several = np.zeros(len(program.values), dtype=bool)
    for number, kind in enumerate(kinds):
        if kind != "reduce":
            continue
        sources = [source for source, _ in _inputs(program, kinds, exists, number)]
        latest = max(sources, key=lambda source: program.makers[source], default=-1)
        if latest >= 0:
            several[latest] = _is_batched_product(program, latest)
    return several


def _is_batched_product(program: Program, value: int) -> bool:
    """Whether a product with batch dimensions computes a value in bfloat16."""
    op, dtype = program.ops[program.values[value].op], program.values[value].type.dtype
    if program.kind(program.values[value].op) != "dot_general" or dtype != "bf16":
        return False
    return bool(program.signatures[op.signature].attribute("lhs_batching_dimensions"))


def _inputs(
    program: Program, kinds: list[str], exists: Bools, kernel: int
) -> Iterator[tuple[int, bool]]:
    """The values in memory that an elementwise kernel reads element by element.

    Each comes with whether its elements are in other places in the result.
    """
    elements = program.elements
    waiting = [(value, False) for value in program.ops[kernel].operands]
    size = max((elements[value] for value, _ in waiting), default=0)
    seen: set[int] = set()
    while waiting:
        value, moved = waiting.pop()
        if value in seen or elements[value] != size:
            continue
        seen.add(value)
        if exists[value]:
            yield value, moved
            continue
        op = program.makers[value]
        moved |= kinds[op] in _MOVING
        waiting += [(operand, moved) for operand in program.ops[op].operands]


__all__ = ["overwriting"]
