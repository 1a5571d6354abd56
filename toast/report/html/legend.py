"""The labels of a report: source places of ops, and letters of colors."""

from __future__ import annotations

import os
import pathlib
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from toast.boundary.source_lines import SourceLines
from toast.paths import folded
from toast.plan import Plan
from toast.program import Location, Program, Spec
from toast.report.dimension_names import named_dimensions

#: Maximum number of argument dimensions in the row of a color.
_DIMENSIONS = 6


class SourcePlaces:
    """The distinct source places of ops, without the common folder of all files.

    A program from a file can name any file as a source.  For such a program, only lines of files
    below the folder ``sources`` are shown; for a program traced in this process, all lines are.
    """

    def __init__(self, program: Program, sources: pathlib.Path | None = None) -> None:
        self._lines = SourceLines(sources, traced=program.traced)
        locations = [program.location(op) for op in range(len(program.ops))]
        files = {place.shown_file: place.file for place in locations if place.file}
        folders = {str(pathlib.PurePath(file).parent) for file in files}
        try:
            common = os.path.commonpath(folders) if folders else ""
        except ValueError:  # relative and absolute paths
            common = ""
        #: The removed prefix of file names: the parent of the common folder.
        self.root = str(pathlib.PurePath(common).parent) if common else ""
        number: dict[Location, int] = {}
        #: ``[ops]`` indices into :attr:`paths` and :attr:`spots`.
        self.of_op = [number.setdefault(place, len(number)) for place in locations]
        self.paths = [place.path for place in number]
        self._files = {self.short(shown): file for shown, file in files.items()}
        #: File, line and function of each place.
        self.spots = [(self.short(p.shown_file), p.line, p.function) for p in number]
        self.spot_number = {spot: i for i, spot in enumerate(dict.fromkeys(self.spots))}

    def short(self, text: str) -> str:
        """``text`` with shortened file names."""
        if len(self.root) <= 1:
            return text
        return re.sub(rf"(?<!\S){re.escape(self.root + os.sep)}", "", text)

    def source(self, spot: tuple[str, int, str]) -> str:
        """The text of a line, or ``""`` if it must not be shown or cannot be read."""
        file = self._files.get(spot[0], "")
        return self._lines.line(file, spot[1]).strip()[:200] if file else ""


class Colors:
    """The colors that actions can shard, by decreasing number of dimensions.

    Colors of the same dimensions in repeated layers share a letter: D1, D2, D3 ...
    """

    def __init__(self, plan: Plan, given: Mapping[str, str] | None = None) -> None:
        """``given`` are the user's names of dimensions, such as ``{"tokens:0": "batch"}``.

        Raises :class:`toast.errors.PlanError` if one of them matches no dimension.
        """
        analysis = plan.analysis
        names = analysis.names
        marked = np.concatenate([names.def_name, names.use_name])
        marked = marked[names.shardable[marked]]
        colors, count = np.unique(analysis.color[marked], return_counts=True)
        order = np.argsort(-count, kind="stable")
        number = np.full(names.count, -1, dtype=np.int64)
        number[colors[order]] = np.arange(len(order))
        #: ``[names]`` the number of each name's color, or -1 if it is never sharded.
        self.of_name = np.where(names.shardable, number[analysis.color], -1)
        #: ``held``: ``[names]`` indices into ``holdings``: the mesh axes that shard each name.
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
        #: ``[colors]`` the kind of each color; colors of the same kind share a letter.
        kinds: dict[Any, int] = {}
        self.kind = [
            kinds.setdefault((*of, *sizes[c], count[order[c]]), len(kinds))
            for c, of in enumerate(arguments)
        ]
        starts = names.value_dim
        self.names = named_dimensions(
            analysis.program,
            [
                [self.kind[c] if c >= 0 else -1 for c in self.of_name[
                    names.def_name[starts[value] : starts[value + 1]]
                ].tolist()]
                for value in analysis.program.argument_values
            ],
            given or {},
        )  # fmt: skip
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
                "name": self.names.get(kind, ""),
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
    """The distinct tuples of mesh axes, and for each name the index of its tuple."""
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
    # The sharding in which a partial sum is computed overrides the sharding of its result.
    for value, spec in (*shardings.values.items(), *shardings.sums.items()):
        rows = names.def_name[names.value_dim[value] : names.value_dim[value + 1]]
        _hold(held, holdings, rows, spec)
    return list(holdings), held


def _hold(held: Any, holdings: dict[tuple[str, ...], int], rows: Any, spec: Spec) -> None:
    for name, axes in zip(rows.tolist(), spec, strict=True):
        held[name] = holdings.setdefault(tuple(axes), len(holdings))
