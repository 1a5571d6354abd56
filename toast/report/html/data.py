"""What a report shows, gathered from a plan as plain data.

The same data is embedded in the report, under the id ``data``.  Keys:

``summary``
    Step time, peak, limit, bound, search: the numbers at the top, in seconds and bytes per device.
``before``, ``after``
    :class:`toast.plan.Prediction` of the unsharded program and of the plan.
``arguments``, ``actions``, ``collectives``, ``kinds``, ``lines``, ``colors``, ``rounds``,
``meshes``, ``compared``, ``stages``
    Rows of the tables.
``memory``
    ``before`` and ``after``: ``op`` and ``live_bytes`` of the timeline, the peak, what is alive.
``conflicts``
    ``[name, other, set, group, sites]`` for each, by number; a site is a value, or
    ``[op, operand]``.  Numbers are those of ``toast explain --conflict``.
``explain``
    The command that conflicts are explained by, but for ``--conflict K``, quoted for a shell.
``listing``
    The program in columns: :func:`_listing`.
"""

from __future__ import annotations

import dataclasses
import linecache
import os
import pathlib
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from toast.analysis import Analysis
from toast.apply import Spec
from toast.compare import Compared
from toast.cost import Breakdown, Timeline
from toast.frontend import Location, Program
from toast.plan import Origin, Plan, Prediction, describe_value, folded, numbered, spec_text
from toast.plan.labels import shown_label
from toast.report.html.sections import sections_of
from toast.report.tables import plan_cost_before

#: Version of the embedded data.
VERSION = 1

#: Values at the peak, source lines and argument dimensions of a color that are listed.
_AT_PEAK, _LINES, _DIMENSIONS = 60, 60, 6

#: Attributes of ops longer than this are cut.
_LONG = 120


def gather(plan: Plan, compared: Sequence[Compared] = ()) -> dict[str, Any]:
    """All that the report of ``plan`` shows, beside those of the methods ``compared``."""
    program = plan.analysis.program
    places = _Places(program)
    colors = _Colors(plan)
    return {
        "version": VERSION,
        "program": program.name,
        "mesh": [list(axis) for axis in plan.mesh.axes],
        "hardware": plan.hardware.name,
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
        },
        "rounds": [dataclasses.asdict(r) for r in plan.rounds],
        "meshes": [
            {**dataclasses.asdict(tried), "mesh": str(tried.mesh)}
            for tried in sorted(plan.meshes, key=lambda tried: tried.order)
        ],
        "compared": [_compared(row) for row in compared],
        "stages": plan.seconds,
        "conflicts": _conflicts(plan.analysis),
        "explain": shlex.join(["toast", "explain", *(plan.origin or Origin("TARGET")).words]),
        "listing": _listing(plan, places, colors),
    }


