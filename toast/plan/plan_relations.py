"""The relations of a plan for queries: sections 2 and 3 of ``rules/queries/vocabulary.lp``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from toast.analysis.query import Columns, Relations
from toast.analysis.vocabulary import kib, turned, value_bytes
from toast.facts.relations import quoted
from toast.logic import LARGEST
from toast.plan.plan import Plan
from toast.program import Spec
from toast.space.mesh_relations import relations as on_mesh


def relations(plan: Plan) -> Relations:
    """All relations of a plan, of its mesh and of its analysis, by predicate and arity."""
    return {
        **plan.analysis.vocabulary.relations,
        **on_mesh(plan.model.space),
        ("sharding", 4): lambda: _sharding(plan),
        ("resharded", 2): lambda: turned(plan.shardings.uses, 2),
        ("use_sharding", 5): lambda: turned(
            ((*use, *row) for use, spec in plan.shardings.uses.items() for row in _axes(spec)), 5
        ),
        ("device_kib", 2): lambda: _device_kib(plan),
        ("step", 3): lambda: turned(
            ((n, quoted(s.axis), quoted(s.reason)) for n, s in enumerate(plan.steps, 1)), 3
        ),
        ("step_dimension", 2): lambda: turned(
            ((n, quoted(d)) for n, s in enumerate(plan.steps, 1) for d in s.dimensions), 2
        ),
        ("collective", 7): lambda: _collectives(plan),
    }


def _axes(spec: Spec) -> Iterator[tuple[int, str, int]]:
    """For each axis of a sharding its dimension, name and position."""
    for d, axes in enumerate(spec):
        yield from ((d, quoted(axis), position) for position, axis in enumerate(axes))


def _sharding(plan: Plan) -> Columns:
    values = sorted(plan.shardings.values.items())
    return turned(((value, *row) for value, spec in values for row in _axes(spec)), 4)


def _device_kib(plan: Plan) -> Columns:
    sizes = dict(plan.mesh.axes)
    rows = []
    for number, value in enumerate(plan.analysis.program.values):
        axes = [axis for held in plan.shardings.values.get(number, ()) for axis in held]
        shards = math.prod(sizes[axis] for axis in axes)
        rows.append((number, kib(value_bytes(value.type) / shards)))
    return turned(rows, 2)


def _collectives(plan: Plan) -> Columns:
    """One row for the collectives of one kind at one operand, or at the results of one op."""
    together: dict[Any, list[Any]] = {}
    for c in plan.breakdown.collectives:
        row = together.setdefault((c.op, c.operand, c.kind, c.axes), [0, 0.0, 0.0])
        row[0], row[1], row[2] = row[0] + c.count, max(row[1], c.bytes), row[2] + c.seconds
    rows: list[tuple[Any, ...]] = [
        (
            op, operand, quoted(kind), quoted(" ".join(axes)), min(count, LARGEST), kib(size),
            min(math.ceil(1e9 * seconds - 1e-9), LARGEST),
        )
        for (op, operand, kind, axes), (count, size, seconds) in together.items()
    ]  # fmt: skip
    return turned(rows, 7)
