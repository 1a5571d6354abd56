"""``toast explain``: why two dimensions have one color, and where they conflict."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toast.cli.common import JsonOption, Source, command, console, group, progress
from toast.cli.plan_file_commands import (
    AnnotationsOption,
    ArgumentOption,
    CollectiveOption,
    WhyNotBudget,
    WhyNotOption,
    WhyNotOutput,
    explain_plan,
    load_plan_and_source,
    plan_with,
)
from toast.errors import ExplainError

if TYPE_CHECKING:
    from toast.analysis import Analysis

app = group("")


@command(app)
def explain(
    source: Source,
    dimensions: Annotated[
        list[str] | None,
        typer.Argument(
            help="Two dimensions, such as \"params['wq']:0\", params.wq:0, result[0]:-1 or %12:1.",
            show_default=False,
        ),
    ] = None,
    conflict: Annotated[
        int | None, typer.Option("--conflict", help="Explain the conflict with this number.")
    ] = None,
    conflicts: Annotated[
        bool, typer.Option("--conflicts", help="List all conflicts with their numbers.")
    ] = False,
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", help="Mesh on which to price both resolutions of the conflict."),
    ] = None,
    axis: Annotated[
        str | None, typer.Option("--axis", help="Mesh axis to price them on; default: each axis.")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help="Device name or hardware file, for use with --mesh.",
            show_default="tpu-v5e",
        ),
    ] = None,
    argument: ArgumentOption = None,
    collective: CollectiveOption = None,
    annotations: AnnotationsOption = False,
    why_not: WhyNotOption = None,
    budget: WhyNotBudget = None,
    output: WhyNotOutput = None,
    json_file: JsonOption = None,
) -> None:
    """Explain two dimensions or a conflict of TARGET, or a plan.

    Two dimensions: why they have one color, or what separates them. To explain a plan, use its file
    as TARGET. If the program of the plan is neither a zoo model nor a file in the same folder, add
    it after the file.

    The chain between two dimensions has one step for each op in which they share a factor (I) and
    for each use of a value (M), with the rule that derives it. If the dimensions have no common
    color, the chain ends at the op that separates them.
    """
    from toast.files import check_writable, is_plan, write_all

    check_writable((json_file, output), ExplainError)
    if output is not None and why_not is None:
        raise ExplainError(f"--output {output}: writes the plan of --why-not; add --why-not")
    asked_of_plan = [
        option for option in (argument, collective, annotations or None, why_not)
        if option is not None
    ]  # fmt: skip
    plan_file = is_plan(source.target)
    if asked_of_plan or plan_file:
        if not plan_file:
            raise ExplainError(
                f"{source.target}: --argument, --collective, --annotations and --why-not need a "
                "plan; use a JSON file written by toast plan --json"
            )
        others = (conflict, mesh, axis, conflicts or None)
        if not asked_of_plan or len(dimensions or ()) > 1 or any(o is not None for o in others):
            raise ExplainError(
                f"{source.target}: is a plan; use --argument, --collective, --annotations or "
                "--why-not, or a TARGET that is not a plan"
            )
        if budget is not None and why_not is None:
            raise ExplainError(f"--budget {budget:g}: needs --why-not; add --why-not")
        applied, program = load_plan_and_source(
            source, *(dimensions or ()), hardware=hardware, module=False
        )
        explain_plan(
            applied.plan, argument=argument, collective=collective, annotations=annotations,
            alternative=why_not, budget=10.0 if budget is None else budget, json_file=json_file,
            output=output,
            replan=functools.partial(plan_with, program, applied.plan),
        )  # fmt: skip
        return
    _check(dimensions, conflict, conflicts, mesh, axis, hardware)
    if budget is not None:
        raise ExplainError(f"--budget {budget:g}: is only for --why-not on a plan; remove --budget")
    from toast import report
    from toast.explain import mirrored

    with progress() as show:
        analysis = source.analysis(show, module=False)
    data: dict[str, Any] = {"version": 1, "program": analysis.program.name}
    shown: list[Any] = []
    if dimensions:
        chain = analysis.explain(*dimensions)
        data["chain"] = dataclasses.asdict(chain)
        data["mirrored"] = mirrored(analysis, chain.one, chain.other)
        shown.append(report.chain_text(chain))
        if data["mirrored"]:
            shown.append(
                "An action on one is still mirrored to the other: arguments of one group are "
                "sharded alike."
            )
    elif conflict is not None:
        shown += _conflict(
            analysis, conflict, mesh, axis, hardware or "tpu-v5e", data, cache=source.cache
        )
    else:
        data["conflicts"] = analysis.conflict.to_dict("records")
        shown.append(report.conflict_list(analysis))
    texts: dict[str | pathlib.Path, str] = {}
    if json_file:
        texts[json_file] = json.dumps(data, indent=2) + "\n"
    write_all(texts, ExplainError)
    for part in shown:
        # Without wrapping, paths can be copied.
        console().print(part, soft_wrap=isinstance(part, str), highlight=False)


def _conflict(
    analysis: Analysis,
    number: int,
    mesh: str | None,
    axis: str | None,
    hardware: str,
    data: dict[str, Any],
    *,
    cache: bool,
) -> list[Any]:
    """Explain a conflict and, with a mesh, price its resolutions; both are added to ``data``."""
    from toast import report

    explanation = analysis.explain_conflict(number)
    data["conflict"] = dataclasses.asdict(explanation)
    shown: list[Any] = [report.conflict_text(explanation)]
    if mesh is not None:
        from toast.explain import resolutions  # imports the cost model

        priced = resolutions(analysis, number, mesh=mesh, hardware=hardware, axis=axis, cache=cache)
        data["priced"] = dataclasses.asdict(priced)
        shown += ["", report.resolution_tables(priced)]
    return shown


def _check(
    dimensions: list[str] | None,
    conflict: int | None,
    conflicts: bool,
    mesh: str | None,
    axis: str | None,
    hardware: str | None,
) -> None:
    """Reject contradictory options before the analysis starts."""
    asked = bool(dimensions) + (conflict is not None) + conflicts
    if asked != 1:
        problem = "several explanations requested" if asked else "nothing to explain"
        raise ExplainError(
            f"{problem}: use either two dimensions (x:0 w:1), --conflict K or --conflicts"
        )
    if dimensions and len(dimensions) != 2:
        raise ExplainError(
            f"{len(dimensions)} dimension{'s' if len(dimensions) > 1 else ''} "
            f"({', '.join(dimensions)}): use exactly two, such as x:0 w:1"
        )
    if mesh is not None and conflict is None:
        raise ExplainError("--mesh prices the resolutions of a conflict; add --conflict K")
    if axis is not None and mesh is None:
        raise ExplainError(f"--axis {axis}: has no effect without a mesh; add --mesh")
    if hardware is not None and mesh is None:
        raise ExplainError(f"--hardware {hardware}: has no effect without a mesh; add --mesh")
