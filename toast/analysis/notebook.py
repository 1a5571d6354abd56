"""An analysis as notebooks show it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from toast import html

if TYPE_CHECKING:
    from toast.analysis.analysis import Analysis


def analysis_html(analysis: Analysis) -> str:
    """Counts, argument groups, and what no rule knows."""
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
        html.table(
            "Counts", ("relation", "count"),
            [(name.replace("_", " "), f"{count:,}") for name, count in analysis.counts().items()],
            right=("count",),
        ),
        html.table(
            "Argument groups", ("first of the group", "arguments", "type"), rows,
            right=("arguments",), most=12,
        ),
    ]  # fmt: skip
    if analysis.without_rule:
        ops = [(program.describe(op),) for op in analysis.without_rule]
        parts.append(html.table("Ops that no rule knows stay whole", ("op",), ops, most=5))
    return html.box(f"Analysis of {program.name}", *parts)
