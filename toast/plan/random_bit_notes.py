"""A note on random bits that a backward pass computes again on TPUs, where XLA may not fit them."""

from __future__ import annotations

import math

from toast.cost.random_bits import CONSTANT_ARRAYS, recomputed_bits
from toast.plan.plan import Plan
from toast.units import size_text


def random_bit_notes(plan: Plan) -> list[str]:
    """A line if the plan does not fit should XLA write the constants of random bits in full.

    See :func:`toast.cost.random_bits.recomputed_bits`.
    """
    program, constants = plan.analysis.program, plan.after.constant_bytes
    needed = plan.after.peak_bytes + constants
    if not constants or needed <= plan.memory_bytes or not plan.fits:
        return []
    axes = dict(plan.mesh.axes)

    def on_device(value: int) -> float:
        spec = plan.shardings.of(program, value)
        shards = math.prod(axes[axis] for dimension in spec for axis in dimension)
        return program.elements[value] / shards

    op = program.makers[max(recomputed_bits(program), key=on_device)]
    return [
        f"random bits are computed again ({program.describe(op)}): XLA may write "
        f"{CONSTANT_ARRAYS} arrays of {size_text(constants / CONSTANT_ARRAYS)} for them, with "
        f"which the peak is {size_text(needed)}; --safety leaves them out, --confirm asks it, and "
        "keys of jax.random.key(seed, impl='rbg') avoid them"
    ]


__all__ = ["random_bit_notes"]
