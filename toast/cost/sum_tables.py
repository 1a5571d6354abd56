"""Tables of the sums over devices that wait for others, by value class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
            first[number], later = sorted(waiting)
            pairs[int(value_class[later]), int(value_class[first[number]])] += 1
    return _table([pairs, Counter(), Counter()], value_class)


def waiting_sums(
    analysis: Analysis, summed: Bools, value_class: Ints, value_bytes: Floats
) -> JointSums:
    """Values whose sum waits for another one, or for a smaller result, in a device-local program.

    :mod:`toast.cost.joint_sums` has the exact ones of one state.  Here, a sum waits for the
    smallest value that follows from it, or not at all.
    """
    program = analysis.program
    single = values_used_once(program, analysis.names.use_value)
    sums = single & {*np.flatnonzero(summed).tolist()}
    #: The summand of each value that may be a partial sum, and the values on the way to it.
    first = {value: value for value in sums}
    way: dict[int, tuple[int, ...]] = dict.fromkeys(sums, ())
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
        way[result] = (*way[linear.operands[0][0]], result)
    ends, between = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for value, end in smallest.items():
        ends[int(value_class[value]), int(value_class[end])] += 1
        between.update(
            (int(value_class[value]), int(value_class[passed])) for passed in way[end][:-1]
        )
    return _table([pairs, ends, between], value_class)


def _table(counts: Sequence[Counter[tuple[int, int]]], value_class: Ints) -> JointSums:
    """The table of how often classes of values wait for others.

    ``counts`` are those of sums that are added, of smaller values, and of values between these.
    """
    rows = sorted((*key, kind) for kind, keys in enumerate(counts) for key in keys)
    value, other, kind = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    count = np.array([counts[of][first, second] for first, second, of in rows], dtype=np.float64)
    share = np.minimum(count / np.bincount(value_class)[value], 1.0)
    return JointSums(value, other, share, kind == 1, kind == 2)


__all__ = ["added_sums", "waiting_sums"]
