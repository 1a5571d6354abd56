"""What the kernel of a custom call costs."""

from __future__ import annotations

import dataclasses

#: The quantities of costs: FLOPs, exponentials and the like, bytes that are read and written
#: besides operands and results, and bytes of memory in use while the kernel runs.
QUANTITIES = ("flops", "transcendentals", "bytes", "workspace")


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """A term of the cost of one call of a kernel."""

    #: One of :data:`QUANTITIES`.
    quantity: str
    #: The cost of the whole call.
    amount: float
    #: The factors of the op whose sharding divides it; numbers as in its rule.
    factors: tuple[int, ...]
    #: For bytes: the operand of which the kernel moves these bytes, instead of all of it.  Results
    #: are numbered -1, -2 and so on; None for other bytes.
    tensor: int | None = None
