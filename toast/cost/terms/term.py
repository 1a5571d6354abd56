"""The protocol of a term; see ``docs/design.md``, "The algebra of prices"."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable, Sequence

import numpy as np

from toast.cost.axis_sets import ALL_TO_ALL, Axes
from toast.cost.entities import OP_SCOPES, Dims, Entity, Floats
from toast.cost.layout import Layout, LocalLayout
from toast.cost.liveness import Lifetimes, LiveRanges


class StepPart(enum.IntEnum):
    """The part of a step that a term's own seconds are counted in."""

    PRODUCTS = 0
    MEMORY = 1
    #: Transfers to the memory of the host and back, which run beside everything else.
    HOST = 2


class Term:
    """One summand of a price: a cost of the entities of one kind.

    A term defines its seconds without collectives (:meth:`seconds`), its collectives
    (:meth:`traffic`) and its memory (:meth:`lifetimes`, :meth:`bytes`); by default it has none.
    The costs of an entity depend only on its **neighbourhood**: the op class that defines a value,
    and those that use it.
    """

    #: Unique name, also of its block of columns in the timeline.
    name: str
    #: The kind of entities: arrays are ``[S, entities]``.
    scope: Entity
    #: Name of its buffers and collectives in tables and reports.
    label: str = ""
    part: StepPart = StepPart.MEMORY
    #: Whether its bytes are in memory during the whole step.
    resident: bool = False
    #: Whether its buffers depend on the results of products, as those of loops do: programs over
    #: pairs of choices, which do not know these, leave them out.
    of_loops: bool = False
    #: Whether the heap has gaps beside its short-lived buffers.
    has_gaps: bool = True
    #: Whether the op that needs its collectives computes meanwhile.
    beside_op: bool = False

    def seconds(self, layout: Layout) -> Floats | None:
        """Seconds in a step, of all members of each entity: ``[S, entities]``."""
        return None

    def least_seconds(self, layout: Layout) -> Floats | None:
        """:meth:`seconds`, or a lower bound if they depend on more than the neighbourhood."""
        return self.seconds(layout)

    def traffic(self, layout: Layout) -> Iterable[Traffic]:
        """Collectives, of value classes or use classes."""
        return ()

    def stated(self, layout: Layout) -> Iterable[Traffic]:
        """The collectives of the program, before XLA merges, moves or replaces them."""
        return self.traffic(layout)

    def most_spared(self, traffic: Traffic) -> Floats | float:
        """``traffic.spared``, or an upper bound if it depends on more than the neighbourhood."""
        return traffic.spared

    def sent_share(self, traffic: Traffic) -> Floats | float:
        """``[S, entities]`` bytes that a device sends over those of a ring."""
        return 1.0

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes | None:
        """When its buffers are in memory; ``None`` for a term without any, or a resident one."""
        return None

    def bytes(self, layout: Layout) -> Floats:
        """``[S, entities]`` bytes of a live buffer on a device."""
        raise NotImplementedError(f"{self.name} keeps nothing in memory")

    def least_bytes(self, layout: Layout) -> Floats:
        """:meth:`bytes`, or a lower bound if they depend on more than the neighbourhood."""
        return self.bytes(layout)

    def most_bytes(self, layout: Layout) -> Floats:
        """:meth:`bytes`, or an upper bound if they depend on more than the neighbourhood."""
        return self.bytes(layout)


class LocalTerm(Term):
    """A term whose seconds depend on bytes and on the shardings of op classes.

    Its least seconds depend on that of each entity's own op class alone, and must not decrease when
    bytes increase: they are then bounded from below even if every op class chooses on its own.
    """

    def seconds(self, layout: LocalLayout) -> Floats:
        """Seconds in a step, of all members of each entity: ``[S, entities]``."""
        raise NotImplementedError

    def least_seconds(self, layout: LocalLayout) -> Floats:
        """:meth:`seconds`, or a lower bound if they depend on other op classes, too."""
        return self.seconds(layout)


