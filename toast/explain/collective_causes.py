"""Explanations of collectives: the value that moves, the ops, and the steps that cause it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from toast.cost import Traffic, Transfer
from toast.cost.entities import Entity
from toast.errors import PlanError
from toast.explain.history import History
from toast.inputs import is_whole
from toast.plan import CollectiveExplanation, Plan, describe_value
from toast.plan.shard import major_ranks, spec_of
from toast.space import BOUNDARY, NONE


class CollectiveRow(NamedTuple):
    """One kind of collective of one value class or use class."""

    traffic: Traffic
    #: The number of the class.
    x: int
    transfer: Transfer


def in_order(plan: Plan) -> list[CollectiveRow]:
    """All collectives of a plan, by decreasing time."""
    model = plan.model
    layout = model.layout(plan.state[None])
    moved = [
        (traffic, x)
        for traffic in model.traffic(layout)
        for x in np.flatnonzero(traffic.count[0]).tolist()
    ]
    # In the order of the plan's transfers.
    rows = [CollectiveRow(*row, line) for row, line in zip(moved, plan.transfers, strict=True)]
    return [rows[i] for i in numbered(plan)]


def numbered(plan: Plan) -> list[int]:
    """Indices of ``plan.transfers`` in the order of the collectives' numbers, which start at 1.

    The order is by decreasing time.  Collectives that take no time have no number.
    """
    seconds = [transfer.count * transfer.seconds for transfer in plan.transfers]
    return sorted((i for i, spent in enumerate(seconds) if spent > 0), key=lambda i: -seconds[i])


def values_of(plan: Plan, row: CollectiveRow) -> list[int]:
    """The values that a collective moves."""
    tables = plan.model.tables
    if row.traffic.term.scope is Entity.USE_CLASS:
        uses = np.flatnonzero(tables.use_class == row.x)
        return [*map(int, np.unique(plan.analysis.names.use_value[uses]))]
    return [*map(int, np.flatnonzero(tables.value_class == row.x))]


def explain_collectives(plan: Plan) -> tuple[CollectiveExplanation, ...]:
    """All collectives of the plan, by decreasing time."""
    history = History(plan)
    return tuple(
        _explained(plan, history, number, row) for number, row in enumerate(in_order(plan), 1)
    )


def explain_collective(plan: Plan, number: int) -> CollectiveExplanation:
    """Explain a collective; ``number`` counts from 1, by decreasing time.

    Raises :class:`toast.errors.PlanError` if there is no collective with this number.
    """
    rows = in_order(plan)
    if not is_whole(number):
        raise PlanError(f"collective {number!r}: not a collective number; use a whole number")
    if not 1 <= number <= len(rows):
        remedy = f"use 1 to {len(rows)}" if rows else "it has none"
        raise PlanError(
            f"no collective {number} in the plan of {plan.analysis.program.name}; {remedy}"
        )
    return _explained(plan, History(plan), number, rows[number - 1])


def _explained(
    plan: Plan, history: History, number: int, row: CollectiveRow
) -> CollectiveExplanation:
    model, analysis = plan.model, plan.analysis
    program, names, tables = analysis.program, analysis.names, model.tables
    x, kind = row.x, row.transfer.kind
    of_use = row.traffic.term.scope is Entity.USE_CLASS
    layout = model.layout(plan.state[None])
    major = major_ranks(layout)
    chosen = int(row.traffic.axes[0, x])
    mesh = model.space.mesh
    axes = [a for a in range(len(mesh.axes)) if chosen >> a & 1]
    labels = tuple(mesh.names[a] for a in axes)
    values = values_of(plan, row)
    value = values[0]
    rank = len(program.values[value].type.shape)
    c = int(tables.uses.value[x]) if of_use else x
    maker = int(tables.slots.op_class[tables.values.slot[c]])
    user, use_text = maker, ""
    if of_use:
        user = int(tables.slots.op_class[tables.uses.slot[x]])
        use = int(np.flatnonzero(tables.use_class == x)[0])
        use_text = program.describe(int(names.use_op[use]))
        if names.use_op[use] >= len(program.ops) - len(program.results):
            result = int(names.use_op[use]) - len(program.ops) + len(program.results)
            use_text = program.results[result]
    before, after = (
        spec_of(dims, rank, mesh.names, major)
        for dims in (
            (layout.settled[0, c], layout.used[0, x]) if of_use
            else (layout.defined[0, c], layout.settled[0, c])
        )
    )  # fmt: skip
    factors = tuple(
        (label, _factor(plan, maker, a), _factor(plan, user, a) if of_use else "")
        for label, a in zip(labels, axes, strict=True)
    )
    region = row.traffic.term.label == "manual"
    held = [
        (op_class, a)
        for a in axes
        for op_class in dict.fromkeys((maker, user))
        if plan.state[op_class, a] != NONE or region
    ]
    causes = sorted(
        dict.fromkeys(history.cause(op_class, a) for op_class, a in held),
        key=lambda cause: cause.number,
    )
    what = row.traffic.term.label
    return CollectiveExplanation(
        number=number,
        kind=kind,
        axes=labels,
        bytes=row.transfer.bytes,
        count=row.transfer.count,
        seconds=row.transfer.seconds,
        total_seconds=row.transfer.count * row.transfer.seconds,
        algorithm=row.transfer.algorithm,
        what=what,
        value=describe_value(program, value),
        values=len(values),
        definition=describe_value(program, value),
        use=use_text,
        before=before,
        after=after,
        factors=factors,
        causes=tuple(causes),
        why=_why(what, kind, factors, program.kind(program.values[value].op)),
    )


def _factor(plan: Plan, op_class: int, axis: int) -> str:
    """The label of the factor of an op class that holds an axis, or ``""``."""
    factor = int(plan.state[op_class, axis])
    if factor == NONE:
        return ""
    analysis = plan.analysis
    rule = analysis.rules[
        analysis.names.signature[plan.model.space.classes.representative[op_class]]
    ]
    label: str = rule.factors[factor].label
    return label


def _why(what: str, kind: str, factors: tuple[tuple[str, str, str], ...], maker: str) -> str:
    """The cause of a collective of a value that an op of kind ``maker`` defines, in one line."""
    held = ", ".join(f"{_named(definition)} along {axis}" for axis, definition, _ in factors)
    if what == "sum":
        scattered = ", and the sum is scattered" if kind == "reduce_scatter" else ""
        return f"each device has a partial sum over {held}: the parts are added up{scattered}"
    if what == "edges":
        return f"shards of {held} need the edges of their neighbours"
    if what == "ring":
        return f"shards of {held} go around the devices, each of which needs those of others"
    if what == "loop":
        return "the product is computed shard by shard, while other shards are on their way"
    if what == "manual":
        along = ", ".join(axis for axis, _, _ in factors)
        if maker in BOUNDARY:
            return f"a region needs shards in another order of {along} than the plan (shard_map)"
        return f"the program states it in a region that is manual over {along} (shard_map)"
    if what == "order":
        return "an axis that is major to another one is added or removed: shards change places"
    return "; ".join(
        f"along {axis}, the definition shards {_named(definition)} and the use {_named(use)}"
        for axis, definition, use in factors
    )


def _named(label: str) -> str:
    """A factor in a sentence; factors of elementwise ops are numbers of dimensions."""
    return f"dimension {label}" if label.isdigit() else label or "nothing"
