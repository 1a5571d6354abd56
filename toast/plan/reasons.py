"""Records that explain a plan: why arguments are sharded as they are, and why collectives run."""

from __future__ import annotations

import dataclasses
from typing import Any

from toast.plan.labels import shown_labels, spec_text
from toast.plan.prediction import Prediction
from toast.program import Spec
from toast.records import Record
from toast.units import time_text


@dataclasses.dataclass(frozen=True)
class Cause:
    """What gave a mesh axis to an op."""

    #: Step of the plan, from 1; 0 where no step did, but the plan's method.
    number: int
    #: ``pin``, ``fix``, ``action``, ``refinement``, or the method.
    kind: str
    axis: str
    #: Dimensions that the step shards.
    dimensions: tuple[str, ...] = ()
    resolution: tuple[int, ...] = ()
    #: What the step gained and what it paid.
    reason: str = ""
    before: Prediction | None = None
    after: Prediction | None = None

    def __str__(self) -> str:
        if not self.number:
            return f"{self.kind} put it there"
        shown = shown_labels(self.dimensions, 2) or "intermediate values"
        return f"step {self.number}, {self.kind} of {shown} along {self.axis or 'axes'}"


@dataclasses.dataclass(frozen=True)
class HeldAxis:
    """A mesh axis that shards a dimension of an argument."""

    dimension: int
    axis: str
    cause: Cause


@dataclasses.dataclass(frozen=True)
class FreeAxis:
    """A mesh axis that does not shard a dimension of an argument, and why."""

    dimension: int
    axis: str
    #: ``elsewhere`` (it shards another dimension), ``size`` (it does not divide this one),
    #: ``undone`` (a step put it there, a later one took it off), ``few`` (too few dimensions have
    #: the color), ``conflict``, ``constraint`` or ``price``.
    kind: str
    why: str
    #: What the plan would do with one action more that puts it there; of ``price`` and ``undone``.
    then: Prediction | None = None


@dataclasses.dataclass(frozen=True)
class ArgumentExplanation(Record):
    """Why an argument is sharded as it is."""

    argument: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    #: Arguments of its group (4.4) with their list positions folded.
    group: tuple[str, ...]
    bytes: int
    device_bytes: int
    held: tuple[HeldAxis, ...]
    free: tuple[FreeAxis, ...]
    #: The collectives that move it, by number.
    moved_by: tuple[int, ...]
    #: All that were asked for by a pattern, this one first: they are sharded alike.
    alike: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<ArgumentExplanation of {self.argument}: {spec_text(self.spec)}, "
            f"{len(self.held)} axes held, {len(self.free)} free>"
        )

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data, for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class CollectiveExplanation(Record):
    """Collectives that are alike, and why they are there."""

    #: Its place among the plan's, those that take most time first, from 1.
    number: int
    kind: str
    axes: tuple[str, ...]
    #: Of the result that a device holds after each.
    bytes: float
    #: How many there are in a step, those of repeated layers and of loops counted, without those
    #: that XLA merges with others or makes anew; shares of some may be left.
    count: float
    #: Of one.
    seconds: float
    #: Of all: these sum to the prediction.
    total_seconds: float
    algorithm: str
    #: ``reshard``, ``sum`` (of parts), ``edges`` (of a window) or ``order`` (shards change places).
    what: str
    #: The value that moves, and how many like it.
    value: str
    values: int
    #: The ops that make it and use it, with their source lines; a sum has no use.
    definition: str
    use: str
    #: The sharding where it is made, and the one that is wanted.
    before: Spec
    after: Spec
    #: For each axis the factors that hold it where the value is made and where it is used.
    factors: tuple[tuple[str, str, str], ...]
    #: What gave these factors the axes, the last of which brought the collective.
    causes: tuple[Cause, ...]
    why: str

    def __repr__(self) -> str:
        return (
            f"<CollectiveExplanation {self.number}: {self.count:g} {self.kind} over "
            f"{' x '.join(self.axes)}, {time_text(self.total_seconds)}: {self.value}>"
        )

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data, for JSON."""
        return dataclasses.asdict(self)
