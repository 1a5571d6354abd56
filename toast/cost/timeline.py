"""Memory of one device in program order, and what is alive at the peak."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from toast.cost.layout import Floats, Layout, axes_of
from toast.cost.tables import Tables
from toast.cost.transfers import UNROLLED
from toast.units import size_text


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A value in memory."""

    value: int
    #: Bytes per device.
    bytes: float
    #: ``value``; ``copy``, resharded; ``sum``, what a sum over devices is more before a device
    #: keeps its part; or ``second``, what cannot overwrite what it is made of.
    what: str
    #: Alive from before op ``start`` to before op ``end``.
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Memory of one device in program order."""

    #: ``[events]`` the op before which memory changes, in order.
    op: npt.NDArray[np.int64]
    #: ``[events]`` bytes from there on, arguments included.
    live_bytes: Floats
    argument_bytes: float
    #: The op before which the peak is.
    peak_op: int
    #: What is alive then besides the arguments, the largest first.
    at_peak: tuple[Buffer, ...]

    def __repr__(self) -> str:
        return f"<Timeline: peak {size_text(self.peak_bytes)} before op {self.peak_op}>"

    @property
    def peak_bytes(self) -> float:
        """The most that is alive at once, arguments included."""
        return max(self.argument_bytes, float(self.live_bytes.max(initial=0.0)))

    @classmethod
    def of(cls, tables: Tables, columns: Floats, argument_bytes: float) -> Timeline:
        """From the bytes of every column of the tables' events."""
        steps = columns[tables.event_column] * tables.event_sign
        live = argument_bytes + np.cumsum(steps)
        peak = int(tables.event_op[np.argmax(live)]) if len(live) else 0
        at_peak = (b for b in _buffers(tables, columns) if b.start <= peak < b.end)
        return cls(
            op=tables.event_op,
            live_bytes=np.maximum(live, argument_bytes),
            argument_bytes=argument_bytes,
            peak_op=peak,
            at_peak=tuple(sorted(at_peak, key=lambda buffer: -buffer.bytes)),
        )


def _buffers(t: Tables, row: Floats) -> list[Buffer]:
    """Every buffer, given the bytes of each column; a shared copy is one buffer."""
    values, uses = len(t.value_bytes), len(t.use_value)
    sums = len(row) - 3 * values
    # The use class whose copy each column is, and that which it is shared with.
    of = np.concatenate([np.arange(uses), *(later for later, _ in t.pairs)]).tolist()
    root = list(range(uses))
    offset = values + uses
    for later, earlier in t.pairs:
        for i in np.flatnonzero(row[offset : offset + len(later)] > 0).tolist():
            root[int(later[i])] = int(earlier[i])
        offset += len(later)
    for use in range(uses):  # those that it may be shared with come before it
        root[use] = root[root[use]]
    opened: dict[tuple[int, int], int] = {}
    found: list[Buffer] = []
    shared: dict[tuple[int, int], int] = {}  # copies of a value, to be continued
    for column, value, sign, op in zip(
        t.event_column.tolist(), t.event_value.tolist(), t.event_sign.tolist(),
        t.event_op.tolist(), strict=True,
    ):  # fmt: skip
        size = float(row[column])
        if size <= 0:
            continue
        if sign > 0:
            opened[column, value] = op
            continue
        start = opened.pop((column, value), op)
        if values <= column < sums:
            copy = value, root[of[column - values]]
            last = shared.get(copy, -1)
            if last >= 0 and found[last].end >= start:
                found[last] = dataclasses.replace(
                    found[last], start=min(start, found[last].start), end=max(op, found[last].end)
                )
                continue
            shared[copy] = len(found)
        kinds = ("value", "copy", "sum", "second")
        what = kinds[(column >= values) + (column >= sums) + (column >= sums + 2 * values)]
        found.append(Buffer(value, size, what, start, op))
    return found


def columns(t: Tables, devices: Floats, layout: Layout, settled: Floats, used: Floats) -> Floats:
    """Bytes of every column of the timeline's events: ``[S, columns]``.

    ``settled`` and ``used`` are the bytes of every value and use in the memory of a device,
    ``devices`` those on each set of axes.
    """
    copies = used * (layout.differs > 0)
    columns = [settled, copies]
    bridged = copies == 0  # or no copy to bridge to
    for later, earlier in t.pairs:
        same = axes_of(layout.used[:, later] != layout.used[:, earlier]) == 0
        same &= ~bridged[:, later]
        bridged[:, later] |= same
        columns.append(np.where(same, copies[:, later], 0.0))
    rest, whole = devices[layout.scattered] - 1, layout.whole
    merged = t.value_merged & (layout.partial > 0)
    columns += [settled * (rest * whole), settled * merged]
    # A product that is summed in parts is a loop, whose operands are made before it begins;
    # a short one takes slices of those that have the dimension that is scattered.
    loops = (rest + 1 > UNROLLED) & ~whole
    beside = np.zeros(settled.shape, dtype=bool)
    operand, result = t.product_operand, t.product_result
    if len(operand):
        made, sliced = np.arange(len(result)), np.zeros((len(settled), len(result)), dtype=bool)
        for axis in range(layout.held.shape[-1]):
            here = (layout.scattered[:, result] >> np.uint8(axis)) & 1 > 0
            sliced |= here & t.product_along[made, layout.settled[:, result, axis]]
        needed = loops[:, result] | (sliced & ~whole[:, result])
        first = np.flatnonzero(np.diff(operand, prepend=-1))
        beside[:, operand[first]] = np.logical_or.reduceat(needed, first, axis=1)
    columns.append(settled * beside)
    return np.concatenate(columns, axis=1)
