"""What the kernel of a custom call costs."""

from __future__ import annotations

import dataclasses

#: The quantities of costs: FLOPs, exponentials and the like, bytes that are read and written
#: besides operands and results, and bytes of memory in use while the kernel runs.
QUANTITIES = ("flops", "transcendentals", "bytes", "workspace")


@dataclasses.dataclass(frozen=True)
class CausalQueries:
    """Queries of causal attention, in order: each sees as many keys as its position allows.

    Numbers are over that of the queries.
    """

    #: The factor that has the queries.
    factor: int
    #: The most keys that a query sees.
    most: float
    #: The first queries, which see fewer.
    early: float

    @property
    def mean(self) -> float:
        """The keys that a query sees on average."""
        return self.most - self.early**2 / 2


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
    #: If devices that shard queries have unequal parts of the cost: these queries.  The largest
    #: part counts.
    queries: CausalQueries | None = None
