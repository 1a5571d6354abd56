"""Steps of sequences that loops read and write row by row.

A recurrence over ``[batch, sequence, width]`` runs over the array with the sequence in front.  XLA
does not transpose the array for it: the loop slices a row out of each tile, and writes its results
to rows of tiles.  The vector unit moves such rows one by one, and takes as long for a row as for a
full tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from toast.cost.entities import Floats, Ints
from toast.cost.liveness import SUBLANES, dimensions_in
from toast.cost.program_loops import LoopOps, loop_ties, loops_of
from toast.program import Program

_SLICE, _UPDATE = "dynamic_slice", "dynamic_update_slice"

#: How often the vector unit could change the place of each element of full tiles in the time that
#: it takes to read rows, or to write them.  A recurrence that XLA compiled for v5e read 5 elements
#: of rows in a cycle, and wrote 7, besides the latency of the kernel that updates the stack.
READ, _WRITTEN = SUBLANES, SUBLANES / 2

#: The same to read a step where the steps are in lanes: a row of a tile has one element of 128
#: steps, and is read whole.  Programs that XLA compiled for v5e took 2.2 cycles for an element.
READ_IN_LANES = 91.0

#: Ops between a loop and the transpose of its stack that change no tiles.
_PASSING = frozenset({"convert", "optimization_barrier", "sdy_sharding_constraint"})


def row_accesses(
    program: Program, use_op: Ints, use_index: Ints, use_value: Ints, size: Floats,
    relayout_bytes: float,
) -> Floats:  # fmt: skip
    """``[uses]`` accesses of each use's value that take as long as moving its rows.

    ``size`` (``[values]``) has the bytes of values in memory, and ``relayout_bytes`` those that the
    memory moves while the vector unit changes the place of an element; 0 if this bounds nothing.
    Only loops that read rows write them: stacks of others, as of gradients, are of other layouts.
    """
    accesses = np.zeros(len(use_op))
    loops = loops_of(program) if relayout_bytes else []
    slices = _read_in_loops(program, loops)
    if not slices:
        return accesses
    by_rows = {*slices.values()}
    updates = {op for op in _updated(program) if _loop_around(op, loops) in by_rows}
    rows = [
        use for use, (op, index) in enumerate(zip(use_op.tolist(), use_index.tolist(), strict=True))
        if (op in slices and index == 0) or (op in updates and index == 1)
    ]  # fmt: skip
    for use in rows:
        op, value = program.ops[use_op[use]], int(use_value[use])
        moved, moves = (op.results[0], READ) if use_op[use] in slices else (value, _WRITTEN)
        elements = program.elements[moved]
        accesses[use] = elements * moves * relayout_bytes / max(size[value], 1.0)
    return accesses


def step_reads(program: Program, use_op: Ints, use_index: Ints) -> Floats:
    """``[uses]`` how often loops read all of a value step by step (see :func:`row_accesses`)."""
    reads = np.zeros(len(program.ops))
    for number in _read_in_loops(program, loops_of(program)):
        (step,), stack = program.ops[number].results, program.ops[number].operands[0]
        share = program.elements[step] / max(program.elements[stack], 1)
        reads[number] = program.repeats[number] * share
    return np.asarray(reads[use_op] * (use_index == 0))


def _read_in_loops(program: Program, loops: Sequence[LoopOps]) -> dict[int, LoopOps]:
    """The slices of steps in loops, each with its innermost loop."""
    found = ((op, _loop_around(op, loops)) for op in _sliced(program)) if loops else ()
    return {op: loop for op, loop in found if loop is not None}


def _loop_around(op: int, loops: Sequence[LoopOps]) -> LoopOps | None:
    return next((loop for loop in loops if loop.begin < op < loop.end), None)


def _sliced(program: Program) -> Iterator[int]:
    """Slices of one step of an array that was computed, and transposed for the loop.

    Layers of stacked arguments are none: they are larger than rows, and have layouts of their own.
    """
    for number, op in enumerate(program.ops):
        if program.kinds[number] == _SLICE and _steps(program, op.operands[0], op.results[0]):
            maker = program.makers[_source(program, op.operands[0])]
            if _from_rows(program, maker) and not _argument(program, maker):
                yield number


def _updated(program: Program) -> Iterator[int]:
    """Updates of one step of a stack that is transposed after its loop."""
    ends = {
        program.ops[end].results[0]: program.ops[end].operands[0] for end, _ in loop_ties(program)
    }
    for number in range(len(program.ops)):
        if program.kinds[number] == "transpose" and _to_rows(program, number):
            stack = _source(program, program.ops[number].operands[0])
            update = program.makers[ends.get(stack, stack)]
            if program.kinds[update] == _UPDATE:
                op = program.ops[update]
                if _steps(program, op.results[0], op.operands[1]):
                    yield update


def _argument(program: Program, transpose: int) -> bool:
    """Whether a transpose is of an argument, whatever its element type."""
    source = _source(program, program.ops[transpose].operands[0])
    return program.kinds[program.makers[source]] == "argument"


def _source(program: Program, value: int) -> int:
    """The value that a chain of conversions begins with."""
    while program.kinds[program.makers[value]] in _PASSING:
        (value,) = program.ops[program.makers[value]].operands
    return value


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
