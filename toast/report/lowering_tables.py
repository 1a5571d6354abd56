"""Terminal tables about device-local programs: their collectives beside the predicted ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.text import Text

from toast.lower import LocalCollective, LocalProgram
from toast.paths import folded
from toast.plan import describe_value
from toast.report.titled_tables import MOST_ROWS, add_rest, titled_table
from toast.text_tables import TextTable
from toast.units import size_text, time_text

#: Maximum number of rows with causes.
_CAUSES = 12


def lowering_tables(
    local: LocalProgram,
    predicted: Counter[tuple[str, tuple[str, ...], float]],
    seconds_of: Callable[[LocalCollective], float],
) -> RenderableType:
    """The output of ``toast lower``: collectives in the program and predicted, and their causes.

    :param local: the device-local program.
    :param predicted: the result of :meth:`toast.cost.CostModel.local_collectives` for its plan.
    :param seconds_of: the predicted time of one run of a collective.
    """
    emitted = local.counts()
    columns = "kind", "axes", "bytes", "predicted", "in the program"
    table = titled_table("Collectives of a step", *columns, right=columns[2:])
    keys = sorted({*emitted, *predicted}, key=lambda key: (-key[2] * predicted[key], key))
    for key in keys[:MOST_ROWS]:
        kind, axes, size = key
        table.add_row(
            kind, " x ".join(axes), size_text(size), str(predicted[key]), str(emitted[key])
        )
    add_rest(table, len(keys))
    if not keys:
        verdict = "The plan needs no collectives, and the program has none."
    elif emitted == predicted:
        verdict = (
            f"All {emitted.total():,} collectives are those that the plan predicts: kind, axes, "
            "bytes and count."
        )
    else:
        more, less = (emitted - predicted).total(), (predicted - emitted).total()
        verdict = f"{more:,} collectives are not predicted, and {less:,} predicted ones are absent."
    parts: list[RenderableType] = [table, Text(verdict)] if keys else [Text(verdict)]
    if local.collectives:
        parts += [Text(), _causes(local)]
    if local.gathered:
        parts += [Text(), _gathered(local), Text(_not_in_the_price(local, seconds_of))]
    return Group(*parts)


def _causes(local: LocalProgram) -> TextTable:
    """The largest collectives, with value, op and steps of the plan; alike ones in one row."""
    program = local.program
    columns = "kind", "axes", "bytes", "times", "value", "for", "steps"
    table = titled_table("Largest collectives", *columns, right=("bytes", "times"))
    times: Counter[tuple[str, ...]] = Counter()
    moved: Counter[tuple[str, ...]] = Counter()
    for collective in local.collectives:
        is_result = program.kind(collective.op) == "return"
        row: tuple[str, ...] = (
            collective.kind, " x ".join(collective.axes), size_text(collective.bytes),
            folded(describe_value(program, collective.value)),
            "the result" if is_result else program.describe(collective.op),
            ", ".join(map(str, collective.steps)) or "-",
        )  # fmt: skip
        times[row] += collective.repeats
        moved[row] += int(collective.bytes) * collective.repeats
    for row, _ in moved.most_common(_CAUSES):
        table.add_row(*row[:3], str(times[row]), *row[3:])
    return add_rest(table, len(moved), _CAUSES)


def _not_in_the_price(local: LocalProgram, seconds_of: Callable[[LocalCollective], float]) -> str:
    """The collectives around ops without a local form, which the plan does not predict."""
    added = [collective for collective in local.collectives if collective.gathers]
    if not added:
        return "They need no collectives. The price has their time on shards, not whole."
    size = sum(collective.bytes * collective.repeats for collective in added)
    seconds = sum(seconds_of(collective) * collective.repeats for collective in added)
    count = sum(collective.repeats for collective in added)
    return (
        f"The price does not have their collectives: {count:,} in a step, {size_text(size)}, about "
        f"{time_text(seconds)}; nor the time that the ops take whole."
    )


def _gathered(local: LocalProgram) -> TextTable:
    """The ops without a local form, by kind and factors."""
    columns = "factors", "count", "op"
    title = "Ops without a local form, which run whole along factors"
    table = titled_table(title, *columns, right=("count",))
    first: dict[tuple[str, tuple[str, ...]], int] = {}
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for gathered in local.gathered:
        key = local.program.kind(gathered.op), gathered.factors
        first.setdefault(key, gathered.op)
        counts[key] += 1
    for key, count in counts.most_common(MOST_ROWS):
        table.add_row(", ".join(key[1]), str(count), local.program.describe(first[key]))
    return add_rest(table, len(counts))
