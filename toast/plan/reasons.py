"""Records that explain a plan: the causes of shardings and of collectives."""

from __future__ import annotations

import dataclasses
from typing import Any

from toast.plan.labels import shown_labels, spec_text
from toast.plan.prediction import Prediction
from toast.program import Spec
from toast.records import Record
from toast.units import size_text, time_text


@dataclasses.dataclass(frozen=True)
class Cause:
    """The step that gave a mesh axis to an op."""

    #: The number of the step, from 1; 0 if the method has no steps.
    number: int
    #: ``pin``, ``fix``, ``action``, ``refinement``, ``region`` (manual over the axis), or a method.
    kind: str
    #: The mesh axis.
    axis: str
    #: Dimensions that the step shards; for a region, its source line.
    dimensions: tuple[str, ...] = ()
    #: The resolution of conflicts: one bit per resolution group.
    resolution: tuple[int, ...] = ()
    #: The gain and the price of the step, as text.
    reason: str = ""
    #: The prediction before the step; ``None`` if there is none.
    before: Prediction | None = None
    #: The prediction after the step; ``None`` if there is none.
    after: Prediction | None = None

    def __str__(self) -> str:
        if self.kind == "region":
            return f"manual over '{self.axis}' at {', '.join(self.dimensions)} (shard_map)"
        if not self.number:
            return f"method {self.kind}"
        shown = shown_labels(self.dimensions, 2) or "intermediate values"
        return f"step {self.number}, {self.kind} of {shown} along {self.axis or 'axes'}"


@dataclasses.dataclass(frozen=True)
class HeldAxis:
    """A mesh axis that shards a dimension of an argument."""

    #: The number of the dimension, from 0.
    dimension: int
    #: The mesh axis.
    axis: str
    #: The step that gave the axis to the dimension.
    cause: Cause


@dataclasses.dataclass(frozen=True)
class FreeAxis:
    """A mesh axis that does not shard a dimension of an argument, and the reason."""

    #: The number of the dimension, from 0.
    dimension: int
    #: The mesh axis.
    axis: str
    #: ``elsewhere`` (it shards another dimension), ``size`` (it does not divide this one),
    #: ``undone`` (a step sharded it, a later one removed the axis), ``few`` (too few dimensions
    #: have the color), ``conflict``, ``constraint`` or ``price``.
    kind: str
    #: The reason, in words.
    why: str
    #: The prediction with one more action that shards it; for ``price`` and ``undone``.
    then: Prediction | None = None


@dataclasses.dataclass(frozen=True)
class GatheredCopies(Record):
    """What the passes of a step gather of an argument that both use."""

    #: Whether the backward pass gathers it again, rather than using the forward pass's copies.
    again: bool
    #: How often the backward pass gathers it; if it does not, how often the forward pass does.
    count: float
    #: The seconds of these gathers, before overlap.
    seconds: float
    #: Bytes on a device of all copies that the forward pass makes.
    bytes: float
    #: The names in policies of the arguments of blocks that it may be, by their types, and about
    #: which the policy can decide otherwise with some effect.
    inputs: tuple[str, ...]
    #: Whether a loop uses it, other than that of microbatches: there, ``gathered`` of a policy has
    #: no effect.
    in_loop: bool
    #: Whether the forward pass gathers it once for all of several microbatches, before their loop:
    #: then the backward pass does not gather it again, unless another loop uses it.
    once: bool = False

    @property
    def text(self) -> str:
        """The choice, in a sentence, and what the other one would cost if there is one."""
        spent, copies = f"{time_text(self.seconds)} before overlap", size_text(self.bytes)
        names = ",".join(self.inputs)
        if self.again:
            other, choice = f"up to {copies} more would wait if its copies stayed", "gathered"
            done = f"the backward pass gathers it again ({spent})"
            done += ", as all loops do" if self.in_loop else ""
        elif self.once:
            other, choice = "", ""
            done = (
                f"it is gathered once for all microbatches ({spent}), and the backward pass uses "
                f"the same copies ({copies})"
            )
        else:
            other, choice = f"to gather it again would take about {spent}", "keep"
            done = f"the backward pass uses the copies of the forward pass ({copies})"
        quote = '"' if "'" in names else "'"  # paths have quotes around keys
        return f"{done}; {other}: --why-not {quote}{choice}={names}{quote}" if names else done


