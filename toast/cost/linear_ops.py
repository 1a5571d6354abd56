"""Ops through which partial sums pass: the sum of their results is their result of the sum."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from toast.cost.entities import Ints
from toast.program import Program, element_bytes

if TYPE_CHECKING:
    from toast.analysis import SignatureRule

#: Ops whose result is a partial sum if all their operands are.
_ADDING = frozenset({"add", "subtract", "negate"})

#: Ops whose result is a partial sum if their first operand is, and the other one is a number.
SCALING = frozenset({"multiply", "divide"})

#: Ops with a sharding of their own whose result is a partial sum if one of these operands is.  A
#: quotient of arrays is none: parts of a sum that are divided by zero may have different signs.
_CARRYING = {
    "convert": (0,), "dot_general": (0, 1), "multiply": (0, 1), "reduce": (0,), "reshape": (0,),
    "slice": (0,), "transpose": (0,),
}  # fmt: skip

#: Ops that move elements, but compute none.
_MOVING = frozenset({"reshape", "slice", "transpose"})

#: Prefixes of the element types of real numbers, and the types that have all numbers of any that
#: takes no more bytes.
_FLOATS, _WIDE = ("f", "bf"), ("f32", "f64")


class LinearOp(NamedTuple):
    """An op whose result is a partial sum if some of its operands are."""

    op: int
    #: Values that may be partial sums, with their numbers among the operands.
    operands: tuple[tuple[int, int], ...]
    #: Whether it adds shards, which may be as large as those of the partial sums: all its operands
    #: are partial sums.  Otherwise one of them is, and the op has its own sharding.
    adds: bool


def linear_ops(
    program: Program, rules: Sequence[SignatureRule], single: Set[int], sums: Set[int]
) -> list[LinearOp]:
    """The ops that partial sums may pass, in program order.

    ``single`` are the values with one use; ``sums`` are those of them that an op may compute as a
    partial sum.
    """
    linear: list[LinearOp] = []
    may = set(sums)
    for number, op in enumerate(program.ops):
        kind = program.kind(number)
        if len(op.results) != 1 or not (kind in _ADDING or kind in SCALING or kind in _CARRYING):
            continue
        waiting = [
            (value, index) for index, value in enumerate(op.operands)
            if value in may and value in single
            and program.repeats[program.values[value].op] == program.repeats[number]
        ]  # fmt: skip
        adds = kind in _ADDING or (kind in SCALING and _is_number(program, op.operands[1]))
        places: tuple[int, ...] = (0,)
        if kind in _ADDING:
            places = tuple(range(len(op.operands))) if len(waiting) == len(op.operands) else ()
        elif not adds:
            places = _CARRYING.get(kind, ())
        if not _passes(program, rules, number, adds):
            places = ()
        waiting = [each for each in waiting if each[1] in places]
        if waiting:
            linear.append(LinearOp(number, tuple(waiting), adds))
            may.add(op.results[0])
    return linear


def _passes(program: Program, rules: Sequence[SignatureRule], number: int, adds: bool) -> bool:
    """Whether an op is linear for its element types, and partial sums keep their precision."""
    op, kind = program.ops[number], program.kind(number)
    before, after = (program.values[v].type.dtype for v in (op.operands[0], op.results[0]))
    real = before.startswith(_FLOATS) and after.startswith(_FLOATS)
    if adds:
        return kind != "divide" or real or before.startswith("complex")
    if not real:
        return False
    if kind == "reduce":
        return {factor.combiner for factor in rules[op.signature].factors} <= {"", "add"}
    if kind == "convert" and before != after:
        wider = after in _WIDE and element_bytes(after) >= element_bytes(before)
        return wider or _is_gathered(program, op.operands[0])
    return True


def _is_gathered(program: Program, value: int) -> bool:
    """Whether every element is in one of the partial sums and the others are zero.

    So it is for rows of a sharded array; rounding them does not change their sum.
    """
    op = program.values[value].op
    while program.kind(op) in _MOVING:
        op = program.values[program.ops[op].operands[0]].op
    return program.kind(op) == "gather"


def _is_number(program: Program, value: int) -> bool:
    """Whether a value is a scalar, broadcast; constant arrays do not count."""
    maker = program.values[value].op
    if program.kind(maker) != "broadcast_in_dim":
        return False
    return not program.values[program.ops[maker].operands[0]].type.shape


def values_used_once(program: Program, use_value: Ints) -> frozenset[int]:
    """The values with one use, from the value of each use (``[uses]``)."""
    uses = np.bincount(use_value, minlength=len(program.values))
    uses[[value for value, _ in program.condition_reads]] += 1
    return frozenset(np.flatnonzero(uses == 1).tolist())


__all__ = ["SCALING", "LinearOp", "linear_ops", "values_used_once"]
