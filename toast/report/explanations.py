"""Explanations as text: chains of dimensions, conflicts, and the prices of resolutions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from toast.analysis import Analysis, Chain, ChainStep, Conflict, Place, RuleLine, Site
from toast.program import Location
from toast.text_tables import TextTable
from toast.units import listed, size_text, time_text

if TYPE_CHECKING:
    from toast.explain import Priced
    from toast.plan import Prediction

#: Maximum number of conflicts that are listed; the rest are counted.
_LISTED = 12

_LETTERS = {"identity": "I", "def_use": "M", "loop": "loop", "donation": "same", "apart": "apart"}

_ROLES = {
    "reduction": "reduced over", "need_replication": "not shardable",
    "permutation": "sharded with an exchange",
}  # fmt: skip


def chain_text(chain: Chain) -> str:
    """The output of ``toast explain TARGET ONE OTHER``: every dimension and every step."""
    verdict = chain.verdict + ":" * (chain.tied and bool(chain.steps))
    return "\n".join([verdict, *_ladder(chain.steps)])


def _ladder(steps: Iterable[ChainStep]) -> Iterator[str]:
    """Alternating lines of dimensions and steps."""
    shown, last = "", -1
    for number, step in enumerate(steps, 1):
        if not shown:
            shown, last = str(step.one.dimension), step.one.op
            yield f"        {shown}  {_end(step.one)}{_at(step.one)}"
        here = step.other if step.other.op != last else None
        last = step.other.op
        why = _why(step) + (_at(here) if here else "")
        yield f"{number:4}  {_LETTERS[step.kind]:5} {why}  [{_rules(step.rules)}]"
        if str(step.other.dimension) != shown:
            shown = str(step.other.dimension)
            yield f"        {shown}"


def _why(step: ChainStep) -> str:
    one, other = step.one, step.other
    if step.kind == "identity":
        role = "" if one.role == "pass_through" else f", {_ROLES[one.role]}"
        return f"factor {one.factor} of {one.op_text}{role}: {one.where} is {other.where}"
    if step.kind == "def_use":
        return _end(other)
    if step.kind == "loop":
        return f"around the loop: {one.op_text} and {other.op_text} share factor {one.factor}"
    if step.kind == "donation":
        ends = sorted((one, other), key=lambda place: place.op_kind != "return")
        return f"{ends[0].op_text} overwrites the donated {ends[1].op_text}"
    factors = f"factors {one.factor} and {other.factor} of {one.op_text}"
    return f"{factors}: {one.where} is not {other.where}: {step.reason}"


def _end(place: Place) -> str:
    """The end of a step between a definition and a use."""
    if place.op_kind == "argument":
        return f"defined by {place.op_text}"
    if place.op_kind == "return":
        return f"returned by {place.op_text}"
    how = "used" if place.tensor.startswith("operand") else "defined"
    return f"{how} by {place.op_text}, {place.where.partition(' dimension')[0]}"


def _at(place: Place | Site) -> str:
    where = _where(place.location)
    return f" at {where}" if where else ""


def _where(location: Location) -> str:
    """A place in the user's code, or ``""`` if it is unknown."""
    return str(location) if location.file or location.path else ""


def _rules(rules: Iterable[RuleLine]) -> str:
    """Files and lines of rules: ``rules/ops/dot.lp:37, 38``."""
    by_file: dict[str, list[str]] = {}
    for rule in rules:
        by_file.setdefault(rule.file, []).append(str(rule.line))
    return "; ".join(f"{file}:{', '.join(lines)}" for file, lines in by_file.items())


