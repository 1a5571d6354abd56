"""The schedule of a step in Chrome's trace format, which Perfetto shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from toast.cost.step_schedule import HOST, MEMORY, PRODUCTS
from toast.plan.plan import Plan
from toast.program import Program
from toast.units import size_text

#: The process of a trace: one device; all others run alike.
_DEVICE = 1

#: Microseconds in a second: the unit of the format.
_MICRO = 1e6

#: Names of tracks that are not collectives.
_OWN = {PRODUCTS: PRODUCTS, MEMORY: MEMORY, HOST: "transfers to the host"}


def trace_data(plan: Plan) -> dict[str, Any]:
    """The implementation of :meth:`toast.Plan.trace`."""
    program = plan.analysis.program
    title = f"{program.name}, one of {plan.mesh.devices} devices of {plan.hardware.name}"
    events = [_named("process_name", 0, {"name": title})]
    for number, lane in enumerate(plan.schedule.lanes, 1):
        name = _OWN.get(lane, f"collectives over {lane}")
        events.append(_named("thread_name", number, {"name": name}))
        events.append(_named("thread_sort_index", number, {"sort_index": number}))
    return {
        "traceEvents": [*events, *_spans(plan), *_memory(plan)],
        "displayTimeUnit": "ms",
        "otherData": {
            "program": program.name,
            "mesh": str(plan.mesh),
            "hardware": plan.hardware.name,
            "step_seconds": plan.after.step_seconds,
        },
    }


def _named(what: str, thread: int, names: dict[str, Any]) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _DEVICE, "tid": thread, "args": names}


def _spans(plan: Plan) -> Iterator[dict[str, Any]]:
    """Complete events (``X``), one for each span of the schedule."""
    program, planned = plan.analysis.program, plan.schedule
    passes = program.passes
    columns = (planned.lane, planned.op, planned.collective, planned.begin, planned.seconds)
    for lane, op, number, begin, seconds in zip(*(c.tolist() for c in columns), strict=True):
        about = _about(program, op)
        if passes[op]:
            about["pass"] = passes[op]
        name, kind = program.kind(op), planned.lanes[lane]
        if number >= 0:
            c = plan.breakdown.collectives[number]
            name, kind = c.kind, "collective"
            about |= {
                "axes": ", ".join(c.axes), "count": c.count, "bytes": size_text(c.bytes),
                "hidden_us": c.hidden_seconds * _MICRO,
            }  # fmt: skip
        yield {
            "name": name, "cat": kind, "ph": "X", "pid": _DEVICE, "tid": lane + 1,
            "ts": begin * _MICRO, "dur": seconds * _MICRO, "args": about,
        }  # fmt: skip


def _about(program: Program, op: int) -> dict[str, Any]:
    place = program.location(op)
    about: dict[str, Any] = {"op": f"{program.kind(op)}#{op}"}
    if program.ops[op].results:
        about["result"] = str(program.values[program.ops[op].results[0]].type)
    if place.file:
        about["source"] = f"{place.shown_file}:{place.line}"
    if place.path:
        about["path"] = place.path
    if program.repeats[op] > 1:
        about["runs"] = program.repeats[op]
    return about


def _memory(plan: Plan) -> Iterator[dict[str, Any]]:
    """Counter events (``C``): the live bytes of a device when they change."""
    line, begins = plan.timeline, plan.schedule.op_begin
    at = np.minimum(line.op, len(begins) - 1)
    last = np.flatnonzero(np.diff(begins[at], append=np.inf))
    for begin, live in zip(begins[at][last].tolist(), line.live_bytes[last].tolist(), strict=True):
        yield {
            "name": "memory", "ph": "C", "pid": _DEVICE, "ts": begin * _MICRO,
            "args": {"live bytes": live},
        }  # fmt: skip


__all__ = ["trace_data"]
