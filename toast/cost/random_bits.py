"""Operations on unsigned integers, as of random bits, which take time on the vector unit.

JAX's generator, Threefry, takes about a hundred integer operations for each random number.  XLA
computes them again in each kernel that needs the numbers, such as the masks of dropout in the
forward and in the backward pass, beside the product or the memory traffic of the kernel.
"""

from __future__ import annotations

import numpy as np

from toast.cost.entities import Floats
from toast.cost.liveness import Liveness
from toast.program import Program

#: The element type of random bits, and the operations on them.
_BITS = "ui32"
_OPERATIONS = frozenset({
    "add", "subtract", "multiply", "shift_left", "shift_right_logical", "or", "xor", "and", "not",
})  # fmt: skip


#: The arrays of the size of random bits that XLA writes for one kernel, where it writes any.
CONSTANT_ARRAYS = 31

#: The passes in which random bits are computed again.
_AGAIN = frozenset({"recomputed", "backward"})


def recomputed_bits(program: Program) -> list[int]:
    """Random bits that a backward pass computes again, from integers (Threefry).

    XLA for TPUs may run a collective beside the product whose kernel computes them.  Such a kernel
    has every constant as an operand, each an array as large as the bits
    (:data:`CONSTANT_ARRAYS`).  It does so in about half of the programs that were compiled for it.
    """
    return [
        op.results[0]
        for kind, each, op in zip(program.kinds, program.passes, program.ops, strict=True)
        if kind == "xor" and each in _AGAIN
        and program.values[op.results[0]].type.dtype == _BITS
    ]  # fmt: skip


def bit_operations(
    program: Program, live: Liveness, flops: Floats, flops_beside: float, elements_beside: float
) -> Floats:
    """``[values]`` integer operations that their kernels do not hide, of all runs in a step.

    ``flops`` (``[ops]``) are those of one run of each product.  A kernel hides one operation for
    each ``flops_beside`` of its product, and ``elements_beside`` for each element of its largest
    array.
    """
    found = np.zeros(len(program.values))
    makers, elements = program.makers, program.elements
    bits = [
        number for number, op in enumerate(makers)
        if program.kinds[op] in _OPERATIONS and program.values[number].type.dtype == _BITS
        and not live.exists[number] and elements[number]
    ]  # fmt: skip
    if not bits or not flops_beside:
        return found
    # The kernels that compute each value that is not in memory, from the last op to the first.
    kernels: dict[int, frozenset[int]] = {}
    for number in range(len(program.values) - 1, -1, -1):
        if not live.exists[number]:
            kernels[number] = frozenset().union(*(
                kernels.get(result, frozenset([user]))
                for user in program.users[number] for result in program.ops[user].results[:1]
            ))  # fmt: skip
    work: dict[int, float] = {}
    for number in bits:
        for kernel in kernels[number]:
            work[kernel] = work.get(kernel, 0.0) + elements[number]
    shown = {}
    for kernel, operations in work.items():
        op = program.ops[kernel]
        product = live.fused_product[op.results[0]] if op.results else -1
        hidden = flops[makers[product] if product >= 0 else kernel] / flops_beside
        hidden += elements_beside * max(elements[v] for v in (*op.operands, *op.results))
        shown[kernel] = max(operations - hidden, 0.0) / operations
    for number in bits:  # XLA computes before a loop what the loop does not change
        each = sum(shown[kernel] for kernel in kernels[number])
        found[number] = elements[number] * each * program.repeats[makers[number]]
    return found
