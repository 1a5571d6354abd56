"""The contents of a report, as plain data.

The report contains the same data as JSON, in the element with the id ``data``.  Keys:

``summary``
    The numbers at the top: step time, peak, limit, bound, search; in seconds and bytes per device.
    ``over_bound`` is the step time over the lower bound, or None.
``verdict``
    :class:`toast.report.verdict.PlanVerdict`, with its line as ``text``.
``origin``
    The version of TOAST, the date and the command.
``before``, ``after``
    :class:`toast.plan.Prediction` of the unsharded program and of the plan.
``arguments``, ``actions``, ``collectives``, ``kinds``, ``lines``, ``colors``, ``rounds``,
``meshes``, ``compared``, ``stages``
    Rows of the tables.
``memory``
    ``before`` and ``after``: ``op`` and ``live_bytes`` of the timeline, the peak, the live values.
    ``policies`` has rows of :func:`toast.report.html.policy_timelines.policy_rows`.
``conflicts``
    ``[name, other, set, group, sites]`` for each conflict, in the order of the numbers of ``toast
    explain --conflict``; a site is a value, or ``[op, operand]``.
``explain``
    The command that explains conflicts, without ``--conflict K``, quoted for a shell.
``plans``, ``python``
    The plans of the switch, and the plan as Python: :mod:`toast.report.html.plan_switch`.
``timeline``
    When ops and collectives run, and memory by group: :mod:`toast.report.html.step_lanes`.
``block``
    The block of the program that repeats most: :func:`toast.report.html.block.block_of`, or None.
``listing``
    The program as columns: :func:`toast.report.html.listing.listing`.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from toast.analysis import Analysis
from toast.cost import Breakdown, Timeline
from toast.cost.error_bars import ODDS
from toast.evaluation.compare import MethodResult
from toast.explain.collective_causes import numbered
from toast.paths import folded
from toast.plan import Origin, Plan, Prediction, fit_text, odds_text, spec_text
from toast.plan.labels import shown_label
from toast.program import Program
from toast.report.html.block import block_of
from toast.report.html.legend import Colors, SourcePlaces
from toast.report.html.listing import listing
from toast.report.html.page_origin import PageOrigin
from toast.report.html.plan_switch import plan_rows, python_text
from toast.report.html.policy_timelines import policy_rows
from toast.report.html.sections import sections_of
from toast.report.html.step_lanes import step_lanes
from toast.report.memory import peak_groups
from toast.report.price_basis import basis_lines
from toast.report.summaries import interval_text, plan_cost_before
from toast.report.verdict import verdict_of
from toast.units import size_text, time_text

#: Version of the embedded data.
VERSION = 1

#: The maximum numbers of values at the peak and of source lines in the report.
_AT_PEAK, _LINES = 60, 60


def gather(
    plan: Plan,
    compared: Sequence[MethodResult] = (),
    sources: pathlib.Path | None = None,
    policies: Sequence[Plan] = (),
    *,
    origin: PageOrigin | None = None,
    names: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The data of the report of ``plan``, compared with the results ``compared``.

    ``policies`` are plans of the same step with other memory policies.

    For a program from a file, the report may show lines of files below the folder ``sources``.
    ``origin`` has the command and the date on the page.  ``names`` are the user's names of
    dimensions; :class:`toast.errors.PlanError` is raised if one matches none.
    """
    program = plan.analysis.program
    places = SourcePlaces(program, sources)
    colors = Colors(plan, names)
    sections = sections_of(program)
    return {
        "version": VERSION,
        "program": program.name,
        "mesh": [list(axis) for axis in plan.mesh.axes],
        "hardware": plan.hardware.name,
        "origin": (origin or PageOrigin()).data(plan),
        "verdict": verdict_of(plan, compared).to_dict(),
        "summary": _summary(plan),
        "before": dataclasses.asdict(plan.before),
        "after": dataclasses.asdict(plan.after),
        "analysis": plan.analysis.counts(),
        "arguments": _arguments(plan, colors),
        "actions": _actions(plan),
        "colors": colors.rows,
        "collectives": _collectives(plan),
        "kinds": _kinds(plan),
        "lines": _lines(plan, places),
        "memory": {
            "limit_bytes": plan.memory_bytes,
            "before": _memory(program, plan.timeline_before, places),
            "after": _memory(program, plan.timeline, places),
            "policies": policy_rows(plan, policies),
        },
        "rounds": [dataclasses.asdict(r) for r in plan.rounds],
        "meshes": [
            {
                **dataclasses.asdict(tried),
                "mesh": str(tried.mesh),
                "fit": fit_text(bool(tried.fits), tried.fit_probability),
            }
            for tried in sorted(plan.meshes, key=lambda tried: tried.order)
        ],
        "plans": plan_rows(plan, compared),
        "python": python_text(plan),
        "compared": [_compared(row) for row in compared],
        "stages": plan.seconds,
        "conflicts": _conflicts(plan.analysis),
        "explain": shlex.join(["toast", "explain", *(plan.origin or Origin("TARGET")).words]),
        "listing": listing(plan, places, colors, sections),
        "timeline": step_lanes(plan, sections),
        "block": block_of(plan, sections, colors),
    }


