"""An analysis as notebooks show it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from toast import html

if TYPE_CHECKING:
    from toast.analysis.analysis import Analysis
    from toast.analysis.chains import Chain, Step
    from toast.analysis.collisions import Conflict


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


def chain_html(chain: Chain) -> str:
    """Every step of the chain, with its rules."""
    return html.box(chain.verdict, _steps("Steps", chain.steps))


def conflict_html(conflict: Conflict) -> str:
    """Where the two names meet, the flows that lead there, and what is resolved with them."""
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
    return html.box(
        f"Conflict {conflict.number}: {one.label} and {other.label} have one color",
        html.table("They meet at", ("one", "other", "op", "from"), sites, most=8),
        *flows,
        html.paragraph(alike),
    )


def _steps(caption: str, steps: Sequence[Step]) -> str:
    rows = [
        (
            str(number), step.kind.replace("_", "-"), str(step.one.dimension),
            str(step.other.dimension), f"{step.other.op_text}, {step.other.where}",
            step.reason or ", ".join(f"{rule.file}:{rule.line}" for rule in step.rules),
        )
        for number, step in enumerate(steps, 1)
    ]  # fmt: skip
    columns = ("#", "by", "from", "to", "as", "rules")
    return html.table(caption, columns, rows, right=("#",))
