"""The paper's figures, drawn from an analysis: listings with named dimensions, dimension graphs."""

from __future__ import annotations

import dataclasses
import html
from collections import defaultdict

from toast import Analysis

#: One colour per color, as readable on white as on black; letters say the same.
_PALETTE = ("#967100", "#24874f", "#4074d6", "#c04c87", "#8861d1", "#ba5d2b", "#2e828a", "#727c29")
_X, _Y, _R = 86, 74, 21


class Letters:
    """Names for colors, given for the dimensions of arguments: ``x="BX"``."""

    def __init__(self, analysis: Analysis, letters: dict[str, str | list[str]]) -> None:
        self.analysis = analysis
        names, program = analysis.names, analysis.program
        self.of_color: dict[int, str] = {}
        for argument, given in letters.items():
            first = names.value_dim[program.argument_values[program.arguments.index(argument)]]
            for d, letter in enumerate(given):
                color = int(analysis.color[names.def_name[first + d]])
                if self.of_color.setdefault(color, letter) != letter:
                    raise ValueError(f"{argument}:{d} is {self.of_color[color]}, not {letter}")
        counts: dict[str, int] = defaultdict(int)
        #: Each name: its color's letter, numbered in the order of the program.
        self.of_name: list[str] = []
        for color in analysis.color.tolist():
            letter = self.of_color.get(color, "?")
            counts[letter] += 1
            self.of_name.append(f"{letter}{counts[letter]}")

    def paint(self, name: int) -> str:
        """The CSS colour of a name."""
        letters = list(dict.fromkeys(self.of_color.values()))
        return _PALETTE[letters.index(self.of_color[int(self.analysis.color[name])])]


@dataclasses.dataclass(frozen=True)
class Drawing:
    """SVG or HTML that a live block shows."""

    text: str

    def _repr_html_(self) -> str:
        return self.text


def listing(analysis: Analysis, *, names: bool = False, **letters: str | list[str]) -> Drawing:
    """The program with its dimensions named: by color, or with ``names`` one by one, also at uses.

    ``letters`` are what to call colors, by arguments.
    """
    known, program, rows = Letters(analysis, letters), analysis.program, analysis.names

    def dims(found: list[int]) -> str:
        spans = (
            f'<b style="color:{known.paint(n)}">'
            f"{known.of_name[n] if names else known.of_color[int(analysis.color[n])]}</b>"
            for n in found
        )
        return f"[{', '.join(spans)}]"

    def defined(value: int) -> str:
        return dims(rows.def_name[rows.value_dim[value] : rows.value_dim[value + 1]].tolist())

    uses = {
        (int(op), int(i)): rows.use_name[rows.use_dim[u] : rows.use_dim[u + 1]].tolist()
        for u, (op, i) in enumerate(zip(rows.use_op, rows.use_index, strict=True))
    }

    def used(op: int, index: int, value: int) -> str:
        label = program.labels[value]
        return f"{label} : {dims(uses[op, index])}" if names else label

    arguments = [f"{program.labels[v]} : {defined(v)}" for v in program.argument_values]
    lines = [f"def {html.escape(program.name)}({', '.join(arguments)}):"]
    for number in range(len(program.arguments), len(program.ops) - len(program.results)):
        op = program.ops[number]
        value = op.results[0]
        given = ", ".join(used(number, i, v) for i, v in enumerate(op.operands))
        kind = program.kind(number)
        lines.append(f"  {program.labels[value]} : {defined(value)} = {kind}({given})")
    if program.results:
        lines.append(f"  return {', '.join(program.labels[v] for v in program.result_values)}")
    return Drawing(f"<pre>{chr(10).join(lines)}</pre>")