def _summary(plan: Plan) -> dict[str, Any]:
    bound, step = plan.bound_seconds, plan.after.step_seconds
    over_policies = plan.policies_bound_seconds or 0.0
    return {
        "step_seconds": step,
        "step_seconds_before": plan.before.step_seconds,
        "peak_bytes": plan.after.peak_bytes,
        "peak_bytes_before": plan.before.peak_bytes,
        "argument_bytes": plan.after.argument_bytes,
        "memory_bytes": plan.memory_bytes,
        "fits": plan.fits,
        "fit": fit_text(plan.fits, plan.after.fit_probability),
        "safety": None if plan.safety is None else f"{100 * plan.safety:g} %",
        "odds": odds_text(ODDS),
        "step_range": interval_text(plan.after.step_interval, time_text),
        "peak_range": interval_text(plan.after.peak_interval, size_text),
        "error_bars": plan.error_bars.basis,
        "borrowed": plan.error_bars.borrowed,
        "basis": basis_lines(plan),
        "bound_seconds": bound,
        "policies_bound_seconds": over_policies if 0 < over_policies < math.inf else None,
        "over_bound": max(1.0, step / bound) if bound > 0 else None,
        "collective_seconds": plan.after.collective_seconds,
        "hidden_seconds": plan.after.hidden_seconds,
        "waited_seconds": _waited(plan.after),
        "devices": plan.mesh.devices,
        "cost": plan.cost,
        "cost_before": plan_cost_before(plan),
        "method": plan.method,
        "note": plan.note,
        "seed": plan.seed,
        "states": plan.states,
        "search_seconds": plan.seconds.get("search", 0.0),
        "total_seconds": sum(plan.seconds.values()),
    }


def _waited(step: Prediction) -> float:
    """Seconds of a step during which only collectives run; less than a picosecond is rounding."""
    rest = step.step_seconds - step.matmul_seconds - step.memory_seconds
    return rest if rest >= 1e-12 else 0.0


def _arguments(plan: Plan, colors: Colors) -> list[dict[str, Any]]:
    sizes, names = dict(plan.mesh.axes), plan.analysis.names
    program = plan.analysis.program
    # The colors of the first argument of each group; those of the others are mirrored.
    first: dict[str, int] = {}
    for path, value in zip(program.arguments, program.argument_values, strict=True):
        first.setdefault(path, value)
        first.setdefault(folded(path), value)
    rows = []
    for row in plan.argument_table():
        shards = [int(np.prod([sizes[a] for a in axes], dtype=np.int64)) for axes in row.spec]
        begin = names.value_dim[first[row.patterns[0]]]
        rows.append({
            "colors": colors.of_name[names.def_name[begin : begin + len(row.shape)]].tolist(),
            "patterns": list(row.patterns),
            "count": row.count,
            "dtype": row.dtype,
            "shape": list(row.shape),
            "axes": [list(axes) for axes in row.spec],
            "spec": spec_text(row.spec),
            "shards": shards,
            "majors": [sizes[axes[0]] if axes else 1 for axes in row.spec],
            "device_bytes": row.device_bytes,
        })  # fmt: skip
    return rows


def _actions(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "dimensions": [*map(shown_label, step.dimensions)],
            "axis": step.axis,
            "resolution": list(step.resolution),
            "only": bool(step.part),
            "reason": step.reason,
            "step_seconds": step.after.step_seconds,
            "peak_bytes": step.after.peak_bytes,
        }
        for step in plan.steps
    ]


def _collectives(plan: Plan) -> list[dict[str, Any]]:
    """Groups of transfers that differ only in their numbers, by decreasing time.

    ``numbers`` has the first and last number of each run, as in ``toast explain --collective``;
    ``seconds`` is the time of one transfer.
    """
    rows: dict[Any, dict[str, Any]] = {}
    for number, i in enumerate(numbered(plan), 1):
        t = plan.transfers[i]
        key = (t.kind, t.axes, t.bytes, t.algorithm, t.edges)
        row = rows.setdefault(key, {
            "kind": t.kind, "axes": list(t.axes), "bytes": t.bytes, "algorithm": t.algorithm,
            "edges": t.edges, "count": 0, "seconds": t.seconds, "total_seconds": 0.0, "numbers": [],
        })  # fmt: skip
        if row["numbers"] and row["numbers"][-1][1] == number - 1:
            row["numbers"][-1][1] = number
        else:
            row["numbers"].append([number, number])
        row["count"] += t.count
        row["total_seconds"] += t.count * t.seconds
    return sorted(rows.values(), key=lambda row: -row["total_seconds"])


