"""Analyses, plans and verifications as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from toast.analysis import Analysis
from toast.apply import OutputCheck, Verification
from toast.compare import Compared
from toast.hardware import Hardware, Mesh
from toast.plan import Plan, describe_value, place_of, spec_text
from toast.plan.labels import shown_labels
from toast.tables import Table
from toast.units import size_text, time_text

#: Ops without a rule that are named one by one; the rest are counted.
_NAMED_OPS = 5


def _table(title: str, *columns: str, right: Iterable[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _stages(seconds: dict[str, float]) -> Text:
    total = sum(seconds.values())
    parts = ", ".join(f"{stage} {time_text(spent)}" for stage, spent in seconds.items())
    return Text(f"Time: {time_text(total)} ({parts})")


def missing_rules(analysis: Analysis) -> list[str]:
    """One line per op that no rule knows, and what was done about it."""
    ops = analysis.without_rule
    lines = [
        f"no rule for {analysis.program.describe(op)}: its dimensions stay whole"
        for op in ops[:_NAMED_OPS]
    ]
    if len(ops) > _NAMED_OPS:
        lines.append(f"... and {len(ops) - _NAMED_OPS} more ops without a rule")
    places = {str(analysis.program.location(op)) for op in analysis.uncounted_loops}
    lines += [f"trip count unknown: the loop at {place} counts once" for place in sorted(places)]
    return lines


def analysis_table(analysis: Analysis) -> RenderableType:
    """What ``toast analyze`` prints."""
    table = _table(f"Analysis of {analysis.program.name}", "relation", "count",
                   right=("count",))  # fmt: skip
    for name, count in analysis.counts().items():
        table.add_row(name.replace("_", " "), f"{count:,}")
    return Group(table, _stages(analysis.seconds))


def plan_tables(plan: Plan) -> RenderableType:
    """What ``toast plan`` prints: arguments, actions, prediction, collectives, stage times."""
    program = plan.analysis.program
    title = Text(
        f"Plan for {program.name} on mesh {plan.mesh} of {plan.hardware.name} "
        f"({size_text(plan.memory_bytes)} per device)",
        style="bold",
    )
    how = f"Search: {plan.states} states priced, {len(plan.rounds)} rounds, seed {plan.seed}"
    notes = plan.note.splitlines()
    if plan.method != "toast":
        how = f"Method: {', '.join([plan.method, *notes])}"
        notes = []
    shown = plan.steps or plan.method == "toast"
    return Group(
        title, Text(), _arguments(plan), *([_actions(plan)] if shown else []),
        _prediction(plan), _collectives(plan), _memory(plan),
        *([_meshes(plan)] if plan.meshes else []),
        Text(f"{how}, cost {plan.cost:.4g} (unsharded: {plan_cost_before(plan):.4g})"),
        *(Text(f"Note: {note}") for note in notes),
        _stages(plan.seconds),
    )  # fmt: skip


def plan_cost_before(plan: Plan) -> float:
    """C of the unsharded program: 1, plus the memory penalty if it does not fit."""
    from toast.cost.model import MEMORY_WEIGHT

    over = max(plan.before.peak_bytes - plan.memory_bytes, 0.0) / max(plan.before.peak_bytes, 1.0)
    return 1.0 + MEMORY_WEIGHT * over


def _arguments(plan: Plan) -> Table:
    table = _table(
        "Arguments, by group", "arguments", "count", "shape", "sharding", "bytes per device",
        right=("count", "bytes per device"),
    )  # fmt: skip
    for row in plan.argument_table():
        shape = f"{row.dtype}[{','.join(map(str, row.shape))}]"
        more = len(row.patterns) - 1
        table.add_row(
            row.patterns[0] + (f" and {more} alike" if more else ""),
            str(row.count),
            shape,
            spec_text(row.spec),
            size_text(row.device_bytes),
        )
    return table


def _actions(plan: Plan) -> Table:
    table = _table(
        "Actions, in order", "#", "dimensions", "axis", "resolution", "step", "peak", "why",
        right=("#", "step", "peak"),
    )  # fmt: skip
    for number, step in enumerate(plan.steps, 1):
        label = shown_labels(step.dimensions, 2) or "intermediate values only"
        label = f"only {label}" if step.part else label
        table.add_row(
            str(number), label, step.axis,
            "".join(map(str, step.resolution)) or "-",
            time_text(step.after.step_seconds), size_text(step.after.peak_bytes),
            step.reason,
        )  # fmt: skip
    return table


def _prediction(plan: Plan) -> Table:
    table = _table("Predicted, per device", "", "unsharded", "plan", right=("unsharded", "plan"))
    before, after = plan.before, plan.after
    rows = (
        ("step time", time_text(before.step_seconds), time_text(after.step_seconds)),
        ("  matrix products", time_text(before.matmul_seconds), time_text(after.matmul_seconds)),
        ("  memory traffic", time_text(before.memory_seconds), time_text(after.memory_seconds)),
        ("  collectives", time_text(before.collective_seconds),
         time_text(after.collective_seconds)),
        ("  hidden behind products", time_text(before.hidden_seconds),
         time_text(after.hidden_seconds)),
        ("peak memory", size_text(before.peak_bytes), size_text(after.peak_bytes)),
        ("  arguments", size_text(before.argument_bytes), size_text(after.argument_bytes)),
        ("fits", *("yes" if p.peak_bytes <= plan.memory_bytes else "no" for p in (before, after))),
    )  # fmt: skip
    for row in rows:
        table.add_row(*row)
    if plan.bound_seconds > 0:
        over = _over(after.step_seconds, plan.bound_seconds)
        bound = f"{time_text(plan.bound_seconds)}, plan within {over}"
        table.add_row("lower bound (roofline, no collectives)", "", bound)
    return table


def _collectives(plan: Plan) -> Table:
    table = _table(
        "Collectives per step", "kind", "count", "bytes per device", "time", "algorithms",
        right=("count", "bytes per device", "time"),
    )  # fmt: skip
    for collective in plan.after.collectives:
        if collective.count:
            table.add_row(
                collective.kind, str(collective.count), size_text(collective.bytes),
                time_text(collective.seconds), _algorithms(plan, collective.kind),
            )  # fmt: skip
    if not table.row_count:
        table.add_row("none", "0", "0 B", "0 us", "-")
    return table


def _algorithms(plan: Plan, kind: str) -> str:
    """The algorithms of a kind of collective by the time spent in them, with their axes."""
    spent: dict[str, float] = {}
    for transfer in plan.transfers:
        if transfer.kind == kind:
            name = f"{transfer.algorithm} over {' x '.join(transfer.axes)}"
            spent[name] = spent.get(name, 0.0) + transfer.count * transfer.seconds
    return ", ".join(sorted(spent, key=lambda name: -spent[name])[:3]) or "-"


_WHAT = {
    "value": "", "copy": "resharded ", "sum": "sum over devices of ",
    "second": "second buffer of ",
}  # fmt: skip

#: Values at the peak that are shown.
_SHOWN = 6


def _memory(plan: Plan) -> Table:
    program, line = plan.analysis.program, plan.timeline
    at = place_of(program, line.peak_op)
    table = _table(
        f"Memory at its peak, {size_text(line.peak_bytes)}, at {at}",
        "bytes per device", "value", right=("bytes per device",),
    )  # fmt: skip
    table.add_row(size_text(line.argument_bytes), "arguments")
    buffers = line.at_peak
    for buffer in buffers[:_SHOWN]:
        made = describe_value(program, buffer.value)
        table.add_row(size_text(buffer.bytes), _WHAT[buffer.what] + made)
    if len(buffers) > _SHOWN:
        rest = sum(buffer.bytes for buffer in buffers[_SHOWN:])
        table.add_row(size_text(rest), f"... and {len(buffers) - _SHOWN} more")
    return table


def _meshes(plan: Plan) -> Table:
    """Every mesh that was tried, the best first."""
    table = _table(
        f"Meshes of {plan.mesh.devices} devices",
        "mesh", "cost", "step", "peak", "fits", "searched",
        right=("cost", "step", "peak"),
    )  # fmt: skip
    for row in sorted(plan.meshes, key=lambda tried: tried.order):
        if row.skipped:
            table.add_row(str(row.mesh), "-", "-", "-", "-", row.skipped)
            continue
        table.add_row(
            str(row.mesh), f"{row.cost or 0.0:.4g}", time_text(row.step_seconds or 0.0),
            size_text(row.peak_bytes or 0.0), "yes" if row.fits else "no",
            "in full" if row.full else "in part",
        )  # fmt: skip
    return table


def _equality(output: OutputCheck) -> str:
    if not output.equal:
        return "NO"
    if not output.proves:
        return "all NaN: proves nothing"
    return f"yes, {max(output.nan, 0.001):.1%} NaN in both" if output.nan else "yes"


def verification_table(plan: Plan, verification: Verification) -> RenderableType:
    """What ``toast verify`` prints: every output, worst first, and the collectives."""
    table = _table(
        f"{plan.analysis.program.name} on {plan.mesh.devices} devices against one",
        "output", "largest error", "relative error", "equal",
        right=("largest error", "relative error"),
    )  # fmt: skip
    worst = sorted(verification.outputs, key=lambda o: (o.equal, o.proves, -o.relative_error))
    for output in worst[:12]:
        table.add_row(
            output.path, f"{output.max_abs_error:.2g}", f"{output.relative_error:.2g}",
            _equality(output),
        )  # fmt: skip
    if len(worst) > 12:
        table.add_row(f"... and {len(worst) - 12} more, all no worse", "", "", "")
    kinds = ", ".join(f"{count} {kind}" for kind, count in verification.collectives.items())
    predicted = ", ".join(f"{c.count} {c.kind}" for c in plan.after.collectives if c.count)
    equal = sum(output.equal for output in verification.outputs)
    empty = sum(output.equal and not output.proves for output in verification.outputs)
    proven = f", {empty} of them all NaN, which proves nothing" if empty else ""
    return Group(
        table,
        Text(
            f"Planned with {len(plan.steps)} actions, without link latency and for "
            f"{size_text(plan.memory_bytes)} per device, so that a small program is sharded too"
        ),
        Text(f"Collectives in XLA's compiled program: {kinds or 'none'}"),
        Text(f"Collectives predicted: {predicted or 'none'}"),
        Text(f"{equal} of {len(verification.outputs)} outputs equal{proven}", style="bold"),
    )


def _over(seconds: float, bound: float) -> str:
    """How much more a step takes than it takes at least."""
    over = max(0.0, 100 * (seconds / bound - 1))
    return f"{over:,.{int(over < 10)}f} %"


def comparison_table(
    analysis: Analysis,
    mesh: Mesh,
    hardware: Hardware,
    memory_bytes: float,
    rows: Sequence[Compared],
) -> RenderableType:
    """What ``toast compare`` prints: a row per method, and what the judge says where asked."""
    judged = any(row.verdict or row.verdict_error for row in rows)
    ours = next((r.step_seconds for r in rows if r.method == "toast"), math.nan)
    # Of methods that hold constraints more is known; but one number is for all.
    bound = min((row.bound_seconds for row in rows if row.bound_seconds > 0), default=0.0)
    numbers = ("step", "of TOAST's", "over bound", "peak", "search", "states", "cost")
    table = _table(
        f"{analysis.program.name} on mesh {mesh} of {hardware.name} "
        f"({size_text(memory_bytes)} per device), predicted",
        "method", "step", "of TOAST's", "over bound", "peak", "fits",
        *(("XLA says",) if judged else ()), "search", "states", "cost", "note",
        right=numbers,
    )  # fmt: skip
    for row in rows:
        ratio = row.step_seconds / ours
        said = row.verdict_error or "-"
        if row.verdict:
            peak = size_text(row.verdict.peak_bytes)
            said = f"out of memory, {peak}" if row.verdict.out_of_memory else peak
        if row.error:
            cells = ["-"] * 5
        else:
            cells = [
                time_text(row.step_seconds), "-" if math.isnan(ratio) else f"{ratio:.2f}x",
                _over(row.step_seconds, bound) if bound else "-",
                size_text(row.peak_bytes), "yes" if row.fits else "OOM",
            ]  # fmt: skip
        rest = ["-", "-"] if row.error else [str(row.states), f"{row.cost:.4g}"]
        table.add_row(
            row.method, *cells, *([said] if judged else []),
            time_text(row.search_seconds), *rest, row.error or row.note,
        )  # fmt: skip
    before = sum(spent for stage, spent in analysis.seconds.items() if stage != "lowering")
    least = f"Lower bound (roofline, no collectives): {time_text(bound)}"
    return Group(
        table,
        *([Text(least)] if bound else []),
        Text(f"Before any search: analysis, {time_text(before)}, for all methods"),
    )
