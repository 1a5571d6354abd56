"""Records that explain an analysis: the chain between two dimensions, and conflicts."""

from __future__ import annotations

import dataclasses
from typing import Literal

from toast.analysis.dimensions import Dimension
from toast.analysis.rules import RuleLine
from toast.program import Location
from toast.records import Record

#: The connection of two places: one factor of an op; a definition and a use of a value; two factors
#: that a loop or a donated argument identifies.  ``apart`` is no connection: two factors of one op.
Kind = Literal["identity", "def_use", "loop", "donation", "apart"]


#: The role of a factor, in Shardy's terms.
Role = Literal["pass_through", "reduction", "need_replication", "permutation"]


@dataclasses.dataclass(frozen=True)
class Place:
    """A dimension of a value at one op."""

    #: The number of the op.
    op: int
    #: The kind of the op, such as ``dot_general``.
    op_kind: str
    #: The source line of the op.
    location: Location
    #: ``operand(0)`` if the op uses the value, ``result(0)`` if it defines the value.
    tensor: str
    #: The dimension.
    dimension: Dimension
    #: The (major-most) factor of the dimension: the name is (op, factor).
    factor: str
    #: The role of the factor, in Shardy's terms.
    role: Role

    @property
    def op_text(self) -> str:
        """``dot_general#12``, or an argument by its path."""
        if self.op_kind == "argument":
            return f"argument {self.dimension.label.rpartition(':')[0]}"
        return f"{self.op_kind}#{self.op}"

    @property
    def where(self) -> str:
        """``operand 0 dimension 1``."""
        return f"{self.tensor.replace('(', ' ').rstrip(')')} dimension {self.dimension.d}"


@dataclasses.dataclass(frozen=True)
class ChainStep:
    """Two places that are connected, or that one op separates, and the rules that state it."""

    #: What connects the places, or separates them.
    kind: Kind
    #: The place where the step begins.
    one: Place
    #: The place where it ends.
    other: Place
    #: The rules that state it.
    rules: tuple[RuleLine, ...]
    #: For a step that separates: the reason.
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Chain(Record):
    """The steps between two dimensions; every step begins at the end of the previous one."""

    #: The first dimension.
    one: Dimension
    #: The second dimension.
    other: Dimension
    #: Whether they have one color.  Otherwise some steps are ``apart``, as few as possible; or
    #: there are no steps, because there is no path.
    tied: bool
    #: The steps from the one to the other.
    steps: tuple[ChainStep, ...]

    def __repr__(self) -> str:
        return f"<Chain: {self.verdict}>"

    @property
    def verdict(self) -> str:
        """One line that says whether the two dimensions have one color."""
        if self.one == self.other:
            return f"{self.one} is a single dimension"
        ends = f"{self.one} and {self.other}"
        if self.tied:
            count = len(self.steps)
            return f"{ends} have one color, by {count} step{'s' * (count != 1)}"
        if not self.steps:
            return f"{ends} have different colors: no chain of ops connects them"
        by = [f"{step.one.op_text} ({step.reason})" for step in self.apart]
        separates = "separates" if len(by) == 1 else "separate"
        return f"{ends} have different colors: {' and '.join(by)} {separates} them"

    @property
    def apart(self) -> tuple[ChainStep, ...]:
        """The steps that keep the two apart."""
        return tuple(step for step in self.steps if step.kind == "apart")


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two names of a conflict: a factor of an op."""

    #: The number of the name.
    name: int
    #: The number of the op.
    op: int
    #: The kind of the op, such as ``dot_general``.
    op_kind: str
    #: The source line of the op.
    location: Location
    #: The factor of the op, such as ``contracting(0)``.
    factor: str
    #: As :meth:`toast.Analysis.name_label` writes it.
    label: str


@dataclasses.dataclass(frozen=True)
class Site:
    """A tensor that both names annotate: one mesh axis cannot shard it along both."""

    #: ``def`` where ``op`` defines it, ``use`` where ``op`` uses it.
    kind: str
    #: The number of the op.
    op: int
    #: The kind of the op.
    op_kind: str
    #: The source line of the op.
    location: Location
    #: Its dimensions under the names, in the order of the conflict's.
    dimensions: tuple[Dimension, Dimension]


@dataclasses.dataclass(frozen=True)
class Neighbour:
    """A conflict at the other end of a box (3.5, Figure 6)."""

    #: The number of the conflict.
    number: int
    #: Names that edges join: the first of each pair is one of the conflict's, and choosing it goes
    #: with choosing the second, one of the neighbour's.
    pairs: tuple[tuple[str, str], tuple[str, str]]
    #: Whether a path leads across, so that the two conflicts are not compatible.
    crossed: bool


@dataclasses.dataclass(frozen=True)
class Conflict(Record):
    """Two names of one color that annotate one tensor (paper, sections 3.3 to 3.6)."""

    #: Row of :attr:`toast.Analysis.conflict`.
    number: int
    #: Resolution 0 picks the first, resolution 1 the second.
    sides: tuple[Side, Side]
    #: The tensors that both names annotate.
    sites: tuple[Site, ...]
    #: What makes the two one dimension: from the first dimension of the first site to the second.
    chain: Chain
    #: The dimension on the chain from which two flows lead to the ends of it, and so to the first
    #: site: the earliest in the program that two ops of the chain use.  None, and no flows, where
    #: the chain leaves the site by its uses only.
    source: Dimension | None
    #: The two flows from the source to the first site.
    flows: tuple[tuple[ChainStep, ...], ...]
    #: The conflicts that are resolved with this one.
    neighbours: tuple[Neighbour, ...]
    #: Compatibility set, and the conflicts in it (this one among them): all are resolved alike.
    set: int
    #: The numbers of the conflicts in the compatibility set.
    set_members: tuple[int, ...]
    #: Resolution group: sets of repeated layers, which are resolved alike too.
    group: int
    #: The numbers of the sets in the resolution group.
    group_sets: tuple[int, ...]

    def __repr__(self) -> str:
        one, other = self.sides
        return (
            f"<Conflict {self.number}: {one.label} and {other.label}, at {len(self.sites)} "
            f"tensors, {len(self.set_members)} resolved alike>"
        )
