"""Steps of sequences that loops read and write row by row.

A recurrence over ``[batch, sequence, width]`` runs over the array with the sequence in front.  XLA
does not transpose the array for it: the loop slices a row out of each tile, and writes its results
to rows of tiles.  A kernel of its own does each of them, unless a device has a single sequence:
then a step is a row as it is, which other kernels read and write in its place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from toast.cost.entities import Bools, Floats, Ints
from toast.cost.liveness import dimensions_in, op_before
from toast.cost.program_loops import LoopOps, loops_of
from toast.program import Program
from toast.space import PRODUCTS

_SLICE, _UPDATE = "dynamic_slice", "dynamic_update_slice"

#: Elements that kernels write to rows of tiles in the time in which they read one from there: 1.6
#: to 1.8 in recurrences that XLA compiled for v4, v5e, v5p and v6e.
WRITTEN = 1.7

#: Ops between a loop and the transpose of its stack that change no tiles.
_PASSING = frozenset({"convert", "optimization_barrier", "sdy_sharding_constraint"})


class MovedRows(NamedTuple):
    """Kernels of loops that move rows, in a step of the program."""

    #: ``[uses]`` how often they move all of the use's value: the stack of a slice, of which a
    #: kernel reads a part, or one step that an update writes.
    moves: Floats
    #: ``[uses]`` their number, if each reads one array.
    kernels: Floats
    #: ``[uses]`` their number, if each reads two arrays of a loop where it can.
    pairs: Floats
    #: ``[ops]`` whether an op is such an update.
    updates: Bools


def step_rows(
    program: Program, use_op: Ints, use_index: Ints, by_product: Bools, lanes: int
) -> MovedRows:
    """What loops read from rows of tiles, and write there; nothing without tiles (one lane).

    Only loops that read rows write them: stacks of others, as of gradients, are of other layouts.
    So are those of updates that are computed ``by_product`` (``[ops]``), by kernels of products.
    """
    moves, kernels, pairs = np.zeros((3, len(program.ops)))
    updates = np.zeros(len(program.ops), dtype=bool)
    loops = loops_of(program) if lanes > 1 else []
    slices = _read_in_loops(program, loops)
    of_loop = Counter(slices.values())
    for number in slices:
        (step,), stack = program.ops[number].results, program.ops[number].operands[0]
        share = program.elements[step] / max(program.elements[stack], 1)
        kernels[number] = program.repeats[number]
        moves[number] = share * kernels[number]
        alike = of_loop[slices[number]]
        pairs[number] = kernels[number] * math.ceil(alike / 2) / alike
    by_rows = {*slices.values()}
    for number in _updated(program) if by_rows else ():
        if _loop_around(number, loops) in by_rows and not by_product[number]:
            kernels[number] = pairs[number] = moves[number] = program.repeats[number]
            updates[number] = True
    # A slice has the stack as its first operand; an update has the step as its second one.
    here = use_index == updates[use_op]
    moved, alone, paired = (each[use_op] * here for each in (moves, kernels, pairs))
    return MovedRows(moved, alone, paired, updates)


def _read_in_loops(program: Program, loops: Sequence[LoopOps]) -> dict[int, LoopOps]:
    """The slices of rows in loops, each with its innermost loop.

    A recurrence in a scan of layers leaves its residuals in the stacks of the scan, also as rows,
    except for those that kernels of products write.
    """
    rows, stacked = dict[int, LoopOps](), dict[int, LoopOps]()
    for op in _sliced(program) if loops else ():
        source = op_before(program, program.makers[program.ops[op].operands[0]], _PASSING)
        if (loop := _loop_around(op, loops)) is None or _argument(program, source):
            continue
        layer = _of_layers(program, source)
        if _from_rows(program, source):
            rows[op] = loop
        elif layer != source and (
            _from_rows(program, layer) or not PRODUCTS.intersection(_kinds_in(program, loop))
        ):
            stacked[op] = loop
    by_rows = {*rows.values()}
    return rows | {op: loop for op, loop in stacked.items() if loop in by_rows}


def _kinds_in(program: Program, loop: LoopOps) -> Sequence[str]:
    return program.kinds[loop.begin : loop.end]


def _loop_around(op: int, loops: Sequence[LoopOps]) -> LoopOps | None:
    return next((loop for loop in loops if loop.begin < op < loop.end), None)


def _sliced(program: Program) -> Iterator[int]:
    """Slices of one step of a stack.

    Layers of stacked arguments are none: they are larger than rows, and have layouts of their own.
    """
    for number, op in enumerate(program.ops):
        if program.kinds[number] == _SLICE and _steps(program, op.operands[0], op.results[0]):
            yield number


def _updated(program: Program) -> Iterator[int]:
    """Updates of one step of a stack that is transposed after its loop."""
    for number, op in enumerate(program.ops):
        if program.kinds[number] == "transpose" and _to_rows(program, number):
            stack = op_before(program, program.makers[op.operands[0]], _PASSING)
            update = _before_end(program, stack)
            if program.kinds[update] == _UPDATE:
                updated = program.ops[update]
                if _steps(program, updated.results[0], updated.operands[1]):
                    yield update


def _before_end(program: Program, op: int) -> int:
    """``op``, or the op that computes what it passes on from the last iteration of a loop."""
    return program.makers[program.ops[op].operands[0]] if program.kinds[op] == "yield" else op


def _argument(program: Program, op: int) -> bool:
    """Whether an op passes on an argument, whatever its element type, or transposes it."""
    moving = _PASSING | {"transpose", "reshape", _SLICE}
    return program.kinds[op_before(program, op, moving)] == "argument"


def _of_layers(program: Program, op: int) -> int:
    """The op that computed what ``op`` takes from the stack of a scan around; ``op`` if nothing."""
    slicing = op_before(program, op, {"reshape"})
    if program.kinds[slicing] != _SLICE:
        return op
    update = _before_end(program, program.makers[program.ops[slicing].operands[0]])
    if program.kinds[update] != _UPDATE:
        return op
    layer = program.makers[program.ops[update].operands[1]]
    return op_before(program, layer, _PASSING | {"reshape", "broadcast_in_dim"})


def _steps(program: Program, stack: int, step: int) -> bool:
    """Whether a value is one step of a stack ``[steps, batch, width]``."""
    whole, part = (program.values[value].type.shape for value in (stack, step))
    return len(whole) == 3 and part == (1, *whole[1:]) and whole[0] > 1


def _from_rows(program: Program, op: int) -> bool:
    """Whether an op is a transpose that puts the last dimension but one in front."""
    order = _order(program, op)
    return len(order) > 2 and order[0] == len(order) - 2 and order[-1] == len(order) - 1


def _to_rows(program: Program, op: int) -> bool:
    """Whether a transpose puts the first dimension before the last one."""
    order = _order(program, op)
    return len(order) > 2 and order[-2] == 0 and order[-1] == len(order) - 1


def _order(program: Program, op: int) -> tuple[int, ...]:
    if program.kinds[op] != "transpose":
        return ()
    return tuple(dimensions_in(program.signatures[program.ops[op].signature], "permutation"))
