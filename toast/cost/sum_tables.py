"""Tables of the sums over devices that wait for others, by value class."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from toast.cost.entities import Bools, Floats, Ints
from toast.cost.linear_ops import linear_ops, values_used_once
from toast.cost.tables import JointSums
from toast.program import Program

if TYPE_CHECKING:
    from toast.analysis import Analysis

#: Ops through which XLA takes a sum over devices that it adds to another one.
_PASSED = frozenset({"convert", "transpose", "reshape"})


def added_sums(program: Program, use_value: Ints, summed: Bools, value_class: Ints) -> JointSums:
    """Values whose sum over devices waits until they are added to another such value.

    XLA turns a sum of all-reduces into the all-reduce of a sum if nothing else needs the parts.
    """
    single = np.bincount(use_value, minlength=len(program.values)) == 1
    # For each value, the first summand whose sum could wait: a value with a reduction of its own.
    # The other summands wait for it already.
    first: list[int] = [-1] * len(program.values)
    pairs: Counter[tuple[int, int]] = Counter()
    for number, value in enumerate(program.values):
        op = program.ops[value.op]
        kind = program.kind(value.op)
        if summed[number]:
            first[number] = number
            continue
        waiting = [first[v] for v in op.operands if single[v] and first[v] >= 0]
        if kind in _PASSED and waiting:
            first[number] = waiting[0]
        elif kind == "add" and len(waiting) == 2:
            pairs[int(value_class[waiting[1]]), int(value_class[waiting[0]])] += 1
            first[number] = waiting[0]
    return _table(pairs, Counter(), value_class)


def waiting_sums(
    analysis: Analysis, summed: Bools, value_class: Ints, value_bytes: Floats
) -> JointSums:
    """Values whose sum waits for another one, or for a smaller result, in a device-local program.

    :mod:`toast.cost.joint_sums` has the exact ones of one state.
    """
    program = analysis.program
    single = values_used_once(program, analysis.names.use_value)
    sums = single & {*np.flatnonzero(summed).tolist()}
    #: The summand of each value that may be a partial sum, and the smallest value after it.
    first = {value: value for value in sums}
    smallest: dict[int, int] = {}
    pairs: Counter[tuple[int, int]] = Counter()
    for linear in linear_ops(program, analysis.rules, single, sums):
        (result,) = program.ops[linear.op].results
        summands = [first[value] for value, _ in linear.operands]
        if linear.adds:
            pairs.update(
                (int(value_class[other]), int(value_class[summands[0]])) for other in summands[1:]
            )
        elif value_bytes[result] < value_bytes[smallest.get(summands[0], summands[0])]:
            smallest[summands[0]] = result
        first[result] = summands[0]
    carried = Counter((int(value_class[a]), int(value_class[b])) for a, b in smallest.items())
    return _table(pairs, carried, value_class)


def _table(
    added: Counter[tuple[int, int]], carried: Counter[tuple[int, int]], value_class: Ints
) -> JointSums:
    """The table of how often classes of values wait for others."""
    rows = sorted((*key, smaller) for smaller, keys in enumerate((added, carried)) for key in keys)
    value, other, smaller = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    count = [(carried if of else added)[first, second] for first, second, of in rows]
    share = np.array(count, dtype=np.float64) / np.bincount(value_class)[value]
    return JointSums(value, other, share, smaller.astype(bool))


__all__ = ["added_sums", "waiting_sums"]