class OrderedTerm(Term):
    """A term whose collectives depend on the program's order of mesh axes."""

    def ends(self, layout: Layout) -> tuple[Dims, Dims]:
        """The shardings between which shards move: ``[S, entities, A]`` before and after."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind, of ``X`` value or use classes in ``S`` states."""

    term: Term
    layout: Layout
    kind: int  # index into toast.hardware.COLLECTIVES
    axes: Axes  # [S, X]
    size: Floats  # [S, X] bytes as priced
    result: Floats  # [S, X] bytes of results
    times: Floats  # [S, X] or [X] number per step, if there are axes
    spared: Floats | float = 0.0  # [S, X] or [X] share of them that XLA saves
    rounded: Floats | float = 1.0  # [S, X] or [X] bytes as priced over those in the program
    stated: int | None = None  # the kind in the program, if XLA uses another
    behind: Floats | float = 0.0  # [S, X] seconds of each beside another of them
    in_loops: bool = False  # XLA makes loops of products and permutes of them

    @functools.cached_property
    def count(self) -> Floats:
        """``[S, X]`` how often each happens in a step."""
        return np.asarray((self.axes > 0) * self.times * (1.0 - self.spared))

    @functools.cached_property
    def least_count(self) -> Floats:
        """``[S, X]`` lower bound of :attr:`count`, whatever happens outside the neighbourhood."""
        return np.asarray((self.axes > 0) * self.times * (1.0 - self.term.most_spared(self)))

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kinds of collectives; the slowest determines the price."""
        # Shards that change places move to any device, not only to neighbours.
        return (self.kind, ALL_TO_ALL) if isinstance(self.term, OrderedTerm) else (self.kind,)

    @functools.cached_property
    def once(self) -> Floats:
        """``[S, X]`` seconds of one collective, without those beside another of them."""
        links = self.layout.machine.collectives
        seconds = (links.seconds(kind, self.size, self.axes) for kind in self.kinds)
        return np.asarray(functools.reduce(np.maximum, seconds) - self.behind)

    @property
    def seconds(self) -> Floats:
        """``[S, X]`` seconds of all of them in a step."""
        return np.asarray(self.count * self.once)

    @property
    def sent(self) -> Floats:
        """``[S, X]`` bytes that a device sends in a step, in rings."""
        ring = self.layout.machine.collectives.sent_share(self.kind, self.axes)
        share = ring * self.term.sent_share(self)
        return np.asarray(self.count * share * self.size)


def check(terms: Sequence[Term]) -> None:
    """Raise ``ValueError`` for a duplicate name, or for costs that a scope cannot have.

    So it does for a term without a name or a scope, and for a :class:`LocalTerm` without seconds.
    """
    for term in terms:
        for field in ("name", "scope"):
            if not hasattr(term, field):
                raise ValueError(f"{type(term).__name__} has no {field}; define it in the class")
        if isinstance(term, LocalTerm) and type(term).seconds is LocalTerm.seconds:
            raise ValueError(f"term {term.name!r}: a LocalTerm must define seconds")
    names = [term.name for term in terms]
    for number, term in enumerate(terms):
        defined = {name for name in vars(Term) if getattr(type(term), name) != getattr(Term, name)}
        if names.index(term.name) != number:
            raise ValueError(f"two terms have the name {term.name!r}; give each its own")
        if term.scope in OP_SCOPES and (
            not isinstance(term, LocalTerm) or defined & {"traffic", "lifetimes", "bytes"}
        ):
            raise ValueError(
                f"term {term.name!r}: a term of an op class must be a LocalTerm that defines only "
                "seconds; give memory and collectives to values or uses"
            )
        if term.scope is Entity.COPY_PAIR and defined & {"traffic", "seconds"}:
            raise ValueError(f"term {term.name!r}: a term of a pair of uses may define only memory")
