"""Memory at its peak, in groups of similar buffers: one row for those of repeated layers."""

from __future__ import annotations

import dataclasses

from toast.cost import Timeline
from toast.paths import folded
from toast.plan import describe_value
from toast.program import Program

#: What comes before the name of a value, by the kind of its buffer (:class:`toast.cost.Buffer`).
BUFFER_WORDS = {
    "value": "", "copy": "resharded ", "sum": "sum over devices of ",
    "second": "second buffer of ", "workspace": "workspace for ", "ring": "parts under way of ",
    "rounded": "rounded copy of ", "gaps": "", "fast": "",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PeakGroup:
    """Similar buffers that are live at the peak."""

    #: The values in the buffers, described by their ops; layer numbers are replaced by ``*``.
    value: str
    #: The kind of buffer, as in :class:`toast.cost.Buffer`, or ``gaps``, or ``fast``.
    what: str
    #: The number of buffers; 0 for gaps and for fast memory.
    count: int
    #: The bytes per device of all buffers together.
    bytes: float
    #: The op that defines the value of the first buffer.
    op: int
    #: The buffers are live from before op ``start`` (the earliest) to before op ``end`` (the
    #: latest).
    start: int
    end: int


def peak_groups(program: Program, timeline: Timeline) -> list[PeakGroup]:
    """The groups of live buffers at the peak, without the arguments, by decreasing bytes.

    Gaps of the heap have a group, and one with negative bytes stands for small values that are in
    fast memory instead.  The bytes of all groups and of the arguments add up to the peak.
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
    for what, text, size in (
        ("gaps", "gaps in the heap, beside short-lived values", timeline.gap_bytes),
        ("fast", "small values in fast memory", -timeline.fast_bytes),
    ):
        if round(size):
            at = min(timeline.peak_op, len(program.ops) - 1)
            groups[what, text] = PeakGroup(
                text, what, 0, size, at, timeline.peak_op, timeline.peak_op
            )
    return sorted(groups.values(), key=lambda group: -group.bytes)
