"""Memory of one device in program order, and what is alive at the peak."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from toast.cost.entities import Floats, Ints
from toast.cost.machine import Machine
from toast.cost.tables import Tables
from toast.units import size_text


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A value in memory."""

    #: The number of the value.
    value: int
    #: Bytes per device.
    bytes: float
    #: ``value``; ``copy``, resharded; ``sum``, what it takes besides the part that a device keeps;
    #: ``second``, a value that cannot overwrite its operand; ``workspace`` of the kernel that
    #: computes it; ``rounded``, its copy in the element type of products; or ``ring``, its parts
    #: that go around the devices.
    what: str
    #: Alive from before op ``start`` to before op ``end``.
    start: int
    #: The op before which it is freed.
    end: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Memory of one device in program order."""

    #: ``[events]`` the op before which memory changes, in order.
    op: Ints
    #: ``[events]`` live bytes after each, arguments included.
    live_bytes: Floats
    #: Bytes of the arguments, which live through the whole step.
    argument_bytes: float
    #: The op before which memory peaks.
    peak_op: int
    #: Bytes of gaps in the heap at the peak.
    gap_bytes: float
    #: Bytes of temporaries that are in fast memory instead, at the peak.
    fast_bytes: float
    #: All buffers besides the arguments.
    buffers: tuple[Buffer, ...] = dataclasses.field(repr=False)

    def __repr__(self) -> str:
        return f"<Timeline: peak {size_text(self.peak_bytes)} before op {self.peak_op}>"

    @functools.cached_property
    def at_peak(self) -> tuple[Buffer, ...]:
        """The buffers at the peak besides the arguments, the largest first."""
        peak = self.peak_op
        alive = (b for b in self.buffers if b.start <= peak < b.end)
        return tuple(sorted(alive, key=lambda buffer: -buffer.bytes))

    @property
    def peak_bytes(self) -> float:
        """The most that is alive at once, arguments included."""
        return max(self.argument_bytes, float(self.live_bytes.max(initial=0.0)))

    @classmethod
    def of(
        cls,
        tables: Tables,
        machine: Machine,
        labels: Mapping[str, str],
        columns: Floats,
        argument_bytes: float,
    ) -> Timeline:
        """From the bytes of every column (``[columns]``); ``labels`` name the blocks' buffers."""
        events = tables.events
        size = columns[events.column] * events.sign
        gaps = np.cumsum(machine.hardware.heap_gaps * size * events.gaps)
        whole = np.cumsum(size) + gaps
        stored = machine.in_memory(whole)
        live = argument_bytes + stored
        highest = int(np.argmax(live)) if len(live) else -1
        peak = int(events.op[highest]) if len(live) else 0
        return cls(
            op=events.op,
            live_bytes=np.maximum(live, argument_bytes),
            argument_bytes=argument_bytes,
            peak_op=peak,
            gap_bytes=float(gaps[highest]) if len(live) else 0.0,
            fast_bytes=float((whole - stored)[highest]) if len(live) else 0.0,
            buffers=tuple(_buffers(tables, labels, columns)),
        )


def _buffers(t: Tables, labels: Mapping[str, str], columns: Floats) -> list[Buffer]:
    """Every buffer, given the bytes of each column; a shared copy is one buffer."""
    copies = _copies(t, columns)
    opened: dict[tuple[int, int], int] = {}
    buffers: list[Buffer] = []
    shared: dict[tuple[int, int], int] = {}  # the last buffer of each copy
    events = (t.events.column, t.events.value, t.events.sign, t.events.op)
    for column, value, sign, op in zip(*(each.tolist() for each in events), strict=True):
        size = float(columns[column])
        if size <= 0:
            continue
        if sign > 0:
            opened[column, value] = op
            continue
        start = opened.pop((column, value), op)
        if column in copies:
            copy = value, copies[column]
            last = shared.get(copy, -1)
            if last >= 0 and buffers[last].end >= start:
                other = buffers[last]
                buffers[last] = dataclasses.replace(
                    other, start=min(start, other.start), end=max(op, other.end)
                )
                continue
            shared[copy] = len(buffers)
        buffers.append(Buffer(value, size, labels[t.columns.block_of(column)[0]], start, op))
    return buffers


def _copies(t: Tables, columns: Floats) -> dict[int, int]:
    """Columns of copies, each with the first use class that has the copy."""
    if not {"copies", "shared copies"} <= {*t.columns.names}:
        return {}
    copies, shared = t.columns["copies"], t.columns["shared copies"]
    first = list(range(len(t.uses)))
    for pair in np.flatnonzero(columns[shared] > 0).tolist():
        first[int(t.pairs.later[pair])] = int(t.pairs.earlier[pair])
    for use in range(len(t.uses)):  # earlier use classes come first
        first[use] = first[first[use]]
    later = t.pairs.later.tolist()
    return {
        **{copies.start + use: first[use] for use in range(len(t.uses))},
        **{shared.start + pair: first[use] for pair, use in enumerate(later)},
    }
