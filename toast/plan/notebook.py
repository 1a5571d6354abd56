"""A plan as notebooks show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toast import html
from toast.plan.labels import shown_labels, spec_text
from toast.units import size_text, time_text

if TYPE_CHECKING:
    from toast.plan.plan import Plan


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