def _by(of_op: Sequence[Any], breakdown: Breakdown) -> dict[Any, list[float]]:
    """Seconds of products, memory traffic and collectives for each key; ``of_op`` has the keys."""
    rows: dict[Any, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for key, products, memory in zip(
        of_op, breakdown.product_seconds.tolist(), breakdown.memory_seconds.tolist(), strict=True
    ):
        row = rows[key]
        row[0] += products
        row[1] += memory
    for c in breakdown.collectives:
        rows[of_op[c.op]][2] += c.seconds
    return rows


_SPENT = ("product_seconds", "memory_seconds", "collective_seconds")


def _kinds(plan: Plan) -> list[dict[str, Any]]:
    """Time by kind of op, in decreasing order."""
    program = plan.analysis.program
    kinds = [program.kind(op) for op in range(len(program.ops))]
    before, after = _by(kinds, plan.breakdown_before), _by(kinds, plan.breakdown)
    ops = Counter(kinds)
    rows = [
        {
            "kind": kind,
            "ops": ops[kind],
            "seconds_before": sum(before[kind]),
            "seconds": sum(after[kind]),
            **dict(zip(_SPENT, after[kind], strict=True)),
        }
        for kind in ops
    ]
    return sorted(rows, key=lambda row: (-row["seconds"], -row["seconds_before"]))


def _lines(plan: Plan, places: SourcePlaces) -> list[dict[str, Any]]:
    """Time by source line, in decreasing order.

    One row sums the lines with the least time, another the ops without a source line.
    """
    spots = [places.spots[place] for place in places.of_op]
    known = [(spot if spot[0] else None) for spot in spots]
    before, after = _by(known, plan.breakdown_before), _by(known, plan.breakdown)
    rows: list[dict[str, Any]] = [
        {
            "what": "line",
            "file": spot[0],
            "line": spot[1],
            "function": spot[2],
            "text": places.source(spot),
            "seconds_before": sum(before[spot]),
            "seconds": sum(after[spot]),
            **dict(zip(_SPENT, after[spot], strict=True)),
        }
        for spot in dict.fromkeys(known) if spot is not None
    ]  # fmt: skip
    if not rows:
        return []
    rows.sort(key=lambda row: (-row["seconds"], -row["seconds_before"]))
    rest = rows[_LINES:]
    rows = rows[:_LINES]
    if rest:
        numbers = {k: sum(row[k] for row in rest) for k in ("seconds_before", "seconds", *_SPENT)}
        rows.append({"what": f"{len(rest)} other lines", **numbers})
    if sum(after[None]) or sum(before[None]):
        rows.append({
            "what": "no source line",
            "seconds_before": sum(before[None]),
            "seconds": sum(after[None]),
            **dict(zip(_SPENT, after[None], strict=True)),
        })  # fmt: skip
    return rows


def _memory(program: Program, line: Timeline, places: SourcePlaces) -> dict[str, Any]:
    last = np.flatnonzero(np.diff(line.op, append=len(program.ops) + 1))
    at = min(line.peak_op, len(program.ops) - 1)
    groups = peak_groups(program, line)
    rest = groups[_AT_PEAK:]
    return {
        "op": line.op[last].tolist(),
        "live_bytes": np.round(line.live_bytes[last]).astype(np.int64).tolist(),
        "argument_bytes": line.argument_bytes,
        "peak_bytes": line.peak_bytes,
        "peak_op": line.peak_op,
        "peak_at": places.short(str(program.location(at))),
        "at_peak": [
            {
                "bytes": group.bytes,
                "count": group.count,
                "what": group.what,
                "value": places.short(group.value),
                "op": group.op,
                "from": group.start,
                "to": group.end,
            }
            for group in groups[:_AT_PEAK]
        ],
        "more": sum(group.count for group in rest),
        "more_bytes": sum(group.bytes for group in rest),
    }


def _compared(row: MethodResult) -> dict[str, Any]:
    data = row.to_dict()
    del data["arguments"]
    data["fit"] = fit_text(row.fits, row.fit_probability)
    for name in ("matmul_seconds", "memory_seconds", "collective_seconds", "hidden_seconds"):
        data[name] = getattr(row.plan.after, name) if row.plan else None
    return data


def _conflicts(analysis: Analysis) -> list[Any]:
    names = analysis.names
    sites: dict[frozenset[int], list[Any]] = defaultdict(list)
    for name, other, where, number in analysis.sites:
        place: int | list[int] = number
        if where == "use":
            place = [int(names.use_op[number]), int(names.use_index[number])]
        sites[frozenset((name, other))].append(place)
    return [[*r.names, r.set, r.group, sites[frozenset(r.names)]] for r in analysis.resolutions]
