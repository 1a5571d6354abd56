"""When each part of a step runs: the priced critical path, and what runs beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from toast.cost.breakdown import Breakdown, OpCollective
from toast.cost.entities import Floats, Ints

#: The lanes of a device itself; those of collectives follow, one for each set of mesh axes.
PRODUCTS, MEMORY, HOST = "matrix products", "memory traffic", "host"


@dataclasses.dataclass(frozen=True)
class StepSchedule:
    """The spans of a step on lanes; those of one lane do not overlap.

    Products and memory traffic are one after another, in program order.  A collective ends when the
    op that needs it begins; the part of it that products hide is beside earlier ops.
    """

    #: The names of the lanes; those of collectives are the axes: ``data x model``.
    lanes: tuple[str, ...]
    lane: Ints  # [spans]
    op: Ints  # [spans] the op of the program
    collective: Ints  # [spans] the number in ``Breakdown.collectives``, or -1
    begin: Floats  # [spans] seconds from the beginning of the step
    seconds: Floats  # [spans]
    #: ``[ops + 1]`` when each op begins, its collectives included, and the end of the last.
    op_begin: Floats
    step_seconds: float

    def __repr__(self) -> str:
        return f"<StepSchedule of {len(self.op):,} spans on {len(self.lanes)} lanes>"

    def lane_seconds(self, lane: str) -> float:
        """The seconds of all spans of a lane."""
        return float(self.seconds[self.lane == self.lanes.index(lane)].sum())


def step_schedule(parts: Breakdown, step_seconds: float) -> StepSchedule:
    """The schedule of the ops and collectives of ``parts``, which take ``step_seconds``."""
    ops = len(parts.product_seconds)
    before, after = np.zeros(ops), np.zeros(ops)
    for c in parts.collectives:
        (after if c.operand < 0 else before)[c.op] += c.seconds - c.hidden_seconds
    spent = before + parts.product_seconds + parts.memory_seconds + after
    ends = np.concatenate([[0.0], np.cumsum(spent)])
    begins = ends[:-1] + before
    lanes = [
        (PRODUCTS, *_spans(parts.product_seconds, begins)),
        (MEMORY, *_spans(parts.memory_seconds, begins + parts.product_seconds)),
    ]
    if parts.host_seconds.any():
        some = np.flatnonzero(parts.host_seconds)
        seconds = parts.host_seconds[some]
        host = _apart(ends[some + 1] - seconds, seconds)
        lanes.append((HOST, some, np.full(len(some), -1), host, seconds))
    for axes in sorted({c.axes for c in parts.collectives}, key=lambda axes: (len(axes), axes)):
        lanes.append((" x ".join(axes), *_moves(parts.collectives, axes, ends, begins)))
    lanes = [lane for lane in lanes if len(lane[1])]
    op, collective, begin, seconds = (
        np.concatenate([np.asarray(lane[k]) for lane in lanes]) if lanes else np.zeros(0)
        for k in (1, 2, 3, 4)
    )
    return StepSchedule(
        lanes=tuple(lane[0] for lane in lanes),
        lane=np.repeat(np.arange(len(lanes)), [len(lane[1]) for lane in lanes]),
        op=op.astype(np.int64),
        collective=collective.astype(np.int64),
        begin=begin,
        seconds=seconds,
        op_begin=ends,
        step_seconds=max(step_seconds, float(ends[-1])),
    )


def _spans(of_op: Floats, begins: Floats) -> tuple[Ints, Ints, Floats, Floats]:
    some = np.flatnonzero(of_op)
    return some, np.full(len(some), -1), begins[some], of_op[some]


def _moves(
    collectives: Sequence[OpCollective], axes: tuple[str, ...], ends: Floats, begins: Floats
) -> tuple[Ints, Ints, Floats, Floats]:
    """The spans of the collectives over ``axes``: ops, numbers, beginnings and seconds."""
    chosen = [k for k, c in enumerate(collectives) if c.axes == axes]
    # Those of operands come before the op, those of its results after it.
    chosen.sort(key=lambda k: (collectives[k].op, collectives[k].operand < 0))
    op = np.array([collectives[k].op for k in chosen], dtype=np.int64)
    seconds = np.array([collectives[k].seconds for k in chosen])
    of_result = np.array([collectives[k].operand < 0 for k in chosen], dtype=bool)
    latest = np.where(of_result, ends[op + 1], begins[op])
    return op, np.array(chosen, dtype=np.int64), _apart(latest - seconds, seconds), seconds


def _apart(begin: Floats, seconds: Floats) -> Floats:
    """Beginnings of spans, moved to earlier times as far as they would overlap.

    Spans that would begin before the step, and those after them, are moved to later times.
    """
    moved = begin.copy()
    for k in range(len(moved) - 2, -1, -1):
        moved[k] = min(moved[k], moved[k + 1] - seconds[k])
    free = 0.0
    for k in range(len(moved)):
        moved[k] = max(moved[k], free)
        free = moved[k] + seconds[k]
    return moved


__all__ = ["HOST", "MEMORY", "PRODUCTS", "StepSchedule", "step_schedule"]
