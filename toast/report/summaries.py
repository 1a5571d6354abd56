"""Terminal tables of analyses, plans, verifications and comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from toast.analysis import Analysis
from toast.cost import Interval
from toast.cost.error_bars import ODDS, SURE
from toast.hardware import Hardware, Mesh
from toast.plan import (
    Plan,
    fit_text,
    kernel_notes,
    loop_notes,
    memory_advice,
    misfit_note,
    odds_text,
    place_of,
    spec_text,
)
from toast.plan.labels import shown_labels
from toast.program import Choice
from toast.report.fit_tables import remedy_tables
from toast.report.memory import BUFFER_WORDS, peak_groups
from toast.report.price_basis import basis_lines
from toast.report.suggested_rules import suggested_rule
from toast.report.verdict import PlanVerdict, multiple, verdict_of
from toast.text_tables import TextTable
from toast.units import size_text, time_text

if TYPE_CHECKING:
    # These import JAX, which questions about a plan do not need.
    from toast.apply import OutputCheck, Verification
    from toast.evaluation.compare import MethodResult


def _table(title: str, *columns: str, right: Iterable[str] = ()) -> TextTable:
    table = TextTable(title=title, title_justify="left", title_style="bold", header_style="")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _stages(seconds: dict[str, float]) -> Text:
    total = sum(seconds.values())
    parts = ", ".join(f"{stage} {time_text(spent)}" for stage, spent in seconds.items())
    return Text(f"Time: {time_text(total)} ({parts})")


def missing_rules(analysis: Analysis, *, noted: str = "") -> list[str]:
    """Lines for ops without a rule, custom calls, and each loop with an unknown trip count.

    Lines of the note of a plan, ``noted``, are left out.
    """
    lines = [
        *kernel_notes(analysis), *suggested_rule(analysis), *loop_notes(analysis.program)
    ]  # fmt: skip
    return [line for line in lines if line not in noted.splitlines()]


def analysis_table(analysis: Analysis) -> RenderableType:
    """The output of ``toast analyze``: counts of the relations, and the time of each stage."""
    table = _table(f"Analysis of {analysis.program.name}", "relation", "count",
                   right=("count",))  # fmt: skip
    for name, count in analysis.counts().items():
        table.add_row(name.replace("_", " "), f"{count:,}")
    return Group(table, _stages(analysis.seconds))


def plan_tables(plan: Plan, *, remedies: bool = True) -> RenderableType:
    """The output of ``toast plan``: arguments, actions, predictions, collectives, stage times.

    If the plan does not fit, what it takes is the last table, unless ``remedies`` is false.
    """
    program = plan.analysis.program
    title = Text(
        f"Plan for {program.name} on mesh {plan.mesh} of {plan.hardware.name} "
        f"({size_text(plan.memory_bytes)} per device)",
        style="bold",
    )
    how = f"Search: {plan.states} states priced, {len(plan.rounds)} rounds, seed {plan.seed}"
    # What it takes to fit is at the end, in words of the command line.
    missing = misfit_note(plan)
    notes = [note for note in plan.note.splitlines() if note != missing]
    if plan.method != "toast":
        how = f"Method: {', '.join([plan.method, *notes])}"
        notes = []
    shown = plan.steps or plan.method == "toast"
    return Group(
        verdict_line(verdict_of(plan)), *misfit(plan), *advice(plan), title, Text(),
        _arguments(plan),
        *([_actions(plan)] if shown else []),
        _prediction(plan), *_error_notes(plan), _collectives(plan), _memory(plan),
        *map(Text, basis_lines(plan)),
        *([_meshes(plan)] if plan.meshes else []),
        Text(f"{how}, cost {plan.cost:.4g} (unsharded: {plan_cost_before(plan):.4g})"),
        *(Text(f"Note: {note}") for note in notes),
        _stages(plan.seconds), *(what_it_takes(plan) if remedies else []),
    )  # fmt: skip


#: Styles of verdicts.
_GRADES = {"good": "bold green", "doubtful": "bold yellow", "bad": "bold red"}


def verdict_line(verdict: PlanVerdict) -> Text:
    """A verdict in its colour."""
    return Text(str(verdict), style=_GRADES[verdict.grade])


#: What is done to values, as column of advice.
_DONE: dict[Choice, str] = {"recompute": "recompute", "offload": "offload to the host"}

#: Why there is no advice, for a file without debug information.
_NO_PATHS = (
    "Ops of the program have no paths, which tell its passes: write the file with "
    "as_text(debug_info=True) for advice on recomputation."
)

#: Maximum number of values in advice.
_MOST_ADVISED = 12


def advice(plan: Plan) -> list[RenderableType]:
    """What to recompute and offload in a program that is a file, if its plan does not fit."""
    program = plan.analysis.program
    if plan.fits or program.traced or program.memory is not None:
        return []
    if not any(program.location(op).path for op in range(len(program.ops))):
        return [Text(_NO_PATHS), Text()]
    found = memory_advice(plan)
    values = [v for choice in _DONE for v in found.of(choice)] if found else []
    if found is None or not values:
        return []
    table = _table(
        "Recomputation and offload that would help", "", "value", "at", "count",
        "bytes per device", right=("count", "bytes per device"),
    )  # fmt: skip
    for value in values[:_MOST_ADVISED]:
        table.add_row(
            _DONE[value.choice], value.value, value.place or "-", f"{value.count:,}",
            size_text(value.bytes),
        )  # fmt: skip
    if more := values[_MOST_ADVISED:]:
        table.add_row(
            "both", f"{len(more)} more", "", f"{sum(v.count for v in more):,}",
            size_text(sum(v.bytes for v in more)),
        )  # fmt: skip
    line = f"{found.text[0].upper()}{found.text[1:]}. In JAX: jax.checkpoint with a policy."
    return [table, Text(line), Text()]


def misfit(plan: Plan) -> list[Text]:
    """A message if the plan does not fit; otherwise empty.

    What it takes to fit is the last table of a plan (:func:`toast.report.remedy_tables`).
    """
    if plan.fits:
        return []
    peak, limit = plan.needed_bytes(plan.after), plan.memory_bytes
    if plan.after.peak_bytes <= limit:
        message = f"{plan.unsafe_text[0].upper()}{plan.unsafe_text[1:]}"
    else:
        need = f"the plan needs {size_text(peak)} per device"
        if plan.safety is not None:  # then it is a quantile, which the plan may well not need
            need = (
                f"with odds of {100 * plan.safety:g} %, the plan may need up to {size_text(peak)} "
                f"per device (predicted: {size_text(plan.after.peak_bytes)})"
            )
        message = (
            f"Does not fit: {need}, {size_text(peak - limit)} more than the limit of "
            f"{size_text(limit)}"
        )
    return [Text(f"{message}; what it takes is at the end", style="bold red"), Text()]


def what_it_takes(plan: Plan) -> list[RenderableType]:
    """What a plan that does not fit needs, without further plans; otherwise empty."""
    if plan.fits:
        return []
    from toast.fitting import remedies_for  # which makes plans, and so imports JAX

    return [remedy_tables(remedies_for(plan))]


def plan_cost_before(plan: Plan) -> float:
    """The cost of the unsharded program: 1, plus the memory penalty if it does not fit."""
    from toast.cost.model import MEMORY_WEIGHT

    over = max(plan.before.peak_bytes - plan.memory_bytes, 0.0) / max(plan.before.peak_bytes, 1.0)
    return 1.0 + MEMORY_WEIGHT * over


def _arguments(plan: Plan) -> TextTable:
    table = _table(
        "Arguments, by group", "arguments", "count", "shape", "sharding", "bytes per device",
        right=("count", "bytes per device"),
    )  # fmt: skip
    for row in plan.argument_table():
        shape = f"{row.dtype}[{','.join(map(str, row.shape))}]"
        more = len(row.patterns) - 1
        table.add_row(
            row.patterns[0] + (f" and {more} similar" if more else ""),
            str(row.count),
            shape,
            spec_text(row.spec),
            size_text(row.device_bytes),
        )
    return table


def _actions(plan: Plan) -> TextTable:
    table = _table(
        "Actions, in order", "#", "dimensions", "axis", "resolution", "step", "peak", "why",
        right=("#", "step", "peak"),
    )  # fmt: skip
    table.spare("resolution")
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


def _prediction(plan: Plan) -> TextTable:
    table = _table("Predicted, per device", "", "unsharded", "plan", right=("unsharded", "plan"))
    before, after = plan.before, plan.after
    interval = f"  with odds of {odds_text(ODDS)}"
    fits = (
        fit_text(plan.needed_bytes(p) <= plan.memory_bytes, p.fit_probability)
        for p in (before, after)
    )
    rows = (
        ("step time", time_text(before.step_seconds), time_text(after.step_seconds)),
        (interval, *(interval_text(p.step_interval, time_text) for p in (before, after))),
        ("  matrix products", time_text(before.matmul_seconds), time_text(after.matmul_seconds)),
        ("  memory traffic", time_text(before.memory_seconds), time_text(after.memory_seconds)),
        ("  collectives", time_text(before.collective_seconds),
         time_text(after.collective_seconds)),
        ("  overlapped with matrix products", time_text(before.hidden_seconds),
         time_text(after.hidden_seconds)),
        ("peak memory", size_text(before.peak_bytes), size_text(after.peak_bytes)),
        (interval, *(interval_text(p.peak_interval, size_text) for p in (before, after))),
        ("  arguments", size_text(before.argument_bytes), size_text(after.argument_bytes)),
        (f"limit of {size_text(plan.memory_bytes)}", *fits),
    )  # fmt: skip
    for row in rows:
        table.add_row(*row)
    between = sum(reshard.seconds for reshard in plan.step_reshards)
    if between:
        table.add_row("reshard between steps (see note)", "", f"+ {time_text(between)}")
    if plan.bound_seconds > 0:
        ratio = multiple(after.step_seconds / plan.bound_seconds)
        bound = f"{time_text(plan.bound_seconds)}; plan: {ratio}"
        table.add_row("lower bound (roofline, no collectives)", "", bound)
    over_policies = plan.policies_bound_seconds or 0.0
    if 0 < over_policies < math.inf:
        ratio = multiple(after.step_seconds / over_policies)
        bound = f"{time_text(over_policies)}; plan: {ratio}"
        table.add_row("  of every memory policy", "", bound)
    return table


def _error_notes(plan: Plan) -> list[Text]:
    """What intervals stand on, if not on the platform of the plan; and what makes a plan safer."""
    bars, odds = plan.error_bars, plan.after.fit_probability
    lines = [f"Intervals and odds: {bars.basis}"] if bars.borrowed else []
    if plan.fits and plan.safety is None and odds is not None and odds < SURE:
        lines.append(f"For a plan that fits with odds of {odds_text(SURE)}: --safety {SURE:g}")
    return [Text(line) for line in lines]


def interval_text(interval: Interval | None, text: Callable[[float], str]) -> str:
    """The ends of an interval, such as ``12.1 to 13.9 GiB``; the unit once if both have it."""
    if interval is None:
        return "-"
    low, high = map(text, interval)
    same = low.rpartition(" ")[2] == high.rpartition(" ")[2]
    return f"{low.rpartition(' ')[0] if same else low} to {high}"


def _collectives(plan: Plan) -> TextTable:
    table = _table(
        "Collectives per step", "kind", "count", "bytes per device", "time", "algorithms",
        right=("count", "bytes per device", "time"),
    )  # fmt: skip
    table.spare("algorithms")
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
    """The three algorithms with the most time for a kind of collective, with their axes."""
    spent: dict[str, float] = {}
    for transfer in plan.transfers:
        if transfer.kind == kind:
            name = f"{transfer.algorithm} over {' x '.join(transfer.axes)}"
            spent[name] = spent.get(name, 0.0) + transfer.count * transfer.seconds
    return ", ".join(sorted(spent, key=lambda name: -spent[name])[:3]) or "-"


#: Maximum number of groups of values at the peak.
_SHOWN = 12


def _memory(plan: Plan) -> TextTable:
    program, line = plan.analysis.program, plan.timeline
    at = place_of(program, line.peak_op)
    table = _table(
        f"Peak memory: {size_text(line.peak_bytes)}, at {at}",
        "bytes per device", "count", "value", right=("bytes per device", "count"),
    )  # fmt: skip
    table.add_row(size_text(line.argument_bytes), str(len(program.arguments)), "arguments")
    groups = peak_groups(program, line)
    for group in groups[:_SHOWN]:
        table.add_row(
            size_text(group.bytes), str(group.count or "-"), BUFFER_WORDS[group.what] + group.value
        )
    rest = groups[_SHOWN:]
    if rest:
        count = sum(group.count for group in rest)
        table.add_row(size_text(sum(group.bytes for group in rest)), str(count), "smaller values")
    return table


def _meshes(plan: Plan) -> TextTable:
    """All meshes of the search, best first."""
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
            size_text(row.peak_bytes or 0.0), fit_text(bool(row.fits), row.fit_probability),
            "in full" if row.full else "in part",
        )  # fmt: skip
    return table


def _equality(output: OutputCheck) -> str:
    if not output.equal:
        return "NO"
    lost = 1.0 - output.finite
    what = "NaN" if output.nan >= lost - 1e-12 else "NaN or infinite"
    if not output.proves:
        return f"all {what}: inconclusive"
    return f"yes, {max(lost, 0.001):.1%} {what} in both" if lost else "yes"


def verification_table(plan: Plan, verification: Verification) -> RenderableType:
    """The output of ``toast verify``: every output, largest error first, and the collectives."""
    unsharded = "on its own mesh" if plan.shardings.manual_axes else "on one"
    table = _table(
        f"{plan.analysis.program.name} on {plan.mesh.devices} devices and {unsharded}",
        "output", "largest value", "largest error", "relative error", "equal",
        right=("largest value", "largest error", "relative error"),
    )  # fmt: skip
    worst = sorted(verification.outputs, key=lambda o: (o.equal, o.proves, -o.relative_error))
    for output in worst[:12]:
        table.add_row(
            output.path, f"{output.magnitude:.2g}", f"{output.max_abs_error:.2g}",
            f"{output.relative_error:.2g}", _equality(output),
        )  # fmt: skip
    if len(worst) > 12:
        table.add_row(f"... and {len(worst) - 12} more with smaller errors", "", "", "", "")
    kinds = ", ".join(f"{count} {kind}" for kind, count in verification.collectives.items())
    predicted = ", ".join(f"{c.count} {c.kind}" for c in plan.after.collectives if c.count)
    return Group(
        table,
        Text(
            f"Planned with {len(plan.steps)} actions; to shard a small program, the search "
            "assumes no "
            f"link latency and a limit of {size_text(plan.memory_bytes)} per device"
        ),
        Text(f"Collectives in XLA's compiled program: {kinds or 'none'}"),
        Text(f"Collectives predicted: {predicted or 'none'}"),
        Text(str(verification), style="bold"),
    )


def comparison_table(
    analysis: Analysis,
    mesh: Mesh,
    hardware: Hardware,
    memory_bytes: float,
    rows: Sequence[MethodResult],
) -> RenderableType:
    """The output of ``toast compare``: a row per method, with verdicts if requested."""
    timed = any(row.verdict and row.verdict.schedule for row in rows)
    judged = any(row.verdict or row.verdict_error for row in rows)
    ours = next((r.step_seconds for r in rows if r.method == "toast"), math.nan)
    # Constraints can raise a method's bound; the smallest bound holds for all methods.
    bound = min((row.bound_seconds for row in rows if row.bound_seconds > 0), default=0.0)
    numbers = ("step", "XLA step", "vs TOAST", "vs bound", "peak", "search", "states", "cost")
    table = _table(
        f"{analysis.program.name} on mesh {mesh} of {hardware.name} "
        f"({size_text(memory_bytes)} per device), predicted",
        "method", "step", "vs TOAST", "vs bound", "peak", "fits",
        *(("XLA peak",) if judged else ()), *(("XLA step",) if timed else ()),
        "search", "states", "cost", "note",
        right=numbers,
    )  # fmt: skip
    table.spare("search", "states", "cost")
    for row in rows:
        ratio = row.step_seconds / ours
        compiled = row.verdict_error or "-"
        if row.verdict:
            peak = size_text(row.verdict.peak_bytes)
            compiled = f"out of memory, {peak}" if row.verdict.out_of_memory else peak
        if row.error:
            cells = ["-"] * 5
        else:
            cells = [
                time_text(row.step_seconds), "-" if math.isnan(ratio) else f"{ratio:.2f}x",
                multiple(row.step_seconds / bound) if bound else "-",
                size_text(row.peak_bytes), fit_text(row.fits, row.fit_probability),
            ]  # fmt: skip
        rest = ["-", "-"] if row.error else [str(row.states), f"{row.cost:.4g}"]
        table.add_row(
            row.method, *cells, *([compiled] if judged else []),
            *([_step_of(row)] if timed else []), time_text(row.search_seconds), *rest,
            row.error or row.note,
        )  # fmt: skip
    before = sum(spent for stage, spent in analysis.seconds.items() if stage != "lowering")
    least = f"Lower bound (roofline, no collectives): {time_text(bound)}"
    return Group(
        table,
        *([Text(least)] if bound else []),
        Text(f"Analysis before the search, shared by all methods: {time_text(before)}"),
    )


def _step_of(row: MethodResult) -> str:
    """The step of a method's plan by the verdict on it, if that has one."""
    schedule = row.verdict.schedule if row.verdict else None
    return time_text(schedule.seconds) if schedule else "-"
