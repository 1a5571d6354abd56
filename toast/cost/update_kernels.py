"""Which kernels write updates into their buffers on TPUs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from toast.cost.entities import Bools, Ints
from toast.cost.liveness import BARRIERS, Liveness
from toast.cost.shared_kernels import UPDATING
from toast.program import Program
from toast.space import PRODUCTS

#: Ops between an update and the kernel that computes it, which leave elements where they are.
RESHAPING = frozenset({"reshape", "broadcast_in_dim", "sdy_sharding_constraint"})

#: Ops that no kernel computes, or one that writes no updates.
_APART = BARRIERS | {"argument", UPDATING}


class UpdateKernels(NamedTuple):
    """The kernels of ops, where updates belong to those that compute them."""

    #: ``[ops]`` the number of the kernel of each op.
    kernel: Ints
    #: ``[ops]`` whether it is an update that a product's kernel computes and writes.
    by_product: Bools
    #: ``[ops]`` whether it is an update whose kernel reads again what that of another one has read.
    again: Bools


def update_kernels(program: Program, live: Liveness, lanes: int) -> UpdateKernels:
    """The kernels that write updates, on devices with tiles of several ``lanes``.

    The kernel that computes an update writes it into its buffer, if both are in the same loop.
    Another update, such as a value that the loop carries, needs a kernel of its own.  So does each
    further update that one kernel could compute: a scan that keeps ``x``, ``tanh(x)`` and their
    product reads ``x`` for each.  It is priced as part of that kernel, with one more read of as
    many bytes as the update has: most such kernels read one array of that size.
    """
    kernel = live.kernel.copy()
    by_product, again = np.zeros((2, len(program.ops)), dtype=bool)
    writing: set[int] = set()
    for number, kind in enumerate(live.kinds if lanes > 1 else ()):
        if kind != UPDATING:
            continue
        value = program.ops[number].operands[1]
        while live.kinds[program.makers[value]] in RESHAPING:
            value = program.ops[program.makers[value]].operands[0]
        maker = program.makers[value]
        if program.repeats[maker] == program.repeats[number]:
            if live.kinds[maker] in PRODUCTS or live.fused_product[value] >= 0:
                by_product[number] = True
            elif live.kinds[maker] not in _APART:
                kernel[number] = live.kernel[maker]
                again[number] = live.kernel[maker] in writing
                writing.add(int(live.kernel[maker]))
    return UpdateKernels(kernel, by_product, again)


__all__ = ["RESHAPING", "UpdateKernels", "update_kernels"]