@dataclasses.dataclass(frozen=True)
class ArgumentExplanation(Record):
    """The sharding of an argument, with the cause of each axis."""

    #: The path of the argument, such as ``params['wq']``.
    argument: str
    #: Its shape.
    shape: tuple[int, ...]
    #: Its element type, such as ``f32``.
    dtype: str
    #: Its sharding: the mesh axes of each dimension.
    spec: Spec
    #: The arguments of its group (4.4), with ``*`` for list positions.
    group: tuple[str, ...]
    #: Its bytes, unsharded.
    bytes: int
    #: Its bytes on a device.
    device_bytes: int
    #: The mesh axes that shard it, each with its cause.
    held: tuple[HeldAxis, ...]
    #: The mesh axes that do not shard it, each with the reason.
    free: tuple[FreeAxis, ...]
    #: The numbers of the collectives that move it.
    moved_by: tuple[int, ...]
    #: All arguments that match the pattern, this one first; their shardings are equal.
    alike: tuple[str, ...] = ()
    #: What the passes gather of it under the memory policy; ``None`` if that is nothing.
    gathered: GatheredCopies | None = None

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
    """A group of equal collectives, and their cause."""

    #: The number in the plan, from 1, by decreasing time.
    number: int
    #: The name in StableHLO, such as ``all_gather``.
    kind: str
    #: The mesh axes that it runs along.
    axes: tuple[str, ...]
    #: The bytes of the result on a device, of one collective.
    bytes: float
    #: The number in a step, including repeated layers and loops, without collectives that XLA
    #: merges or avoids by recomputing; it may be a fraction.
    count: float
    #: The seconds of one collective.
    seconds: float
    #: The seconds of all; these sum to the prediction.
    total_seconds: float
    #: The algorithm that its price is of, such as ``ring``.
    algorithm: str
    #: ``reshard``, ``sum`` (of partial sums), ``edges`` (of a window), ``order`` (shards change
    #: places) or ``manual`` (the program's own, in a manual region).
    what: str
    #: The value that moves, and the number of such values.
    value: str
    #: The number of such values.
    values: int
    #: The ops that define and use it, with their source lines; a sum has no use.
    definition: str
    #: The op that uses the value, with its source line; empty for a sum.
    use: str
    #: The sharding before and after the collective.
    before: Spec
    #: The sharding after the collective.
    after: Spec
    #: For each axis: the factors that hold it at the definition and at the use.
    factors: tuple[tuple[str, str, str], ...]
    #: The steps that gave these factors the axes; the last one causes the collective.
    causes: tuple[Cause, ...]
    #: The cause, in words.
    why: str

    def __repr__(self) -> str:
        return (
            f"<CollectiveExplanation {self.number}: {self.count:g} {self.kind} over "
            f"{' x '.join(self.axes)}, {time_text(self.total_seconds)}: {self.value}>"
        )

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data, for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class AnnotationExplanation(Record):
    """An annotation of the program (``toast.split`` and others) in a plan."""

    #: The user's call, such as ``split(0, 'data')``, and its source line.
    call: str
    #: The source line of the call; empty if unknown.
    place: str
    #: The value that is annotated.
    value: str
    #: Its sharding in the plan, and that of the value before the annotation.
    spec: Spec
    #: The sharding of the value before the annotation.
    before: Spec
    #: The numbers of the collectives that reshard the value for the annotation, or the annotated
    #: value for its uses.
    moved_by: tuple[int, ...]

    def __repr__(self) -> str:
        return f"<AnnotationExplanation of {self.call} at {self.place}: {spec_text(self.spec)}>"

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data, for JSON."""
        return dataclasses.asdict(self)
