"""The terms of a price."""

from toast.cost.terms.buffers import (
    Arguments,
    Copies,
    MergedSums,
    RingBuffers,
    SecondBuffers,
    SharedCopies,
    Values,
    WholeSums,
    Workspaces,
)
from toast.cost.terms.kernels import (
    HostTransfers,
    KernelWork,
    ProductWork,
    Reads,
    Transcendentals,
    Writes,
)
from toast.cost.terms.term import LocalTerm, OrderedTerm, StepPart, Term, Traffic, check
from toast.cost.terms.traffic import (
    Halos,
    LoopedGathers,
    LoopedSums,
    RegionCollectives,
    Reshards,
    Rings,
    RingSums,
    SumPlaces,
    Sums,
    UsePlaces,
)

#: In the order of collectives in lists, and of buffers in the timeline.
DEFAULT_TERMS: tuple[Term, ...] = (
    ProductWork(), KernelWork(), Writes(), Transcendentals(), Reads(), HostTransfers(),
    Sums(), Reshards(), Halos(), Rings(), RingSums(), LoopedGathers(),
    LoopedSums(), RegionCollectives(),
    SumPlaces(), UsePlaces(),
    Arguments(), Values(), Copies(), SharedCopies(), WholeSums(), MergedSums(),
    SecondBuffers(), Workspaces(), RingBuffers(),
)  # fmt: skip

__all__ = ["DEFAULT_TERMS", "LocalTerm", "OrderedTerm", "StepPart", "Term", "Traffic", "check"]
