"""Plans, and what is asked of them, as notebooks show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from toast import html
from toast.plan.labels import shown_labels, spec_text
from toast.units import size_text, time_text

if TYPE_CHECKING:
    from toast.plan.alternatives import Alternative, WhyNot
    from toast.plan.diff import Difference, NumberChange
    from toast.plan.explain import ArgumentExplanation, Cause, CollectiveExplanation
    from toast.plan.plan import Plan
    from toast.plan.reapply import Applied


def plan_html(plan: Plan) -> str:
    """Arguments by group, actions with their reasons, predictions and collectives."""
    before, after = plan.before, plan.after
    verdict = "fits" if plan.fits else "does not fit"
    summary = (
        f"step {time_text(after.step_seconds)} (unsharded {time_text(before.step_seconds)}), peak "
        f"{size_text(after.peak_bytes)} of {size_text(plan.memory_bytes)} per device: {verdict}"
    )
    arguments = [
        (
            row.patterns[0] + (f" and {len(row.patterns) - 1} alike" if row.patterns[1:] else ""),
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
    return html.box(
        title,
        html.paragraph(summary),
        html.table(
            "Arguments, by group", ("arguments", "count", "type", "sharding", "bytes per device"),
            arguments, right=("count", "bytes per device"), most=15,
        ),
        html.table(
            "Actions, in order", ("#", "dimensions", "axis", "step", "peak", "why"), actions,
            right=("#", "step", "peak"),
        ),
        html.table(
            "Predicted, per device", ("", "unsharded", "plan"), predicted,
            right=("unsharded", "plan"),
        ),
        html.table(
            "Collectives per step", ("kind", "count", "bytes per device", "time"), collectives,
            right=("count", "bytes per device", "time"),
        ),
    )  # fmt: skip


def applied_html(applied: Applied) -> str:
    """What does not match, above the plan."""
    lines = [*applied.remarks]
    if applied.gone:
        lines.append(f"arguments that the program does not have: {', '.join(applied.gone)}")
    changed = [
        (c.argument, spec_text(c.saved), spec_text(c.applied), c.why) for c in applied.changed
    ]
    new = [(path, spec_text(spec)) for path, spec in applied.new]
    matched = (
        f"{len(applied.matched):,} of {len(applied.plan.analysis.program.arguments):,} arguments "
        f"and {applied.ops_matched:,} of {applied.ops:,} ops match"
    )
    return html.box(
        f"{applied.saved.name}, applied to {applied.plan.analysis.program.name}",
        *map(html.paragraph, [matched, *lines]),
        _some("Sharded otherwise", ("argument", "in the plan", "here", "why"), changed),
        _some("New arguments", ("argument", "sharding"), new),
        plan_html(applied.plan),
    )


def difference_html(difference: Difference) -> str:
    """Tables of what differs."""
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
        ("Other values, by the ops that make them", "op", difference.values),
    )  # fmt: skip
    said = [] if not difference.same else [html.paragraph("The plans are the same.")]
    return html.box(
        f"{both[0]} and {both[1]}",
        *said,
        *(
            _some(caption, (what, *both), [(c.what, c.first, c.second) for c in rows])
            for caption, what, rows in changes
        ),
        _some("Actions", ("only in", "number", "dimensions", "axis", "resolution"), actions),
        _some("Collectives", ("kind", "axes", *sides), collectives, right=sides),
        _numbers(difference.numbers, *both),
    )


def why_not_html(answer: WhyNot) -> str:
    """Why it cannot be, or what it would do, with all else kept and with a search."""
    parts = [html.paragraph(f"now {', '.join(answer.now)}")]
    if answer.impossible:
        parts.append(html.paragraph(f"It cannot be: {answer.impossible}"))
    for caption, side in (
        ("All else as in the plan", answer.kept), ("The best that a search finds", answer.searched),
    ):  # fmt: skip
        if side is not None:
            parts += [html.paragraph(f"{caption}:"), *_alternative(side)]
    return html.box(f"Why not {answer.argument} = {answer.spec}", *parts)


def _alternative(side: Alternative) -> list[str]:
    moved = [
        (word, f"{c.count:.4g}", c.kind, " x ".join(c.axes), c.value, c.use, time_text(c.seconds))
        for word, rows in (("appears", side.appear), ("vanishes", side.vanish)) for c in rows
    ]  # fmt: skip
    return [
        _numbers(side.numbers, "plan", "alternative"),
        _some("Arguments", ("argument", "plan", "alternative"), side.arguments),
        _some("Collectives", ("", "count", "kind", "axes", "value", "use", "time"), moved),
    ]


def argument_html(found: ArgumentExplanation) -> str:
    """What holds each axis, and what keeps the others off."""
    type_ = f"{found.dtype}[{','.join(map(str, found.shape))}]"
    summary = (
        f"{spec_text(found.spec)}: {size_text(found.device_bytes)} of {size_text(found.bytes)} "
        f"per device; of the group {', '.join(found.group)}"
    )
    if found.alike:
        summary += f"; the first of {len(found.alike)} that are sharded alike"
    held = [(str(h.dimension), h.axis, str(h.cause), h.cause.reason) for h in found.held]
    free = [(str(f.dimension), f.axis, f.why) for f in found.free]
    return html.box(
        f"{found.argument} {type_}",
        html.paragraph(summary),
        _some("Sharded along", ("dimension", "axis", "by", "which"), held),
        _some("Not along", ("dimension", "axis", "since"), free),
    )


def collective_html(found: CollectiveExplanation) -> str:
    """What moves, from where to where, and why."""
    lines = [
        f"{found.count:g} of {size_text(found.bytes)} and {time_text(found.seconds)} each, "
        f"{time_text(found.total_seconds)} in all, {found.algorithm}",
        f"of {found.definition}" + (f", for {found.use}" if found.use else ""),
        f"{spec_text(found.before)} to {spec_text(found.after)}: {found.why}",
    ]
    return html.box(
        f"Collective {found.number}: {found.kind} over {' x '.join(found.axes)}",
        *map(html.paragraph, lines),
        _some("By these steps", ("step", "which"), _causes(found.causes)),
    )


def _causes(causes: Iterable[Cause]) -> list[tuple[str, str]]:
    return [(str(cause), cause.reason) for cause in causes]


def _numbers(changes: Iterable[NumberChange], first: str, second: str) -> str:
    texts = {"seconds": time_text, "bytes": size_text}
    rows = [
        (c.what, *(texts.get(c.unit, "{:.4g}".format)(n) for n in (c.first, c.second)))
        for c in changes
    ]
    return _some("Predicted, per device", ("", first, second), rows, right=(first, second))


def _some(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()
) -> str:
    """A table, or nothing where it has no rows."""
    return html.table(caption, columns, rows, right=right, most=15) if rows else ""