def graph(analysis: Analysis, *, only: str = "", **letters: str | list[str]) -> Drawing:
    """The dimension graph: names, edges from definitions to uses, conflicts (dashed).

    ``only`` is the letter of one color, whose names alone are drawn.
    """
    known, names = Letters(analysis, letters), analysis.names
    drawn = [
        n for n in range(names.count)
        if only in ("", known.of_color.get(int(analysis.color[n])))
    ]  # fmt: skip
    edges = [(a, b) for a, b in names.edges.tolist() if a in drawn and b in drawn]
    conflicts = [r.names for r in analysis.resolutions if r.names[0] in drawn]
    place = _places(analysis, drawn, edges)
    parts = [_edge(place, a, b) for a, b in edges]
    parts += [_conflict(place[a], place[b]) for a, b in conflicts]
    parts += [_node(place[n], known.of_name[n], known.paint(n)) for n in drawn]
    firsts: dict[int, int] = {}
    for n in drawn:
        firsts.setdefault(int(names.name_op[n]), n)
    for op, n in firsts.items():
        label = analysis.program.labels[analysis.program.ops[op].results[0]]
        x, y = place[n]
        parts.append(
            f'<text x="{x - _R - 6:.0f}" y="{y - _R + 6:.0f}" text-anchor="end" font-size="13" '
            f'fill="currentColor">{html.escape(label)}</text>'
        )
    width = max(x for x, _ in place.values()) + _X
    height = max(y for _, y in place.values()) + _Y / 2
    said = f"Dimension graph: {len(drawn)} names, {len(edges)} edges, {len(conflicts)} conflicts"
    return Drawing(
        f'<svg role="img" aria-label="{said}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">{_HEAD}{"".join(parts)}</svg>'
    )


_HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
)

Point = tuple[float, float]


def _edge(place: dict[int, Point], a: int, b: int) -> str:
    """A line from name to name, bent where another name stands between them."""
    (x, y), (u, v) = place[a], place[b]
    layers = round((v - y) / _Y)
    # Halfway, pulled outwards: away from the middle of the drawing.
    middle = sum(p[0] for p in place.values()) / len(place)
    outwards = -1 if (x + u) / 2 <= middle else 1
    pull = outwards * _X * min(layers, 5) / 2 if layers > 1 else 0.0
    mx, my = (x + u) / 2 + pull, (y + v) / 2
    (x, y), (u, v) = _towards((x, y), (mx, my)), _towards((u, v), (mx, my))
    return (
        f'<path d="M{x:.0f} {y:.0f}Q{mx:.0f} {my:.0f} {u:.0f} {v:.0f}" fill="none" '
        'stroke="currentColor" marker-end="url(#head)"/>'
    )


def _towards(point: Point, other: Point) -> Point:
    """Where the circle round ``point`` is left on the way to ``other``."""
    dx, dy = other[0] - point[0], other[1] - point[1]
    share = (_R + 2) / (dx * dx + dy * dy) ** 0.5
    return point[0] + dx * share, point[1] + dy * share


def _conflict(one: Point, two: Point) -> str:
    (x, y), (u, v) = sorted((one, two))
    return (
        f'<line x1="{x + _R:.0f}" y1="{y:.0f}" x2="{u - _R:.0f}" y2="{v:.0f}" stroke="#d33" '
        'stroke-width="2.5" stroke-dasharray="5 4"/>'
    )


def _node(point: Point, label: str, paint: str) -> str:
    x, y = point
    return (
        f'<circle cx="{x:.0f}" cy="{y:.0f}" r="{_R}" fill="{paint}" fill-opacity="0.3" '
        f'stroke="{paint}"/><text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" '
        f'fill="currentColor" font-size="14">{html.escape(label)}</text>'
    )


def _places(analysis: Analysis, drawn: list[int], edges: list[tuple[int, int]]) -> dict[int, Point]:
    """Where each name stands: ops in layers by their longest path, under those before them."""
    op_of = analysis.names.name_op
    layer = {int(op_of[n]): 0 for n in drawn}
    before: dict[int, list[int]] = defaultdict(list)
    for a, b in edges:  # sorted, so all before a name are known
        here, there = int(op_of[a]), int(op_of[b])
        layer[there] = max(layer[there], layer[here] + 1)
        before[there].append(a)
    layers: dict[int, list[int]] = defaultdict(list)
    for n in drawn:
        layers[layer[int(op_of[n])]].append(n)
    widest = max(map(len, layers.values()))
    place: dict[int, Point] = {}
    for depth in sorted(layers):
        above = {
            op: sum(place[n][0] for n in before[op]) / max(1, len(before[op]))
            for op in map(int, op_of[layers[depth]])
        }
        row = sorted(layers[depth], key=lambda n: (above[int(op_of[n])], n))
        for i, n in enumerate(row):
            place[n] = ((1 + (widest - len(row)) / 2 + i) * _X, (depth + 0.5) * _Y)
    return place
