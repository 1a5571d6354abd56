"""A note on random bits that a backward pass computes again on TPUs, where XLA may not fit them."""

from __future__ import annotations

import math

from toast.plan.plan import Plan
from toast.program import element_bytes
from toast.units import size_text

#: The most arrays of the size of random bits that XLA wrote for one of their kernels.
_ARRAYS = 31

#: The passes in which random bits are computed again.
_AGAIN = frozenset({"recomputed", "backward"})


def random_bit_notes(plan: Plan) -> list[str]:
    """A line if the plan does not fit should XLA write the constants of random bits in full.

    JAX computes random bits from integers (threefry).  In a backward pass that computes them again,
    XLA's TPU compiler may write each constant of their kernel as an array of its own, all at once.
    """
    program = plan.analysis.program
    if plan.hardware.lanes == 1:
        return []
    axes = dict(plan.mesh.axes)
    largest, of_op = 0.0, -1
    for op, (kind, each) in enumerate(zip(program.kinds, program.passes, strict=True)):
        if kind != "xor" or each not in _AGAIN:
            continue
        value = program.ops[op].results[0]
        type_ = program.values[value].type
        if type_.dtype != "ui32":
            continue
        spec = plan.shardings.of(program, value)
        shards = math.prod(axes[axis] for dimension in spec for axis in dimension)
        size = math.prod(type_.shape) * element_bytes(type_.dtype) / shards
        if size > largest:
            largest, of_op = size, op
    needed = plan.after.peak_bytes + _ARRAYS * largest
    if not largest or needed <= plan.memory_bytes or not plan.fits:
        return []
    return [
        f"random bits are computed again ({program.describe(of_op)}): XLA may write up to "
        f"{_ARRAYS} arrays of {size_text(largest)} for them, with which the peak is "
        f"{size_text(needed)}; --confirm asks it, and keys of jax.random.key(seed, impl='rbg') "
        "avoid them"
    ]
