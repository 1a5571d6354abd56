"""Notebook views of records, as HTML."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from toast.analysis import Analysis, Chain, ChainStep, Conflict
from toast.plan import (
    Alternative,
    Applied,
    ArgumentExplanation,
    Cause,
    CollectiveExplanation,
    Difference,
    NumberChange,
    Plan,
    WhyNot,
    fit_text,
    spec_text,
)
from toast.plan.labels import shown_labels
from toast.report import boxes
from toast.report.plan_tables import better_than_plan
from toast.units import size_text, time_text


@functools.singledispatch
def record_html(record: Any) -> str:
    """A record as HTML; raises TypeError for records without a view."""
    raise TypeError(f"notebooks do not show {type(record).__name__}")


@record_html.register
def analysis_html(analysis: Analysis) -> str:
    """The view of an analysis: counts, argument groups, ops without a rule."""
    program = analysis.program
    groups: dict[int, list[int]] = defaultdict(list)
    for argument, group in enumerate(analysis.argument_group.tolist()):
        groups[group].append(argument)
    values = program.argument_values
    rows = [
        (program.arguments[first], str(len(members)), str(program.values[values[first]].type))
        for first, members in groups.items()
    ]
    parts = [
        boxes.table(
            "Counts", ("relation", "count"),
            [(name.replace("_", " "), f"{count:,}") for name, count in analysis.counts().items()],
            right=("count",),
        ),
        boxes.table(
            "Argument groups", ("first of the group", "arguments", "type"), rows,
            right=("arguments",), most=12,
        ),
    ]  # fmt: skip
    if analysis.without_rule:
        ops = [(program.describe(op),) for op in analysis.without_rule]
        parts.append(boxes.table("Ops without a rule (not sharded)", ("op",), ops, most=5))
    return boxes.box(f"Analysis of {program.name}", *parts)


@record_html.register
def chain_html(chain: Chain) -> str:
    """The view of a chain: every step with its rules."""
    return boxes.box(chain.verdict, _steps("Steps", chain.steps))


@record_html.register
def conflict_html(conflict: Conflict) -> str:
    """The view of a conflict: its sites, the two flows, and the compatibility set."""
    one, other = conflict.sides
    sites = [
        (str(s.dimensions[0]), str(s.dimensions[1]), f"{s.op_kind}#{s.op}", str(s.location))
        for s in conflict.sites
    ]
    flows = [
        _steps(f"Flow {number}, from {conflict.source}", flow)
        for number, flow in enumerate(conflict.flows, 1)
    ] or [_steps("From the first to the second", conflict.chain.steps)]
    members = len(conflict.set_members)
    alike = (
        f"Compatibility set {conflict.set} has {members} conflict{'s' * (members != 1)}; "
        f"resolution 0 gives the axis to {one.label}, resolution 1 to {other.label}."
    )
    return boxes.box(
        f"Conflict {conflict.number}: {one.label} and {other.label} have one color",
        boxes.table("They meet at", ("one", "other", "op", "from"), sites, most=8),
        *flows,
        boxes.paragraph(alike),
    )


def _steps(caption: str, steps: Sequence[ChainStep]) -> str:
    rows = [
        (
            str(number), step.kind.replace("_", "-"), str(step.one.dimension),
            str(step.other.dimension), f"{step.other.op_text}, {step.other.where}",
            step.reason or ", ".join(f"{rule.file}:{rule.line}" for rule in step.rules),
        )
        for number, step in enumerate(steps, 1)
    ]  # fmt: skip
    columns = ("#", "by", "from", "to", "as", "rules")
    return boxes.table(caption, columns, rows, right=("#",))


@record_html.register
def plan_html(plan: Plan) -> str:
    """The view of a plan: arguments, actions with reasons, predictions, collectives."""
    before, after = plan.before, plan.after
    verdict = fit_text(plan.fits, after.fit_probability)
    summary = (
        f"step {time_text(after.step_seconds)} (unsharded {time_text(before.step_seconds)}), peak "
        f"{size_text(after.peak_bytes)} of {size_text(plan.memory_bytes)} per device: {verdict}"
    )
    arguments = [
        (
            row.patterns[0] + (f" and {len(row.patterns) - 1} similar" if row.patterns[1:] else ""),
            str(row.count), f"{row.dtype}[{','.join(map(str, row.shape))}]", spec_text(row.spec),
            size_text(row.device_bytes),
        )
        for row in plan.argument_table()
    ]  # fmt: skip
    actions = [
        (
            str(number),
            shown_labels(step.dimensions, 2),
            step.axis, time_text(step.after.step_seconds), size_text(step.after.peak_bytes),
            step.reason,
        )
        for number, step in enumerate(plan.steps, 1)
    ]  # fmt: skip
    predicted = [
        ("step time", time_text(before.step_seconds), time_text(after.step_seconds)),
        ("matrix products", time_text(before.matmul_seconds), time_text(after.matmul_seconds)),
        ("memory traffic", time_text(before.memory_seconds), time_text(after.memory_seconds)),
        ("collectives", time_text(before.collective_seconds), time_text(after.collective_seconds)),
        ("peak memory", size_text(before.peak_bytes), size_text(after.peak_bytes)),
        ("arguments", size_text(before.argument_bytes), size_text(after.argument_bytes)),
    ]
    collectives = [
        (c.kind, str(c.count), size_text(c.bytes), time_text(c.seconds))
        for c in after.collectives if c.count
    ]  # fmt: skip
    title = f"Plan for {plan.analysis.program.name} on mesh {plan.mesh} of {plan.hardware.name}"
    return boxes.box(
        title,
        boxes.paragraph(summary),
        boxes.table(
            "Arguments, by group", ("arguments", "count", "type", "sharding", "bytes per device"),
            arguments, right=("count", "bytes per device"), most=15,
        ),
        boxes.table(
            "Actions, in order", ("#", "dimensions", "axis", "step", "peak", "why"), actions,
            right=("#", "step", "peak"),
        ),
        boxes.table(
            "Predicted, per device", ("", "unsharded", "plan"), predicted,
            right=("unsharded", "plan"),
        ),
        boxes.table(
            "Collectives per step", ("kind", "count", "bytes per device", "time"), collectives,
            right=("count", "bytes per device", "time"),
        ),
    )  # fmt: skip


@record_html.register
def applied_html(applied: Applied) -> str:
    """The view of an applied plan: what does not match, and the plan."""
    lines = [*applied.remarks]
    if applied.gone:
        lines.append(f"arguments missing from the program: {', '.join(applied.gone)}")
    changed = [
        (c.argument, spec_text(c.saved), spec_text(c.applied), c.why) for c in applied.changed
    ]
    new = [(path, spec_text(spec)) for path, spec in applied.new]
    matched = (
        f"{len(applied.matched):,} of {len(applied.plan.analysis.program.arguments):,} arguments "
        f"and {applied.ops_matched:,} of {applied.ops:,} ops match"
    )
    return boxes.box(
        f"{applied.saved.name}, applied to {applied.plan.analysis.program.name}",
        *map(boxes.paragraph, [matched, *lines]),
        _unless_empty("Changed shardings", ("argument", "in the plan", "now", "why"), changed),
        _unless_empty("New arguments", ("argument", "sharding"), new),
        plan_html(applied.plan),
    )


@record_html.register
def difference_html(difference: Difference) -> str:
    """The view of a difference between two plans."""
    both = difference.names
    actions = [
        (
            both[a.second], str(a.number), shown_labels(a.dimensions, 3), a.axis,
            "".join(map(str, a.resolution)),
        )
        for a in difference.actions
    ]  # fmt: skip
    collectives = [
        (
            c.kind, " x ".join(c.axes), *(f"{n:.4g}" for n in c.count), *map(size_text, c.bytes),
            *map(time_text, c.seconds),
        )
        for c in difference.collectives
    ]  # fmt: skip
    sides = tuple(f"{what}, {name}" for what in ("count", "bytes", "time") for name in both)
    changes = (
        ("Settings", "", difference.settings), ("Arguments", "argument", difference.arguments),
        ("Other values, by op", "op", difference.values),
    )  # fmt: skip
    verdict = [boxes.paragraph("The plans are the same.")] if difference.same else []
    return boxes.box(
        f"{both[0]} and {both[1]}",
        *verdict,
        *(
            _unless_empty(caption, (what, *both), [(c.what, c.first, c.second) for c in rows])
            for caption, what, rows in changes
        ),
        _unless_empty(
            "Actions", ("only in", "number", "dimensions", "axis", "resolution"), actions
        ),
        _unless_empty("Collectives", ("kind", "axes", *sides), collectives, right=sides),
        _numbers(difference.numbers, *both),
    )


@record_html.register(WhyNot)
def why_not_html(answer: WhyNot[Plan]) -> str:
    """The view of an alternative: its effect, or the reason why it is impossible."""
    parts = [boxes.paragraph(f"now {', '.join(answer.now)}")]
    if answer.impossible:
        parts.append(boxes.paragraph(f"Impossible: {answer.impossible}"))
    for caption, side in (
        ("Pinned, rest of the plan unchanged", answer.pinned),
        ("Pinned, with a search from there", answer.searched),
    ):  # fmt: skip
        if side is not None:
            parts += [boxes.paragraph(f"{caption}:"), *_alternative(side)]
    parts += map(boxes.paragraph, better_than_plan(answer))
    return boxes.box(f"Why not {answer.argument} = {answer.spec}", *parts)


def _alternative(side: Alternative[Plan]) -> list[str]:
    moved = [
        (word, f"{c.count:.4g}", c.kind, " x ".join(c.axes), c.value, c.use, time_text(c.seconds))
        for word, rows in (("appears", side.appear), ("disappears", side.vanish)) for c in rows
    ]  # fmt: skip
    return [
        _numbers(side.numbers, "plan", "alternative"),
        _unless_empty("Arguments", ("argument", "plan", "alternative"), side.arguments),
        _unless_empty("Collectives", ("", "count", "kind", "axes", "value", "use", "time"), moved),
    ]


@record_html.register
def argument_html(answer: ArgumentExplanation) -> str:
    """The view of an argument: the cause of each axis, and why others do not shard it."""
    type_ = f"{answer.dtype}[{','.join(map(str, answer.shape))}]"
    summary = (
        f"{spec_text(answer.spec)}: {size_text(answer.device_bytes)} of {size_text(answer.bytes)} "
        f"per device; group {', '.join(answer.group)}"
    )
    if answer.alike:
        summary += f"; the first of {len(answer.alike)} arguments with the same sharding"
    held = [(str(h.dimension), h.axis, str(h.cause), h.cause.reason) for h in answer.held]
    free = [(str(f.dimension), f.axis, f.why) for f in answer.free]
    return boxes.box(
        f"{answer.argument} {type_}",
        boxes.paragraph(summary),
        _unless_empty("Sharded along", ("dimension", "axis", "cause", "reason"), held),
        _unless_empty("Not sharded along", ("dimension", "axis", "reason"), free),
    )


@record_html.register
def collective_html(answer: CollectiveExplanation) -> str:
    """The view of a collective: the value that moves, both shardings, and the causes."""
    lines = [
        f"{answer.count:g} of {size_text(answer.bytes)} and {time_text(answer.seconds)} each, "
        f"{time_text(answer.total_seconds)} in total, {answer.algorithm}",
        f"moves {answer.definition}" + (f", for {answer.use}" if answer.use else ""),
        f"{spec_text(answer.before)} to {spec_text(answer.after)}: {answer.why}",
    ]
    return boxes.box(
        f"Collective {answer.number}: {answer.kind} over {' x '.join(answer.axes)}",
        *map(boxes.paragraph, lines),
        _unless_empty("Causes", ("step", "reason"), _causes(answer.causes)),
    )


def _causes(causes: Iterable[Cause]) -> list[tuple[str, str]]:
    return [(str(cause), cause.reason) for cause in causes]


def _numbers(changes: Iterable[NumberChange], first: str, second: str) -> str:
    texts = {"seconds": time_text, "bytes": size_text}
    rows = [
        (c.what, *(texts.get(c.unit, "{:.4g}".format)(n) for n in (c.first, c.second)))
        for c in changes
    ]
    return _unless_empty("Predicted, per device", ("", first, second), rows, right=(first, second))


def _unless_empty(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()
) -> str:
    """A table, or ``""`` if it has no rows."""
    return boxes.table(caption, columns, rows, right=right, most=15) if rows else ""
