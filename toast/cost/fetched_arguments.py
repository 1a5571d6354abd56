"""Arguments that XLA copies to the fast memory of a TPU before their products run.

The copies run beside earlier products, one after the other.  XLA copies the largest arguments
first, as far as the time allows in which these products would read their operands from memory.
One argument, the largest, is in fast memory when the program begins.
"""

from __future__ import annotations

import numpy as np

from toast.cost.argument_views import argument_views, static_slices
from toast.cost.conditionals import branch_runs
from toast.cost.entities import Bools, Ints
from toast.cost.program_loops import loops_around
from toast.program import Program
from toast.space import PRODUCTS

#: Time that XLA leaves for a copy, over the time of the copy itself.  Fitted to the kernels of
#: decode steps that XLA compiled.
_COPY_TIME = 1.5


def fetched_uses(program: Program, use_op: Ints, use_value: Ints) -> Bools:
    """``[uses]`` those of arguments by products that find them in fast memory, if there is room.

    Products read slices of arguments from memory.  Loops and branches of conditionals are left out.
    """
    product = np.array([kind in PRODUCTS for kind in program.kinds], dtype=bool)
    product &= np.array([loop is None for loop in loops_around(program)], dtype=bool)
    product &= branch_runs(program) == 0
    size = np.array(program.value_bytes, dtype=np.float64)[use_value]
    read = np.flatnonzero(product[use_op])
    own = (argument_views(program) > 0) & ~static_slices(program)
    arguments = read[own[use_value[read]]]
    fetched = np.zeros(len(use_op), dtype=bool)
    if not len(arguments):
        return fetched
    arguments = arguments[np.argsort(-size[arguments], kind="stable")]
    fetched[arguments[0]] = True
    time = size.copy()
    time[arguments[0]] = 0.0
    ops, place = np.unique(use_op[read], return_inverse=True)
    each = np.bincount(place, time[read], len(ops))
    left = np.cumsum(each) - each  # bytes that may be copied before each product
    place_of = dict(zip(read.tolist(), place.tolist(), strict=True))
    for use in arguments[1:].tolist():
        later = left[place_of[use] :]
        if later.min() >= _COPY_TIME * size[use]:
            later -= _COPY_TIME * size[use]
            fetched[use] = True
    return fetched


__all__ = ["fetched_uses"]
