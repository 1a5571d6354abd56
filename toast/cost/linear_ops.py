"""Ops through which partial sums pass: the sum of their results is their result of the sum."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from toast.cost.entities import Ints
from toast.program import Program

if TYPE_CHECKING:
    from toast.analysis import SignatureRule


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

    Rules say which ops are linear, and in which operands (``linear/2`` and so on).
    ``single`` are the values with one use; ``sums`` are those of them that an op may compute as a
    partial sum.
    """
    linear: list[LinearOp] = []
    may = set(sums)
    for number, op in enumerate(program.ops):
        if len(op.results) != 1:
            continue
        passing = rules[op.signature].linearity
        waiting = [
            (value, index) for index, value in enumerate(op.operands)
            if value in may and value in single
            and program.repeats[program.values[value].op] == program.repeats[number]
        ]  # fmt: skip
        adds = passing.adds or (passing.scales and _is_number(program, op.operands[1]))
        if passing.adds:
            waiting = waiting if len(waiting) == len(op.operands) else []
        else:
            places = (0,) if adds else passing.operands
            waiting = [
                (value, index) for value, index in waiting
                if index in places and (not passing.rounds or _is_gathered(program, rules, value))
            ]  # fmt: skip
        if waiting:
            linear.append(LinearOp(number, tuple(waiting), adds))
            may.add(op.results[0])
    return linear


def _is_gathered(program: Program, rules: Sequence[SignatureRule], value: int) -> bool:
    """Whether every element is in one of the partial sums and the others are zero.

    So it is for rows of a sharded array; rounding them does not change their sum.
    """
    op = program.values[value].op
    while rules[program.ops[op].signature].linearity.moves:
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


__all__ = ["LinearOp", "linear_ops", "values_used_once"]