def _summary(plan: Plan) -> dict[str, Any]:
    bound, step = plan.bound_seconds, plan.after.step_seconds
    return {
        "step_seconds": step,
        "step_seconds_before": plan.before.step_seconds,
        "peak_bytes": plan.after.peak_bytes,
        "peak_bytes_before": plan.before.peak_bytes,
        "argument_bytes": plan.after.argument_bytes,
        "memory_bytes": plan.memory_bytes,
        "fits": plan.fits,
        "bound_seconds": bound,
        "over_bound": max(0.0, step / bound - 1) if bound > 0 else None,
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
    """Seconds of a step that only collectives take; what is below a picosecond is rounding."""
    rest = step.step_seconds - step.matmul_seconds - step.memory_seconds
    return rest if rest >= 1e-12 else 0.0


def _arguments(plan: Plan, colors: _Colors) -> list[dict[str, Any]]:
    sizes, names = dict(plan.mesh.axes), plan.analysis.names
    program = plan.analysis.program
    # The colors of a group's first argument; of the others they are mirrored.
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
    """Transfers that are alike in all but their number, those that take longest first.

    ``numbers`` are the first and last of each run of those of ``toast explain --collective``.
    """
    rows: dict[Any, dict[str, Any]] = {}
    for number, i in enumerate(numbered(plan), 1):
        t = plan.transfers[i]
        key = (t.kind, t.axes, t.bytes, t.algorithm, t.edges)
        row = rows.setdefault(key, {
            "kind": t.kind, "axes": list(t.axes), "bytes": t.bytes, "algorithm": t.algorithm,
            "edges": t.edges, "count": 0, "seconds": 0.0, "numbers": [],
        })  # fmt: skip
        if row["numbers"] and row["numbers"][-1][1] == number - 1:
            row["numbers"][-1][1] = number
        else:
            row["numbers"].append([number, number])
        row["count"] += t.count
        row["seconds"] += t.count * t.seconds
    return sorted(rows.values(), key=lambda row: -row["seconds"])


def _by(of_op: Sequence[Any], found: Breakdown) -> dict[Any, list[float]]:
    """Seconds of products, memory traffic and collectives by what ``of_op`` says of each op."""
    rows: dict[Any, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for key, products, memory in zip(
        of_op, found.product_seconds.tolist(), found.memory_seconds.tolist(), strict=True
    ):
        row = rows[key]
        row[0] += products
        row[1] += memory
    for c in found.collectives:
        rows[of_op[c.op]][2] += c.seconds
    return rows


_SPENT = ("product_seconds", "memory_seconds", "collective_seconds")


def _kinds(plan: Plan) -> list[dict[str, Any]]:
    """Time by kind of op, the longest first."""
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


def _lines(plan: Plan, places: _Places) -> list[dict[str, Any]]:
    """Time by source line, the longest first; lines of least time are one row, ops without too."""
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


def _memory(program: Program, line: Timeline, places: _Places) -> dict[str, Any]:
    last = np.flatnonzero(np.diff(line.op, append=len(program.ops) + 1))
    at = min(line.peak_op, len(program.ops) - 1)
    rest = line.at_peak[_AT_PEAK:]
    return {
        "op": line.op[last].tolist(),
        "live_bytes": np.round(line.live_bytes[last]).astype(np.int64).tolist(),
        "argument_bytes": line.argument_bytes,
        "peak_bytes": line.peak_bytes,
        "peak_op": line.peak_op,
        "peak_at": places.short(str(program.location(at))),
        "at_peak": [
            {
                "bytes": buffer.bytes,
                "what": buffer.what,
                "value": places.short(describe_value(program, buffer.value)),
                "op": int(program.values[buffer.value].op),
                "from": buffer.start,
                "to": buffer.end,
            }
            for buffer in line.at_peak[:_AT_PEAK]
        ],
        "more": len(rest),
        "more_bytes": sum(buffer.bytes for buffer in rest),
    }


def _compared(row: Compared) -> dict[str, Any]:
    data = row.to_dict()
    del data["arguments"]
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


class _Places:
    """Where ops come from, each place once, without what all files' folders share."""

    def __init__(self, program: Program) -> None:
        locations = [program.location(op) for op in range(len(program.ops))]
        files = {place.shown_file: place.file for place in locations if place.file}
        folders = {str(pathlib.PurePath(file).parent) for file in files}
        try:
            common = os.path.commonpath(folders) if folders else ""
        except ValueError:  # relative and absolute ones
            common = ""
        #: What the files' names are shortened by: a folder above those that all share.
        self.root = str(pathlib.PurePath(common).parent) if common else ""
        number: dict[Location, int] = {}
        #: ``[ops]`` index into :attr:`paths` and :attr:`spots`.
        self.of_op = [number.setdefault(place, len(number)) for place in locations]
        self.paths = [place.path for place in number]
        self._files = {self.short(shown): file for shown, file in files.items()}
        #: File, line and function of each place.
        self.spots = [(self.short(p.shown_file), p.line, p.function) for p in number]
        self.spot_number = {spot: i for i, spot in enumerate(dict.fromkeys(self.spots))}

    def short(self, text: str) -> str:
        """``text`` with the names of files shortened."""
        if len(self.root) <= 1:
            return text
        return re.sub(rf"(?<!\S){re.escape(self.root + os.sep)}", "", text)

    def source(self, spot: tuple[str, int, str]) -> str:
        """The line itself, where the file can still be read."""
        file = self._files.get(spot[0], "")
        return linecache.getline(file, spot[1]).strip()[:200] if file else ""


class _Colors:
    """Colors that actions could shard, those of most dimensions first.

    Colors of the same dimensions in repeated layers share a letter: D1, D2, D3 ...
    """

    def __init__(self, plan: Plan) -> None:
        analysis = plan.analysis
        names = analysis.names
        marked = np.concatenate([names.def_name, names.use_name])
        marked = marked[names.shardable[marked]]
        colors, count = np.unique(analysis.color[marked], return_counts=True)
        order = np.argsort(-count, kind="stable")
        number = np.full(names.count, -1, dtype=np.int64)
        number[colors[order]] = np.arange(len(order))
        #: ``[names]`` number of each name's color, -1 for what is never sharded.
        self.of_name = np.where(names.shardable, number[analysis.color], -1)
        #: ``[names]`` index into :attr:`holdings`: the mesh axes on each name.
        self.holdings, self.held = _name_axes(plan)
        arguments: list[dict[str, int]] = [{} for _ in order]
        for path, value in zip(
            analysis.program.arguments, analysis.program.argument_values, strict=True
        ):
            first, last = names.value_dim[value : value + 2]
            for d, name in enumerate(names.def_name[first:last].tolist()):
                if self.of_name[name] >= 0:
                    arguments[self.of_name[name]][f"{folded(path)}:{d}"] = d
        sizes: list[list[int]] = [[] for _ in order]
        at = np.stack([self.of_name[names.def_name], names.dim_size], axis=1)
        for c, size in np.unique(at[at[:, 0] >= 0], axis=0)[::-1].tolist():
            sizes[c].append(size)
        #: ``[colors]`` which colors are alike.
        kinds: dict[Any, int] = {}
        self.kind = [
            kinds.setdefault((*of, *sizes[c], count[order[c]]), len(kinds))
            for c, of in enumerate(arguments)
        ]
        of_kind = np.array([*self.kind, -1])[self.of_name]
        total = np.bincount(of_kind[of_kind >= 0], minlength=len(kinds))
        axes: list[dict[str, int]] = [{} for _ in kinds]
        pairs, times = np.unique(np.stack([of_kind, self.held]), axis=1, return_counts=True)
        for kind, held, n in zip(*pairs.tolist(), times.tolist(), strict=True):
            for axis in self.holdings[held] if kind >= 0 else ():
                axes[kind][axis] = axes[kind].get(axis, 0) + n
        torn: dict[int, int] = defaultdict(int)
        for resolution in analysis.resolutions:
            torn[int(of_kind[resolution.names[0]])] += 1
        members: list[list[int]] = [[] for _ in kinds]
        for c, kind in enumerate(self.kind):
            members[kind].append(c)
        self.labels = [
            color_label(kind) + (str(members[kind].index(c) + 1) if len(members[kind]) > 1 else "")
            for c, kind in enumerate(self.kind)
        ]
        self.rows = [
            {
                "label": color_label(kind),
                "colors": len(of),
                "dimensions": int(sum(count[order[c]] for c in of)),
                "names": int(total[kind]),
                "sizes": sizes[of[0]][:_DIMENSIONS],
                "arguments": list(arguments[of[0]])[:_DIMENSIONS],
                "more_arguments": max(0, len(arguments[of[0]]) - _DIMENSIONS),
                "conflicts": torn[kind],
                "axes": {axis: axes[kind][axis] for axis in plan.mesh.names if axis in axes[kind]},
            }
            for kind, of in enumerate(members)
        ]


def color_label(number: int) -> str:
    """``A`` to ``Z``, then ``AA`` ..."""
    label = chr(ord("A") + number % 26)
    return label if number < 26 else color_label(number // 26 - 1) + label


def _name_axes(plan: Plan) -> tuple[list[tuple[str, ...]], Any]:
    """The different sets of mesh axes on names, and which each name has."""
    names, shardings = plan.analysis.names, plan.shardings
    holdings: dict[tuple[str, ...], int] = {(): 0}
    held = np.zeros(names.count, dtype=np.int64)
    place = {
        (op, index): u
        for u, (op, index) in enumerate(
            zip(names.use_op.tolist(), names.use_index.tolist(), strict=True)
        )
    }
    for u, value in enumerate(names.use_value.tolist()):
        spec = shardings.values.get(value)
        if spec:
            _hold(held, holdings, names.use_name[names.use_dim[u] : names.use_dim[u + 1]], spec)
    for (op, index), spec in shardings.uses.items():
        u = place[op, index]
        _hold(held, holdings, names.use_name[names.use_dim[u] : names.use_dim[u + 1]], spec)
    # What a sum in parts is computed in overrides what it is kept in.
    for value, spec in (*shardings.values.items(), *shardings.sums.items()):
        rows = names.def_name[names.value_dim[value] : names.value_dim[value + 1]]
        _hold(held, holdings, rows, spec)
    return list(holdings), held


def _hold(held: Any, holdings: dict[tuple[str, ...], int], rows: Any, spec: Spec) -> None:
    for name, axes in zip(rows.tolist(), spec, strict=True):
        held[name] = holdings.setdefault(tuple(axes), len(holdings))


def _listing(plan: Plan, places: _Places, colors: _Colors) -> dict[str, Any]:
    """The program in columns.

    ``signatures`` are ``[kind, attributes, factors, operands, results, rule]``: operands and
    results as ``[type, factor of each dimension]``, ``types`` as ``[dtype, shape]``.  Values are
    numbered in program order, so an op's results follow from the signatures before it, and its
    names too: name ``i`` of an op is that of factor ``i``.  ``color`` is by name (run lengths);
    ``color_kind``, a row of ``colors``, and ``color_label`` are by color.  ``held`` is by name, an
    index into ``holdings``.  ``specs`` and ``value_spec`` are shardings of values, ``reshards``
    those of operands that differ, ``sums`` of results that are only summed up in parts; ``moves``
    are collectives: op, operand (-1: of the result), kind, axes, count, seconds, bytes.  ``spent``
    are seconds of products and memory traffic of the ops that take any.
    """
    program, rules = plan.analysis.program, plan.analysis.rules
    types: dict[Any, int] = {}
    signatures = []
    for signature, rule in zip(program.signatures, rules, strict=True):
        operands, results = (
            [
                [types.setdefault((t.dtype, t.shape), len(types)), [dim[0] for dim in dims]]
                for t, dims in zip(of, side, strict=True)
            ]
            for of, side in (
                (signature.operands, rule.operands), (signature.results, rule.results),
            )
        )  # fmt: skip
        attributes = ", ".join(f"{k} = {_attribute(v)}" for k, v in signature.attributes)
        signatures.append([
            signature.kind, attributes, [f.label for f in rule.factors], operands, results,
            rule.einsum(),
        ])  # fmt: skip
    number: dict[int, int] = {}
    for op in program.ops:
        for value in op.results:
            number[value] = len(number)
    specs: dict[Spec, int] = {}

    def spec(found: Spec) -> int:
        return specs.setdefault(found, len(specs))

    spec(())
    value_spec = [0] * len(number)
    for value, found in plan.shardings.values.items():
        value_spec[number[value]] = spec(found)
    first_return = len(program.ops) - len(program.results)
    uses = [[op, i, spec(found)] for (op, i), found in sorted(plan.shardings.uses.items())]
    uses += [
        [first_return + j, 0, spec(found)]
        for j, (found, value) in enumerate(
            zip(plan.shardings.results, program.result_values, strict=True)
        )
        if found != plan.shardings.of(program, value)
    ]
    sums = [[number[v], spec(found)] for v, found in sorted(plan.shardings.sums.items())]
    kinds: dict[str, int] = {}
    axes: dict[tuple[str, ...], int] = {}
    moves = [
        [
            c.op, c.operand, kinds.setdefault(c.kind, len(kinds)),
            axes.setdefault(c.axes, len(axes)), _digits(c.count), _digits(c.seconds),
            round(c.bytes),
        ]
        for c in plan.breakdown.collectives
    ]  # fmt: skip
    products, memory = plan.breakdown.product_seconds, plan.breakdown.memory_seconds
    spent = np.flatnonzero((products > 0) | (memory > 0)).tolist()
    return {
        "ops": len(program.ops),
        "first_return": first_return,
        "types": [[dtype, list(shape)] for dtype, shape in types],
        "signatures": signatures,
        "signature": [op.signature for op in program.ops],
        "operands": [[number[v] for v in op.operands] for op in program.ops],
        "repeats": _runs(list(program.repeats)),
        "arguments": list(program.arguments),
        "results": list(program.results),
        "labels": {number[v]: label for v, label in program.labels.items() if v in number},
        "paths": places.paths,
        "spots": [[*spot, places.source(spot)] for spot in places.spot_number],
        "path_spot": [places.spot_number[spot] for spot in places.spots],
        "place": places.of_op,
        "sections": [dataclasses.asdict(section) for section in sections_of(program)],
        "color": _runs(colors.of_name.tolist()),
        "color_kind": colors.kind,
        "color_label": colors.labels,
        "held": _runs(colors.held.tolist()),
        "holdings": [list(axes) for axes in colors.holdings],
        "specs": [[list(a) for a in found] for found in specs],
        "value_spec": _runs(value_spec),
        "reshards": uses,
        "sums": sums,
        "move_kinds": list(kinds),
        "move_axes": [list(a) for a in axes],
        "moves": moves,
        "spent": [[op, _digits(float(products[op])), _digits(float(memory[op]))] for op in spent],
    }


def _attribute(value: object) -> str:
    text = str(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= _LONG else text[:_LONG] + " ..."


def _digits(number: float) -> float:
    """A number to four digits."""
    return float(f"{number:.4g}")


def _runs(values: list[int]) -> list[int]:
    """``[value, times, value, times ...]``."""
    found: list[int] = []
    for value in values:
        if found and found[-2] == value:
            found[-1] += 1
        else:
            found += [value, 1]
    return found
