"""Memory at its peak, in groups of buffers that are alike: those of repeated layers are one row."""

from __future__ import annotations

import dataclasses

from toast.cost import Timeline
from toast.plan import describe_value, folded
from toast.program import Program


@dataclasses.dataclass(frozen=True)
class PeakGroup:
    """Buffers of one kind that are in memory at the peak."""

    #: What they hold: the ops that make it, layers folded.
    value: str
    #: As of :class:`toast.cost.Buffer`.
    what: str
    count: int
    #: Bytes per device of all of them.
    bytes: float
    #: The op that makes the largest one.
    op: int
    #: Alive from before the first op, the earliest of them, to before the last, the latest.
    start: int
    end: int


def peak_groups(program: Program, timeline: Timeline) -> list[PeakGroup]:
    """What is alive at the peak besides the arguments, the largest groups first.

    Their bytes and those of the arguments add up to the peak.
    """
    groups: dict[tuple[str, str], PeakGroup] = {}
    for buffer in timeline.at_peak:
        key = buffer.what, folded(describe_value(program, buffer.value))
        group = groups.get(key)
        groups[key] = PeakGroup(
            key[1], buffer.what, 1, buffer.bytes, program.values[buffer.value].op, buffer.start,
            buffer.end,
        ) if group is None else dataclasses.replace(
            group, count=group.count + 1, bytes=group.bytes + buffer.bytes,
            start=min(group.start, buffer.start), end=max(group.end, buffer.end),
        )  # fmt: skip
    return sorted(groups.values(), key=lambda group: -group.bytes)
