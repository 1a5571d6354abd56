"""Memory-bound kernels that the vector unit bounds instead.

The vector unit computes in float32, whatever the element type of an array.  A kernel that reads and
writes few bytes for each element takes as long as the unit needs for the elements of its largest
array: a norm of bfloat16 values as long as one of float32 values, and a sum, which writes little,
as long as a copy.
"""

from __future__ import annotations

import numpy as np

from toast.cost.entities import Bools, Floats, Ints
from toast.cost.liveness import Liveness
from toast.cost.shared_kernels import UPDATING
from toast.program import Program

#: Ops whose kernels take as long as their bytes: they look up rows.
_LOOKING_UP = frozenset({"gather", "scatter"})


def stretched(
    program: Program,
    live: Liveness,
    use_op: Ints,
    use_value: Ints,
    accesses: Ints,
    written: Bools,
    size: Floats,
    vector_bytes: float,
    relayout_bytes: float,
) -> tuple[Floats, Floats, Floats]:
    """``[uses]`` accesses of each use's value, and ``[values]`` those of writes, as they take time.

    Then, ``[values]``, the share of a value that its kernel can write without taking longer.

    ``accesses`` (``[uses]``) are those of kernels that are bound by memory, and ``written``
    (``[values]``) says which values they write.  ``size`` (``[values]``) has the bytes of values in
    memory.  The vector unit takes as long for an element as the memory for ``vector_bytes``, or,
    for an element that changes its place in tiles, for ``relayout_bytes``; 0 for a unit that bounds
    nothing.  If it takes longer for the elements of a kernel's largest array than the memory for
    all its bytes, the accesses of the kernel are multiplied by the ratio.
    """
    reads, writes = accesses.astype(np.float64), written.astype(np.float64)
    if not relayout_bytes:
        return reads, writes, np.zeros(len(program.values))
    elements = np.array(program.elements, dtype=np.float64)
    maker = np.array(program.makers, dtype=np.int64)
    kinds = program.kinds
    updating = np.array([kind == UPDATING for kind in kinds])
    kernel = _kernels(program, live, use_op, use_value)
    of_use, of_value = kernel[use_op], kernel[maker]
    # An update is written into its buffer by the kernel that computes it.
    of_use = np.where(updating[use_op], of_value[use_value], of_use)
    moved, largest = np.zeros((2, 2 * len(program.ops)))
    np.add.at(moved, of_use, reads * size[use_value])
    np.add.at(moved, of_value, writes * size)
    np.maximum.at(largest, of_use, np.where(accesses > 0, elements[use_value], 0.0))
    np.maximum.at(largest, of_value, np.where(written, elements, 0.0))
    largest[np.flatnonzero([kind in _LOOKING_UP for kind in kinds])] = 0.0
    least = largest * np.maximum(vector_bytes, np.tile(live.moves, 2) * relayout_bytes)
    longer = np.maximum(least / np.maximum(moved, 1.0), 1.0)
    idle = np.maximum(least - moved, 0.0)[of_value]
    return (
        reads * longer[of_use], writes * longer[of_value],
        np.minimum(idle / np.maximum(size, 1.0), 1.0),
    )  # fmt: skip


def _kernels(program: Program, live: Liveness, use_op: Ints, use_value: Ints) -> Ints:
    """``[ops]`` the kernel that computes each op.

    What follows from arguments alone could be computed early, but is not unless it is stored: the
    kernel that needs it computes it, such as the update of an optimizer.
    """
    kernel = live.kernel.copy()
    count = len(program.arguments)
    users: list[int] = [-1] * len(program.values)
    for op, value in zip(use_op.tolist(), use_value.tolist(), strict=True):
        users[value] = op if users[value] < 0 else min(users[value], op)
    early = np.flatnonzero(kernel < count)
    for number in early[early >= count][::-1].tolist():
        results = program.ops[number].results
        if not results or live.exists[[*results]].any():
            continue
        if (user := users[results[0]]) >= 0:
            kernel[number] = kernel[user]
    return kernel
