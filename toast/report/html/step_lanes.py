"""The timeline of a report: lanes of the schedule, and memory by group on the same axis of time."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from toast.cost.step_schedule import HOST, MEMORY, PRODUCTS
from toast.paths import folded
from toast.plan import Plan
from toast.program import Program
from toast.report.html import drawing
from toast.report.html.policy_timelines import thinned
from toast.report.html.sections import Section
from toast.report.memory import BUFFER_WORDS
from toast.report.memory_groups import memory_groups

#: Times are in parts of the step, bytes in parts of the peak: integers are short.
TIME_PARTS, MEMORY_PARTS = 1_000_000, 10_000_000

#: Maximum number of buffers; the smallest are left out.
_BUFFERS = 900

#: The classes of lanes that are not collectives.
_KINDS = {PRODUCTS: "products", MEMORY: "traffic", HOST: "host"}


def step_lanes(plan: Plan, sections: Sequence[Section]) -> dict[str, Any]:
    """The timeline of ``plan`` as columns.

    * ``parts``: the number of parts of the step that times count.  ``seconds`` is the step.
    * ``lanes``: each with ``name``, ``kind``, its ``seconds``, and columns: ``op``, ``begin``
      (both as differences to the entry before), ``length``, and for collectives ``move``, indices
      of ``moves`` of the listing.
    * ``sections``: when each section of the listing begins.  ``phases``: ``[time, name]``.
    * ``memory``: ``groups``; ``at`` and ``op``, the moments; ``live``, by group, in parts of
      ``peak_bytes``.  ``labels`` and ``buffers`` are the largest buffers: ``[group, label,
      section, bytes, first op, last op]``.
    """
    program, planned = plan.analysis.program, plan.schedule
    unit = (planned.step_seconds or 1.0) / TIME_PARTS
    times = np.rint(planned.op_begin / unit).astype(np.int64)
    lanes = []
    for number, name in enumerate(planned.lanes):
        chosen = np.flatnonzero(planned.lane == number)
        chosen = chosen[np.argsort(planned.begin[chosen], kind="stable")]
        seconds = planned.seconds[chosen]
        begin = np.rint(planned.begin[chosen] / unit).astype(np.int64)
        kind = _KINDS.get(name, "moved")
        lanes.append({
            "name": name,
            "kind": kind,
            "seconds": float(seconds.sum()),
            "op": _differences(planned.op[chosen]),
            "begin": _differences(begin),
            "length": np.rint(seconds / unit).astype(np.int64).tolist(),
            **({"move": planned.collective[chosen].tolist()} if kind == "moved" else {}),
        })  # fmt: skip
    shown = [{"phase": s.phase, "start": s.start, "title": s.title, "detail": s.detail}
             for s in sections]  # fmt: skip
    last = len(program.ops)
    return {
        "parts": TIME_PARTS,
        "seconds": planned.step_seconds,
        "lanes": lanes,
        "sections": times[[s.start for s in sections]].tolist(),
        "phases": [[int(times[min(op, last)]), name] for op, name in drawing.phases(shown)],
        "memory": _memory(plan, sections, times),
    }


def _differences(values: npt.NDArray[np.int64]) -> list[int]:
    differences: list[int] = np.diff(values, prepend=0).tolist()
    return differences


def _memory(
    plan: Plan, sections: Sequence[Section], times: npt.NDArray[np.int64]
) -> dict[str, Any]:
    program, line = plan.analysis.program, plan.timeline
    of = memory_groups(plan, line)
    total = of.live.sum(axis=0)
    # Of the ops that begin at one time, the one with the most memory, and the last.
    order = np.lexsort((total, times))
    most = order[np.flatnonzero(np.diff(times[order], append=times[-1] + 1))]
    last = np.flatnonzero(np.diff(times, append=times[-1] + 1))
    moments = np.unique(np.concatenate([most, last]))
    chosen = moments[thinned(times[moments].astype(np.float64), total[moments])]
    unit = max(line.peak_bytes, 1.0) / MEMORY_PARTS
    starts = np.array([s.start for s in sections])
    labels: dict[str, int] = {}
    largest = sorted(range(len(line.buffers)), key=lambda k: -line.buffers[k].bytes)[:_BUFFERS]
    rows = []
    for k in sorted(largest):
        buffer = line.buffers[k]
        op = program.values[buffer.value].op
        text = BUFFER_WORDS[buffer.what] + _value_text(program, buffer.value)
        label = labels.setdefault(text, len(labels))
        section = int(np.searchsorted(starts, op, side="right")) - 1
        rows.append(
            [int(of.of_buffer[k]), label, section, round(buffer.bytes), buffer.start, buffer.end]
        )
    return {
        "groups": list(of.groups),
        "peak_bytes": line.peak_bytes,
        "parts": MEMORY_PARTS,
        "at": _differences(times[chosen]),
        "op": _differences(chosen),
        "live": [np.rint(row[chosen] / unit).astype(np.int64).tolist() for row in of.live],
        "labels": list(labels),
        "buffers": rows,
    }


def _value_text(program: Program, value: int) -> str:
    """``exponential f32[16,32] at transformer.py:144``."""
    op, type_ = program.values[value].op, program.values[value].type
    place = program.location(op)
    argument = op < len(program.arguments)
    name = folded(program.arguments[op]) if argument else program.kind(op)
    at = f" at {pathlib.PurePath(place.file).name}:{place.line}" if place.file else ""
    return f"{name} {type_}{'' if argument else at}"


__all__ = ["step_lanes"]
