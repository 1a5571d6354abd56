"""Which ops share a kernel on TPUs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toast.cost.entities import Bools, Ints
from toast.program import Program
from toast.space import PRODUCTS

#: The op that writes a part of an array in place.
UPDATING = "dynamic_update_slice"


def kernels(
    program: Program,
    kinds: Sequence[str],
    exists: Bools,
    early: Ints,
) -> Ints:
    """``[ops]`` numbers of kernels: ops with the same one share a kernel.

    They share that of the op after which they could be computed (``early``), with one exception: a
    softmax or a norm needs every element of a reduction, whose kernel has read its operand by then.
    If the result is written into a stack, another kernel does it, and reads the operand again.
    Kernels of products compute such operands themselves.

    ``kinds`` (``[ops]``) are those of kernels, and ``exists`` (``[values]``) says which values are
    in memory.
    """
    kernel = early.copy()
    if UPDATING not in kinds:
        return kernel  # nothing is written into a stack
    product = [kind in PRODUCTS for kind in kinds]
    for_products, for_stacks = ([False] * len(program.ops) for _ in range(2))
    stored = exists.tolist()
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        if product[number] or not op.results or any(stored[value] for value in op.results):
            continue
        users = [user for value in op.results for user in program.users[value]]
        for_products[number] = bool(users) and all(
            product[user] or for_products[user] for user in users
        )
        for_stacks[number] = any(
            for_stacks[user]
            or (kinds[user] == UPDATING and program.ops[user].operands[1] in op.results)
            for user in users
        )
    for number in np.flatnonzero(for_stacks).tolist():
        if for_products[number]:
            continue
        before = int(early[number])
        if before != number and kinds[before] == "reduce":
            result, reduced = program.ops[number].results[0], program.ops[before].results[0]
            if program.elements[result] > program.elements[reduced]:
                kernel[number] = len(program.ops) + before
    return kernel


__all__ = ["UPDATING", "kernels"]
