"""The terms of a price."""

from toast.cost.terms.bands import ImagesInBands
from toast.cost.terms.buffers import (
    AddedOperands,
    AddedResults,
    ArgumentCopies,
    Arguments,
    Copies,
    DelayedOperands,
    EarlyCopies,
    HaloOperands,
    ImagesInLanes,
    LogitGradients,
    LookupCopies,
    MergedSums,
    PartedOperands,
    RingBuffers,
    RoundedStacks,
    ScatteredSums,
    SecondBuffers,
    SharedCopies,
    SlicedSelections,
    Values,
    WaitingOperands,
    WholeSums,
    Workspaces,
)
from toast.cost.terms.cache_copies import CacheCopies
from toast.cost.terms.kernels import (
    HostTransfers,
    KernelWork,
    Latencies,
    PartedProducts,
    ProductWork,
    RandomBits,
    Reads,
    RoundedReads,
    Roundings,
    StepRows,
    SumKernels,
    Transcendentals,
    Writes,
)
from toast.cost.terms.stack_copies import StackCopies
from toast.cost.terms.term import LocalTerm, OrderedTerm, StepPart, Term, Traffic, check
from toast.cost.terms.traffic import (
    ConditionGathers,
    ExplicitPlaces,
    ExplicitReshards,
    ExplicitSums,
    GatherCopies,
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
from toast.cost.terms.turned_operands import TurnedOperands

#: In the order of collectives in lists, and of buffers in the timeline.
DEFAULT_TERMS: tuple[Term, ...] = (
    ProductWork(), PartedProducts(), TurnedOperands(), KernelWork(), Writes(), SumKernels(),
    Transcendentals(), RandomBits(), Reads(), RoundedReads(), StepRows(), Latencies(), Roundings(),
    GatherCopies(), LogitGradients(), HostTransfers(),
    Sums(), Reshards(), Halos(), Rings(), RingSums(), LoopedGathers(),
    LoopedSums(), RegionCollectives(),
    SumPlaces(), UsePlaces(),
    Arguments(), Values(), Copies(), EarlyCopies(), ArgumentCopies(), LookupCopies(),
    SharedCopies(), WholeSums(), MergedSums(), HaloOperands(), SecondBuffers(), PartedOperands(),
    DelayedOperands(), ImagesInLanes(), WaitingOperands(), ImagesInBands(), SlicedSelections(),
    AddedOperands(), AddedResults(), RoundedStacks(), StackCopies(), CacheCopies(), Workspaces(),
    RingBuffers(),
)  # fmt: skip

#: Those that price what XLA's partitioner makes of sums and of gathers.
_OF_PARTITIONER = (
    SecondBuffers, PartedProducts, WaitingOperands, GatherCopies, LogitGradients, TurnedOperands,
)  # fmt: skip

#: Those of a device-local program: XLA partitions none of its ops, and adds no loops.
LOCAL_TERMS: tuple[Term, ...] = (
    *(
        ExplicitSums() if type(term) is Sums
        else ExplicitReshards() if isinstance(term, Reshards)
        else ExplicitPlaces() if isinstance(term, UsePlaces)
        else ScatteredSums() if isinstance(term, WholeSums)
        else term
        for term in DEFAULT_TERMS if not isinstance(term, _OF_PARTITIONER)
    ),
    ConditionGathers(),
)  # fmt: skip

__all__ = [
    "DEFAULT_TERMS",
    "LOCAL_TERMS",
    "ConditionGathers",
    "LocalTerm",
    "OrderedTerm",
    "Reshards",
    "StepPart",
    "Term",
    "Traffic",
    "UsePlaces",
    "check",
]
