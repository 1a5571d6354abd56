"""One block of a program, such as a transformer's layer: its ops in a few boxes, and their data."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy import sparse

from toast import lazy
from toast.plan import Plan
from toast.program import Program, Spec
from toast.report.html.legend import Colors
from toast.report.html.sections import Section
from toast.report.memory_groups import forms_of_weights
from toast.space import PRODUCTS

csgraph = lazy.module("scipy.sparse.csgraph")

#: Kinds of ops that have a box of their own, beside products.
_ALONE = frozenset({"gather", "scatter", "custom_call", "sort", "fft", "while", "case"})

#: Kinds of ops that a box does not mention.
_PLAIN = frozenset({
    "convert", "transpose", "reshape", "broadcast_in_dim", "constant", "iota", "slice",
    "concatenate", "optimization_barrier", "composite", "call",
})  # fmt: skip

#: Blocks of more boxes are not drawn, nor are those of a single one.
_MOST, _LEAST = 64, 3

#: Sizes of the drawing in pixels.
_WIDTH, _LINE, _GAP_X, _GAP_Y, _PAD = 262, 19, 18, 32, 12


@dataclasses.dataclass
class _Box:
    """Ops that are drawn together."""

    ops: list[int]
    title: str
    about: str
    weights: dict[int, str] = dataclasses.field(default_factory=dict)


def block_of(plan: Plan, sections: Sequence[Section], colors: Colors) -> dict[str, Any] | None:
    """The block that repeats most, as plain data for a drawing; None if none can be drawn.

    Keys: ``title``; ``alike``, the number of equal blocks; ``nodes``, each with its place, its
    ``lines`` of tensors (``[name, dtype, [[size, color, axes] ...]]``), ``seconds`` and ``moves``
    (collectives of its result and of its weights); ``edges``, each with its path, the ``moves`` on
    it and where to write them; ``width`` and ``height``.
    """
    chosen = _repeated(plan.analysis.program, sections)
    if chosen is None:
        return None
    section, alike = chosen
    drawing = _Drawing(plan, section, colors)
    if not _LEAST <= len(drawing.boxes) <= _MOST:
        return None
    return {"title": section.title, "phase": section.phase, "alike": alike, **drawing.data()}


def _repeated(program: Program, sections: Sequence[Section]) -> tuple[Section, int] | None:
    """The section with most work of its likes in the forward pass, and their number."""
    groups: dict[Any, list[Section]] = defaultdict(list)
    for section in sections:
        if section.title in ("arguments", "results") or section.phase == "backward":
            continue
        key = tuple(program.ops[op].signature for op in range(section.start, section.stop))
        groups[key].append(section)
    best: tuple[float, Section, int] | None = None
    for members in groups.values():
        middle = members[len(members) // 2]
        ops = range(middle.start, middle.stop)
        products = sum(program.kind(op) in PRODUCTS for op in ops)
        alike = len(members) * int(program.repeats[middle.start])
        work = products * alike
        if products and (best is None or work > best[0]):
            best = work, middle, alike
    return best and best[1:]


class _Drawing:
    """The boxes of a section, and their places."""

    def __init__(self, plan: Plan, section: Section, colors: Colors) -> None:
        self._plan, self._section, self._colors = plan, section, colors
        self._program = plan.analysis.program
        self._weights = forms_of_weights(self._program)
        self._argument = dict(
            zip(self._program.arguments, self._program.argument_values, strict=True)
        )
        self.boxes, self._of = self._contracted()
        self._moves: dict[int, list[Any]] = defaultdict(list)
        #: Collectives before ops that only change the form of a weight, by the box that uses it.
        self._of_forms: dict[int, list[Any]] = defaultdict(list)
        users = self._users_of_forms()
        for c in plan.breakdown.collectives:
            if c.op in self._of:
                self._moves[c.op].append(c)
            elif c.op in users:
                self._of_forms[users[c.op]].append(c)

    # -- which ops are drawn together ----------------------------------------------------------

    def _contracted(self) -> tuple[list[_Box], dict[int, int]]:
        program = self._program
        level: dict[int, int] = {}
        keys: dict[int, Any] = {}
        for op in range(self._section.start, self._section.stop):
            inner = [program.values[v].op for v in program.ops[op].operands]
            known = [o for o in inner if o in level]
            outer = any(
                v not in self._weights and o < self._section.start and self._flows(v)
                for v, o in zip(program.ops[op].operands, inner, strict=True)
            )
            if not known and not outer:
                continue  # made of weights and constants alone
            level[op] = max((level[o] + self._alone(o) for o in known), default=0)
            name = re.sub(r"\.?<\w+>", "", program.location(op).function).rsplit(".", 1)[-1]
            keys[op] = op if self._alone(op) else (level[op], name)
        keys = self._acyclic(self._joined(keys))
        members: dict[Any, list[int]] = defaultdict(list)
        for op, key in keys.items():
            members[key].append(op)
        boxes = [self._box(ops) for ops in sorted(members.values())]
        of = {op: number for number, box in enumerate(boxes) for op in box.ops}
        return boxes, of

    def _users_of_forms(self) -> dict[int, int]:
        """The box of each op of the section without a box whose result a box uses."""
        program = self._program
        users: dict[int, int] = {}
        for op in range(self._section.stop - 1, self._section.start - 1, -1):
            box = self._of.get(op, users.get(op))
            if box is None:
                continue
            for value in program.ops[op].operands:
                source = program.values[value].op
                if source >= self._section.start and source not in self._of:
                    users[source] = box
        return users

    def _alone(self, op: int) -> bool:
        kind = self._program.kind(op)
        return kind in PRODUCTS or kind in _ALONE

    def _flows(self, value: int) -> bool:
        """Whether a value is data: neither a constant nor a mask."""
        op = self._program.values[value].op
        computed = self._program.ops[op].operands or op < len(self._program.arguments)
        return bool(computed) and "f" in self._program.values[value].type.dtype

    def _joined(self, keys: dict[int, Any]) -> dict[int, Any]:
        """Groups that only change the form of data join the group that the data come from."""
        members: dict[Any, list[int]] = defaultdict(list)
        for op, key in keys.items():
            members[key].append(op)
        for key, ops in members.items():
            sources = {
                keys[o] for op in ops for v in self._program.ops[op].operands
                if (o := self._program.values[v].op) in keys and keys[o] != key
            }  # fmt: skip
            if len(sources) == 1 and all(self._program.kind(op) in _PLAIN for op in ops):
                keys.update(dict.fromkeys(ops, sources.pop()))
        return keys

    def _acyclic(self, keys: dict[int, Any]) -> dict[int, Any]:
        """Groups of ops such that data flow in one direction: those in a circle are joined."""
        number: dict[Any, int] = {}
        for key in keys.values():
            number.setdefault(key, len(number))
        pairs = {
            (number[keys[o]], number[key])
            for op, key in keys.items()
            for o in (self._program.values[v].op for v in self._program.ops[op].operands)
            if o in keys
        }
        if not pairs:
            return keys
        rows, columns = np.array(sorted(pairs)).T
        shape = len(number), len(number)
        matrix = sparse.coo_array((np.ones(len(rows)), (rows, columns)), shape=shape)
        _, joined = csgraph.connected_components(matrix, directed=True, connection="strong")
        return {op: int(joined[number[key]]) for op, key in keys.items()}

    def _box(self, ops: list[int]) -> _Box:
        program = self._program
        weights = {
            value: self._weights[value]
            for op in ops for value in program.ops[op].operands if value in self._weights
        }  # fmt: skip
        kinds = Counter(program.kind(op) for op in ops)
        places = Counter(
            re.sub(r"\.?<\w+>", "", program.location(op).function).rsplit(".", 1)[-1] for op in ops
        )
        title = next((name for name, _ in places.most_common() if name), "")
        if not title:  # a function of JAX, such as silu
            called = re.findall(r"jit\((\w+)\)", program.location(ops[-1]).path)
            title = called[-1] if called else program.kind(ops[-1])
        about = ", ".join(kind for kind, _ in kinds.most_common() if kind not in _PLAIN)
        alone = [op for op in ops if self._alone(op)]
        if len(alone) == 1 and all(program.kind(op) in _PLAIN for op in ops if op != alone[0]):
            einsum = re.search(r"\(?([\w.]+,[\w.]+->[\w.]*)\)?", program.location(alone[0]).path)
            about = program.kind(alone[0])
            if einsum and about in PRODUCTS:
                about = einsum[1]
            if weights:
                last = [re.findall(r"\w+", name)[-1] for name in weights.values()]
                title = last[0] if len(last) == 1 else title
        return _Box(ops, title, about, weights)

    # -- what is drawn -------------------------------------------------------------------------

    def data(self) -> dict[str, Any]:
        """The nodes and the edges, with their places."""
        program, first, last = self._program, self._section.start, self._section.stop
        passes = program.passes
        flow: dict[tuple[int, int], dict[int, list[Any]]] = defaultdict(dict)
        outputs: dict[int, dict[int, None]] = defaultdict(dict)
        inputs: dict[int, None] = {}
        sizes: dict[int, int] = {}
        before, after = len(self.boxes), len(self.boxes) + 1
        for op, box in self._of.items():
            for index, value in enumerate(program.ops[op].operands):
                source = program.values[value].op
                if value in self._weights or (source < first and not self._flows(value)):
                    continue
                origin = self._of.get(source, before if source < first else None)
                if origin is None or origin == box:
                    continue
                moves = [c for c in self._moves[op] if c.operand == index]
                flow[origin, box].setdefault(value, []).extend(moves)
                if origin == before:
                    inputs[value] = None
                    sizes[value] = math.prod(program.values[value].type.shape)
                else:
                    outputs[origin][value] = None
        for op in range(last, len(program.ops)):
            for value in program.ops[op].operands:
                last_box = self._of.get(program.values[value].op)
                if last_box is not None and passes[op] == passes[first]:
                    flow[last_box, after].setdefault(value, [])
                    outputs[last_box][value] = None
        # Masks and positions, which are small, are not drawn.
        large = max(sizes.values(), default=0) / 64
        for (origin, box), values in list(flow.items()):
            if origin == before:
                shown = {v: m for v, m in values.items() if sizes[v] > large}
                if shown:
                    flow[origin, box] = shown
                else:
                    del flow[origin, box]
        inputs = {value: None for value in inputs if sizes[value] > large}
        nodes = [self._node(number, outputs[number]) for number in range(len(self.boxes))]
        nodes.append(self._end("from before", inputs))
        of_end = {v: None for (_, box), values in flow.items() if box == after for v in values}
        nodes.append(self._end("to what follows", of_end))
        return _placed(nodes, flow)

    def _node(self, number: int, outputs: Iterable[int]) -> dict[str, Any]:
        program, parts, box = self._program, self._plan.breakdown, self.boxes[number]
        lines = [
            [re.findall(r"\w+", name)[-1], *self._tensor(value, self._plan.value_spec(value))]
            for name, value in {n: self._argument[n] for n in box.weights.values()}.items()
        ][:3]
        largest = sorted(outputs, key=lambda v: -math.prod(program.values[v].type.shape))[:1]
        lines += [["", *self._tensor(v, self._plan.value_spec(v))] for v in largest]
        of_result = [c for op in box.ops for c in self._moves[op] if c.operand < 0]
        of_weights = [
            c for op in box.ops for c in self._moves[op]
            if c.operand >= 0 and program.ops[op].operands[c.operand] in box.weights
        ]  # fmt: skip
        return {
            "title": box.title,
            "about": box.about,
            "op": next((op for op in box.ops if self._alone(op)), box.ops[-1]),
            "ops": len(box.ops),
            "lines": lines,
            "seconds": float(
                parts.product_seconds[box.ops].sum() + parts.memory_seconds[box.ops].sum()
            ),
            "weights_moves": _moved([*of_weights, *self._of_forms[number]]),
            "result_moves": _moved(of_result),
        }

    def _end(self, title: str, values: Iterable[int]) -> dict[str, Any]:
        lines = [["", *self._tensor(v, self._plan.value_spec(v))] for v in values][:3]
        return {
            "title": title, "about": "", "op": -1, "ops": 0, "lines": lines, "seconds": 0.0,
            "weights_moves": [], "result_moves": [],
        }  # fmt: skip

    def _tensor(self, value: int, spec: Spec) -> list[Any]:
        names, type_ = self._plan.analysis.names, self._program.values[value].type
        first, last = names.value_dim[value : value + 2]
        colors = self._colors.of_name[names.def_name[first:last]].tolist()
        spec = spec or ((),) * len(type_.shape)
        dims = [[n, c, list(a)] for n, c, a in zip(type_.shape, colors, spec, strict=True)]
        return [type_.dtype, dims]


def _moved(moves: Iterable[Any]) -> list[dict[str, Any]]:
    """Collectives by kind and axes, with their seconds."""
    rows: dict[Any, dict[str, Any]] = {}
    for c in moves:
        row = rows.setdefault((c.kind, c.axes), {
            "kind": c.kind, "axes": list(c.axes), "count": 0, "seconds": 0.0,
        })  # fmt: skip
        row["count"] += c.count
        row["seconds"] += c.seconds
    return list(rows.values())


def _placed(nodes: list[dict[str, Any]], flow: dict[tuple[int, int], Any]) -> dict[str, Any]:
    """Places of nodes in layers from the top, and paths of the edges between them."""
    before = len(nodes) - 2
    used = sorted({*range(before), *(n for pair in flow for n in pair)})
    depth = dict.fromkeys(used, 0)
    edges = sorted(pair for pair in flow if pair[0] != pair[1])
    for _ in used:  # longest paths; there are no circles
        for a, b in edges:
            depth[b] = max(depth[b], depth[a] + 1)
    for node in sorted(used, key=lambda n: -depth[n]):
        below = [depth[b] for a, b in edges if a == node]
        if below and node != before and not any(b == node for _, b in edges):
            depth[node] = min(below) - 1
    rows: dict[int, list[int]] = defaultdict(list)
    for node in used:
        rows[depth[node]].append(node)
    for node in nodes:
        lines = 1 + len(node["lines"])
        lines += len(node["weights_moves"]) + len(node["result_moves"])
        node["width"], node["height"] = _WIDTH, lines * _LINE + 2 * 6
    x: dict[int, float] = {}
    for row in rows.values():
        for place, node in enumerate(row):
            x[node] = (place - (len(row) - 1) / 2) * (_WIDTH + _GAP_X)
    near: dict[int, list[int]] = defaultdict(list)
    for a, b in edges:
        near[a].append(b)
        near[b].append(a)
    for _ in range(12):
        for row in rows.values():
            wish = {n: sum(x[m] for m in near[n]) / len(near[n]) if near[n] else x[n] for n in row}
            row.sort(key=lambda n: wish[n])
            right = -math.inf
            for n in row:
                x[n] = max(wish[n], right)
                right = x[n] + _WIDTH + _GAP_X
            off = sum(x[n] - wish[n] for n in row) / len(row)
            for n in row:
                x[n] -= off
    left = min(x.values()) - _PAD
    y = float(_PAD)
    for number in sorted(rows):
        tallest = max(nodes[n]["height"] for n in rows[number])
        for n in rows[number]:
            nodes[n]["x"], nodes[n]["y"] = round(x[n] - left), round(y)
        y += tallest + _GAP_Y
    beside: Counter[tuple[int, int]] = Counter()
    drawn = []
    for a, b in edges:
        between = [n for k in range(depth[a] + 1, depth[b]) for n in rows[k]]
        side = max((nodes[n]["x"] + _WIDTH for n in between), default=0) + 16
        beside[depth[a], depth[b]] += 1
        at = side + 8 * beside[depth[a], depth[b]] if between else None
        drawn.append(_edge(flow[a, b], nodes[a], nodes[b], at))
    return {
        "nodes": [nodes[n] for n in used],
        "edges": drawn,
        "width": round(max(x.values()) - left + _WIDTH + 4 * _PAD),
        "height": round(y - _GAP_Y + _PAD),
    }


def _edge(
    values: dict[int, list[Any]], a: dict[str, Any], b: dict[str, Any], side: float | None
) -> dict[str, Any]:
    """An edge from box ``a`` to box ``b``, at ``side`` if other boxes are between them."""
    x1, y1 = a["x"] + a["width"] / 2, a["y"] + a["height"]
    x2, y2 = b["x"] + b["width"] / 2, b["y"] - 2
    if side is None:
        bend = (y2 - y1) / 2
        path = f"M{x1:g} {y1:g}C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}"
    else:
        x1, x2 = x1 + a["width"] / 4, x2 + b["width"] / 4
        path = (
            f"M{x1:g} {y1:g}C{x1:g} {y1 + 24:g} {side:g} {y1:g} {side:g} {y1 + 36:g}"
            f"V{y2 - 36:g}C{side:g} {y2:g} {x2:g} {y2 - 24:g} {x2:g} {y2:g}"
        )
    return {
        "path": path,
        "moves": _moved(c for moves in values.values() for c in moves),
        "x": round(x1),
        "y": round(y1 + 14),
    }


__all__ = ["block_of"]
