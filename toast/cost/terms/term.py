"""What a term of the price says of itself; see ``docs/design.md``, "The algebra of prices"."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable, Sequence

import numpy as np

from toast.cost.entities import OP_SCOPES, Dims, Entity, Floats
from toast.cost.layout import ALL_TO_ALL, Axes, Layout, LocalLayout
from toast.cost.liveness import Lifetimes, LiveRanges


class StepPart(enum.IntEnum):
    """The part of a step that a term's own seconds are counted in."""

    PRODUCTS = 0
    MEMORY = 1


class Term:
    """One summand of a price: something that entities of one kind cost.

    A term says what it takes besides collectives (:meth:`seconds`), which collectives it needs
    (:meth:`traffic`) and what it keeps in memory (:meth:`bytes`, from :meth:`lifetimes` on); what
    it does not say is nothing.  All that is said of an entity depends on its **neighbourhood**: on
    the op class that makes a value, and on those that use it.
    """

    #: Tells the term from others; also its block of columns in the timeline.
    name: str
    #: What it is said of: arrays are ``[S, entities]``.
    scope: Entity
    #: What tables and reports call its buffers and collectives.
    label: str = ""
    part: StepPart = StepPart.MEMORY
    #: Whether its bytes are there from the start of a step to the end.
    resident: bool = False

    def seconds(self, layout: Layout) -> Floats | None:
        """Seconds in a step, of all members of each entity: ``[S, entities]``."""
        return None

    def traffic(self, layout: Layout) -> Iterable[Traffic]:
        """Collectives, of value classes or use classes."""
        return ()

    def most_spared(self, traffic: Traffic) -> Floats | float:
        """``traffic.spared``, or more where it depends on more than the neighbourhood."""
        return traffic.spared

    def sent_share(self, traffic: Traffic) -> Floats | float:
        """Bytes that a device sends over those that it sends round a ring: ``[S, entities]``."""
        return 1.0

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes | None:
        """When its buffers are in memory; none for a term without any, or a resident one."""
        return None

    def bytes(self, layout: Layout) -> Floats:
        """Bytes in the memory of a device while a buffer is alive: ``[S, entities]``."""
        raise NotImplementedError(f"{self.name} keeps nothing in memory")

    def least_bytes(self, layout: Layout) -> Floats:
        """:meth:`bytes`, or fewer where these depend on more than the neighbourhood."""
        return self.bytes(layout)

    def most_bytes(self, layout: Layout) -> Floats:
        """:meth:`bytes`, or more where these depend on more than the neighbourhood."""
        return self.bytes(layout)


class LocalTerm(Term):
    """A term whose seconds follow from bytes and from the sharding of each entity's own op class.

    They must not fall where bytes grow.  So they are known, or bounded from below, where every op
    class chooses for itself.
    """

    def seconds(self, layout: LocalLayout) -> Floats:
        """Seconds in a step, of all members of each entity: ``[S, entities]``."""
        raise NotImplementedError


class OrderedTerm(Term):
    """A term whose collectives depend on the order of the mesh axes, one for a whole program."""

    def ends(self, layout: Layout) -> tuple[Dims, Dims]:
        """The shardings that shards move between: ``[S, entities, A]`` before and after."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind, of ``X`` value or use classes in ``S`` states."""

    term: Term
    layout: Layout
    kind: int  # a place in toast.hardware.COLLECTIVES
    axes: Axes  # [S, X]
    size: Floats  # [S, X] bytes as priced
    result: Floats  # [S, X] bytes of results
    times: Floats  # [S, X] or [X] how often, if there are axes
    spared: Floats | float = 0.0  # [S, X] or [X] the share of them that XLA does not need
    rounded: Floats | float = 1.0  # [X] bytes of an element over those in the program
    stated: int | None = None  # the kind that stands in the program, where XLA takes another one

    @functools.cached_property
    def count(self) -> Floats:
        """``[S, X]`` how often each happens in a step."""
        return np.asarray((self.axes > 0) * self.times * (1.0 - self.spared))

    @functools.cached_property
    def least_count(self) -> Floats:
        """``[S, X]`` how often at least, whatever happens outside of the neighbourhood."""
        return np.asarray((self.axes > 0) * self.times * (1.0 - self.term.most_spared(self)))

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kinds of which the slowest is the price."""
        # Shards that trade places go anywhere, not only to neighbours.
        return (self.kind, ALL_TO_ALL) if isinstance(self.term, OrderedTerm) else (self.kind,)

    @functools.cached_property
    def once(self) -> Floats:
        """``[S, X]`` seconds that one takes."""
        links = self.layout.machine.collectives
        seconds = (links.seconds(kind, self.size, self.axes) for kind in self.kinds)
        return functools.reduce(np.maximum, seconds)

    @property
    def seconds(self) -> Floats:
        """``[S, X]`` seconds of all of them in a step."""
        return np.asarray(self.count * self.once)

    @property
    def sent(self) -> Floats:
        """``[S, X]`` bytes that a device sends in a step, round rings."""
        ring = self.layout.machine.collectives.sent_share(self.kind, self.axes)
        share = ring * self.term.sent_share(self)
        return np.asarray(self.count * share * self.size)


def check(terms: Sequence[Term]) -> None:
    """Raise ``ValueError`` where a term has the name of another, or says what its scope cannot."""
    names = [term.name for term in terms]
    for number, term in enumerate(terms):
        said = {name for name in vars(Term) if getattr(type(term), name) != getattr(Term, name)}
        if names.index(term.name) != number:
            raise ValueError(f"two terms have the name {term.name!r}; give each its own")
        if term.scope in OP_SCOPES and (
            not isinstance(term, LocalTerm) or said & {"traffic", "lifetimes", "bytes"}
        ):
            raise ValueError(
                f"term {term.name!r}: an op class has seconds alone, as a LocalTerm says them; "
                "give memory and collectives to its values or their uses"
            )
        if term.scope is Entity.COPY_PAIR and said & {"traffic", "seconds"}:
            raise ValueError(f"term {term.name!r}: a pair of uses has memory alone")
