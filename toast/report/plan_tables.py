"""Terminal tables about plans: differences, applied plans, explanations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from toast.paths import folded
from toast.plan import (
    Alternative,
    AnnotationExplanation,
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
from toast.report.summaries import misfit, what_it_takes
from toast.report.titled_tables import MOST_ROWS, add_rest, titled_table
from toast.text_tables import TextTable
from toast.units import listed, size_text, time_text


def _number(value: float, unit: str) -> str:
    return {"seconds": time_text, "bytes": size_text}.get(unit, "{:g}".format)(value)


def _count(count: float) -> str:
    return f"{round(count, 1):g}" if count >= 0.1 else f"{count:.1g}"


def _change(first: float, second: float) -> str:
    if not first or first == second:
        return "" if first == second else "new"
    percent = 100 * (second / first - 1)
    return f"{percent:+.2g} %" if abs(percent) < 10 else f"{percent:+.0f} %"


def _folded(rows: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], int]:
    """Rows with list positions replaced by ``*`` in the first cell, and the number of each."""
    counts: dict[tuple[str, ...], int] = {}
    names: dict[tuple[str, ...], tuple[str, ...]] = {}
    for row in rows:
        key = (folded(row[0]), *row[1:])
        counts[key] = counts.get(key, 0) + 1
        names[key] = row
    return {(names[key] if count == 1 else key): count for key, count in counts.items()}


# -- toast diff ------------------------------------------------------------------------------


def difference_tables(difference: Difference) -> RenderableType:
    """The output of ``toast diff``: only the differences."""
    first, second = difference.names
    if difference.same:
        return Text(f"{first} and {second} are the same")
    if first == second:
        first, second = "first", "second"
    parts: list[RenderableType] = []

    def add(
        title: str, rows: Iterable[tuple[str, ...]], *columns: str, shown: int = MOST_ROWS
    ) -> None:
        listed = list(rows)
        if listed:
            table = titled_table(title, *columns, right=("number",))
            for row in listed[:shown]:
                table.add_row(*(cell or "-" for cell in row))
            parts.append(add_rest(table, len(listed), shown))

    add("Settings", ((c.what, c.first, c.second) for c in difference.settings), "", first, second)
    add(
        "Arguments",
        (
            (name, str(count), was, now)
            for (name, was, now), count in _folded(
                (c.what, c.first, c.second) for c in difference.arguments
            ).items()
        ),
        "argument", "number", first, second,
    )  # fmt: skip
    add(
        "Actions",
        (
            (
                second if a.second else first, str(a.number), shown_labels(a.dimensions, 3), a.axis,
                "".join(map(str, a.resolution)),
            )
            for a in difference.actions
        ),
        "only in", "number", "dimensions", "axis", "resolution",
    )  # fmt: skip
    add(
        "Other values, by op",
        ((c.what, c.first, c.second) for c in difference.values), "op", first, second, shown=8,
    )  # fmt: skip
    add(
        "Collectives",
        (
            (
                c.kind, " x ".join(c.axes), f"{_count(c.count[0])} / {_count(c.count[1])}",
                f"{size_text(c.bytes[0])} / {size_text(c.bytes[1])}",
                f"{time_text(c.seconds[0])} / {time_text(c.seconds[1])}",
            )
            for c in difference.collectives
        ),
        "kind", "axes", "count", "bytes per device", "time",
    )  # fmt: skip
    if difference.numbers:
        parts.append(_numbers("Predicted, per device", difference.numbers, first, second))
    return Group(*parts)


def _numbers(title: str, rows: Sequence[NumberChange], first: str, second: str) -> TextTable:
    table = titled_table(title, "", first, second, "change", right=(first, second, "change"))
    for row in rows:
        table.add_row(
            row.what, _number(row.first, row.unit), _number(row.second, row.unit),
            _change(row.first, row.second),
        )  # fmt: skip
    return table


def _labels(dimensions: Sequence[str]) -> str:
    return listed(dimensions)


# -- toast apply -----------------------------------------------------------------------------


def applied_tables(applied: Applied) -> RenderableType:
    """The output of ``toast apply``: what no longer matches, and both prices."""
    plan, saved = applied.plan, applied.saved
    program = plan.analysis.program
    parts: list[RenderableType] = [
        *misfit(plan),
        Text(
            f"{saved.name} applied to {program.name} on mesh {plan.mesh} of {plan.hardware.name}",
            style="bold",
        ),
    ]
    known = sum(path in saved.arguments for path in applied.matched)
    like = len(applied.matched) - known
    parts.append(Text(
        f"{known} of {len(program.arguments)} arguments match by path"
        f"{f', {like} by group' if like else ''}; "
        f"{applied.ops_matched} of {applied.ops} ops are sharded as in the plan"
    ))  # fmt: skip
    rows: list[tuple[str, ...]] = [(path, "", "missing") for path in applied.gone]
    rows += [(path, spec_text(spec), "new: sharded by the actions")
             for path, spec in applied.new]  # fmt: skip
    rows += [
        (c.argument, spec_text(c.applied), f"{spec_text(c.saved)} in the plan: {c.why}")
        for c in applied.changed
    ]
    if rows:
        table = titled_table("Arguments that do not match", "argument", "number", "sharding", "why",
                       right=("number",))  # fmt: skip
        folded_rows = list(_folded(rows).items())
        for (name, spec, why), count in folded_rows[:MOST_ROWS]:
            table.add_row(name, str(count), spec or "-", why)
        parts.append(add_rest(table, len(folded_rows)))
    parts += [Text(f"no match: {text}") for text in applied.actions_gone]
    table = titled_table("Predicted, per device", "", "in the plan", "now", "change",
                   right=("in the plan", "now", "change"))  # fmt: skip
    was, now = saved.after, plan.after
    for what, unit, first, second in (
        ("step time", "seconds", was.step_seconds, now.step_seconds),
        ("  matrix products", "seconds", was.matmul_seconds, now.matmul_seconds),
        ("  memory traffic", "seconds", was.memory_seconds, now.memory_seconds),
        ("  collectives", "seconds", was.collective_seconds, now.collective_seconds),
        ("peak memory", "bytes", was.peak_bytes, now.peak_bytes),
        ("  arguments", "bytes", was.argument_bytes, now.argument_bytes),
    ):
        table.add_row(what, _number(first, unit), _number(second, unit), _change(first, second))
    before = fit_text(was.peak_bytes <= saved.memory_bytes, was.fit_probability)
    table.add_row("limit", before, fit_text(plan.fits, now.fit_probability), "")
    parts += [table, *what_it_takes(plan)]
    return Group(*parts)


# -- toast explain PLAN ----------------------------------------------------------------------


def argument_explanation(explanation: ArgumentExplanation) -> RenderableType:
    """The output of ``toast explain PLAN --argument``."""
    type_ = f"{explanation.dtype}[{','.join(map(str, explanation.shape))}]"
    lines = [
        f"{explanation.argument} {type_} is sharded {spec_text(explanation.spec)}: "
        f"{size_text(explanation.device_bytes)} of {size_text(explanation.bytes)} per device",
        f"group: {_labels(explanation.group)}",
    ]
    if explanation.alike:
        lines.insert(0, f"first of {len(explanation.alike)} arguments with the same sharding:")
    table = titled_table(f"Mesh axes of {explanation.argument}", "dimension", "axis", "why",
                   right=("dimension",))  # fmt: skip
    for held in explanation.held:
        table.add_row(str(held.dimension), held.axis, _cause(held.cause))
    for free in explanation.free:
        table.add_row(str(free.dimension), free.axis, f"not sharded: {free.why}")
    if explanation.gathered:
        lines.append(explanation.gathered.text)
    if explanation.moved_by:
        numbers = ", ".join(map(str, explanation.moved_by))
        many = len(explanation.moved_by) > 1
        moved = f"collectives {numbers}" if many else f"collective {numbers}"
        lines.append(f"moved by {moved}; see --collective {'N' if many else numbers}")
    return Group(*map(Text, lines), table)


def _cause(cause: Cause) -> str:
    return f"{cause}: {cause.reason}" if cause.reason else str(cause)


def collective_explanation(explanation: CollectiveExplanation) -> RenderableType:
    """The output of ``toast explain PLAN --collective``."""
    what = f"{_count(explanation.count)} {explanation.kind} over {' x '.join(explanation.axes)}"
    title = f"Collective {explanation.number}: {what}"
    table = titled_table(title, "", "")
    seconds = time_text(explanation.seconds)
    each = f"{size_text(explanation.bytes)}, {seconds} by {explanation.algorithm}"
    table.add_row("each", each)
    table.add_row("total", time_text(explanation.total_seconds))
    similar = f", and {explanation.values - 1} similar" if explanation.values > 1 else ""
    table.add_row("value", explanation.value + similar)
    table.add_row("from sharding", spec_text(explanation.before))
    if explanation.use:
        table.add_row("used by", explanation.use)
    table.add_row("to sharding", spec_text(explanation.after))
    table.add_row("why", explanation.why)
    for cause in explanation.causes:
        table.add_row(cause.axis, _cause(cause))
    return Group(table)


def annotations_table(rows: Sequence[AnnotationExplanation]) -> RenderableType:
    """The output of ``toast explain PLAN --annotations``: every annotation of the program."""
    if not rows:
        return Text("the program has no annotations (toast.replicate, toast.split, toast.shard)")
    columns = "annotation", "at", "value", "sharding before", "sharding", "collectives"
    table = titled_table("Annotations in the program", *columns)
    for row in rows[:MOST_ROWS]:
        table.add_row(
            row.call, row.place.partition(" ")[0], row.value, spec_text(row.before),
            spec_text(row.spec), ", ".join(map(str, row.moved_by)) or "-",
        )  # fmt: skip
    return add_rest(table, len(rows))


def collectives_table(rows: Sequence[CollectiveExplanation]) -> RenderableType:
    """A table of all collectives of a plan, by decreasing time."""
    columns = "#", "kind", "axes", "count", "time", "value", "used by"
    table = titled_table("Collectives, by decreasing time", *columns, right=("#", "count", "time"))
    for row in rows[:MOST_ROWS]:
        table.add_row(
            str(row.number), row.kind, " x ".join(row.axes), _count(row.count),
            time_text(row.total_seconds), row.definition, row.use or "-",
        )  # fmt: skip
    return add_rest(table, len(rows))


def why_not_tables(answer: WhyNot[Plan]) -> RenderableType:
    """The output of ``toast explain PLAN --why-not``: the alternative and its differences."""
    title = f"{answer.argument} = {answer.spec} instead of {' or '.join(answer.now)}"
    parts: list[RenderableType] = [Text(title, style="bold")]
    if answer.impossible:
        return Group(*parts, Text(f"impossible: {answer.impossible}"))
    if answer.pinned is not None:
        parts += _alternative("Pinned, rest of the plan unchanged", answer.pinned, answer.plan_cost)
    if answer.searched is answer.pinned and answer.pinned is not None:
        parts.append(Text("A search from there finds no better plan"))
    elif answer.searched is not None:
        title = "Pinned, with a search from there" if answer.pinned else "With a search"
        parts += _alternative(title, answer.searched, answer.plan_cost)
    parts += [Text(line, style="bold") for line in better_than_plan(answer)]
    return Group(*parts)


def better_than_plan(answer: WhyNot[Plan]) -> list[str]:
    """Two lines if an alternative is better than the plan: the costs, and how to keep it."""
    best = answer.best
    if best is None or not answer.better:
        return []
    misfit_note = "" if answer.plan_fits else ", which does not fit" if best.fits else ""
    return [
        f"Better than the plan{misfit_note}: cost {best.cost:.4g}, not {answer.plan_cost:.4g} "
        f"({100 * (best.cost / answer.plan_cost - 1):+.2g} %)",
        "To keep this plan: -o FILE.json, or accept() in Python",
    ]


def _alternative(title: str, other: Alternative[Plan], plan_cost: float) -> list[RenderableType]:
    if not other.numbers and not other.appear and not other.vanish:
        return [Text(f"{title}: no difference in price")]
    parts: list[RenderableType] = [_numbers(title, other.numbers, "plan", "alternative")]
    rows = [("+", row) for row in other.appear] + [("-", row) for row in other.vanish]
    if rows:
        table = titled_table(
            "", "", "collective", "axes", "time", "value", "used by", right=("time",)
        )
        for sign, row in rows[:MOST_ROWS]:
            table.add_row(
                sign + _count(row.count), row.kind, " x ".join(row.axes), time_text(row.seconds),
                row.value, row.use or "-",
            )  # fmt: skip
        parts.append(add_rest(table, len(rows)))
    fits = fit_text(other.fits, other.plan.after.fit_probability)
    parts.append(Text(f"{fits}, cost {other.cost:.4g} (plan: {plan_cost:.4g})"))
    return parts