def conflict_text(conflict: Conflict) -> str:
    """The output of ``toast explain TARGET --conflict K``, without prices."""
    one, other = conflict.sides
    lines = [f"Conflict {conflict.number}: {one.label} and {other.label} have one color", ""]
    lines.append("They meet where one mesh axis cannot shard both:")
    for site in conflict.sites:
        what = "defined by" if site.kind == "def" else "used by"
        first, second = site.dimensions
        lines.append(f"    {first.label} and {second}, {what} {site.op_kind}#{site.op}{_at(site)}")
    ends = conflict.sites[0].dimensions
    for number, (flow, end) in enumerate(zip(conflict.flows, ends, strict=False), 1):
        lines += ["", f"Flow {number}, from {conflict.source} to {end.label}:", *_ladder(flow)]
    if not conflict.flows:
        lines += ["", f"From {ends[0]} to {ends[1].label}:", *_ladder(conflict.chain.steps)]
    lines += ["", "Boxes (conflicts that are resolved together):"]
    for neighbour in conflict.neighbours:
        pairs = ", ".join(f"{mine} goes with {theirs}" for mine, theirs in neighbour.pairs)
        crossed = (
            "; a path crosses the box, so they are not compatible" if neighbour.crossed else ""
        )
        lines.append(f"    conflict {neighbour.number}: {pairs}{crossed}")
    if not conflict.neighbours:
        lines.append("    none")
    members, sets = conflict.set_members, conflict.group_sets
    lines += [
        "",
        f"Compatibility set {conflict.set}: {_numbers('conflict', members)}",
        f"Resolution group {conflict.group}: {_numbers('set', sets)}",
        *(
            f"Resolution {bit}: the axis goes to {side.label}"
            for bit, side in enumerate(conflict.sides)
        ),
    ]
    return "\n".join(lines)


def _numbers(what: str, numbers: tuple[int, ...]) -> str:
    shown = listed([*map(str, numbers)], _LISTED)
    return f"{what}{'' if len(numbers) == 1 else 's'} {shown}"


def resolution_tables(priced: Priced) -> RenderableType:
    """A table of the prices of both resolutions of a conflict."""
    table = TextTable(
        title=f"Both resolutions on mesh {priced.mesh} of {priced.hardware}, rest unsharded",
        title_justify="left", title_style="bold", header_style="",
    )  # fmt: skip
    for column in ("axis", "resolution", "selects", priced.tensor, "step", "peak", "collectives"):
        table.add_column(
            column, overflow="fold", justify="right" if column in ("step", "peak") else "left"
        )
    table.add_row("-", "-", "-", "P()", *_costs(priced.unsharded))
    for row in priced.resolutions:
        table.add_row(
            row.axis, str(row.resolution), row.picks, row.sharding,
            *_costs(row.prediction),
        )  # fmt: skip
    notes = [f"Axis {axis} divides no dimension of this color." for axis in priced.useless_axes]
    return Group(table, *map(Text, notes))


def _costs(prediction: Prediction) -> tuple[str, str, str]:
    moved = [f"{c.count} {c.kind} ({time_text(c.seconds)})" for c in prediction.collectives
             if c.count]  # fmt: skip
    return (
        time_text(prediction.step_seconds),
        size_text(prediction.peak_bytes),
        ", ".join(moved) or "none",
    )


def conflict_list(analysis: Analysis) -> RenderableType:
    """The output of ``toast explain TARGET --conflicts``."""
    if not analysis.resolutions:
        return Text(
            f"{analysis.program.name} has no conflicts: no value has two dimensions of one color"
        )
    table = TextTable(
        title=f"Conflicts of {analysis.program.name}",
        title_justify="left", title_style="bold", header_style="",
    )  # fmt: skip
    for column in ("conflict", "names", "at", "set", "group"):
        right = column in ("conflict", "set", "group")
        table.add_column(column, overflow="fold", justify="right" if right else "left")
    for number, resolution in enumerate(analysis.resolutions):
        op = int(analysis.names.name_op[resolution.names[0]])
        labels = ", ".join(map(analysis.name_label, resolution.names))
        table.add_row(
            str(number), labels, _where(analysis.program.location(op)),
            str(resolution.set), str(resolution.group),
        )  # fmt: skip
    return table
