"""``toast explain``: why two dimensions are one, and where they conflict."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toast.cli.common import JsonOption, Source, command, console, group, progress
from toast.cli.plans import (
    ArgumentOption,
    CollectiveOption,
    WhyNotBudget,
    WhyNotOption,
    explain_plan,
    load_plan,
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
            help="Two dimensions: \"params['wq']:0\", params.wq:0, result[0]:-1 or %12:1.",
            show_default=False,
        ),
    ] = None,
    conflict: Annotated[
        int | None, typer.Option("--conflict", help="Explain a conflict, by its number.")
    ] = None,
    conflicts: Annotated[
        bool, typer.Option("--conflicts", help="List all conflicts with their numbers.")
    ] = False,
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", help="Price both resolutions of the conflict on this mesh."),
    ] = None,
    axis: Annotated[
        str | None, typer.Option("--axis", help="Price them along this axis; else along each.")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help="Of --mesh: a name or the path of a hardware file.",
            show_default="tpu-v5e",
        ),
    ] = None,
    argument: ArgumentOption = None,
    collective: CollectiveOption = None,
    why_not: WhyNotOption = None,
    budget: WhyNotBudget = None,
    json_file: JsonOption = None,
) -> None:
    """Explain why two dimensions of TARGET are sharded alike, one of its conflicts, or a plan.

    A plan is a file that toast plan --json wrote, in place of TARGET; it says itself which TARGET
    it was made from, unless one is named behind it.

    The chain between two dimensions has a step for each op that gives both one factor (I), and for
    each use of a value (M), with the rule that says so; or it ends at the op that keeps them apart.
    """
    from toast.files import check_writable, is_plan, write_all

    check_writable((json_file,), ExplainError)
    asked_of_plan = [option for option in (argument, collective, why_not) if option is not None]
    plan_file = is_plan(source.target)
    if asked_of_plan or plan_file:
        if not plan_file:
            raise ExplainError(
                f"{source.target}: --argument, --collective and --why-not ask a plan; give the "
                "JSON file that toast plan --json wrote"
            )
        others = (conflict, mesh, axis, conflicts or None)
        if not asked_of_plan or len(dimensions or ()) > 1 or any(o is not None for o in others):
            raise ExplainError(
                f"{source.target}: ask a plan with --argument, --collective or --why-not; "
                "dimensions and conflicts are those of a TARGET"
            )
        if hardware is not None:
            raise ExplainError(
                f"--hardware {hardware}: a plan is explained on its own; toast apply prices it on "
                "other hardware"
            )
        if budget is not None and why_not is None:
            raise ExplainError(f"--budget {budget:g}: only --why-not searches; give it as well")
        applied = load_plan(source, *(dimensions or ()), module=False)
        explain_plan(
            applied.plan, argument=argument, collective=collective, alternative=why_not,
            budget=10.0 if budget is None else budget, json_file=json_file,
        )  # fmt: skip
        return
    _check(dimensions, conflict, conflicts, mesh, axis, hardware)
    if budget is not None:
        raise ExplainError(f"--budget {budget:g}: of --why-not, which asks a plan; leave it out")
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
                "An action on one is mirrored to the other all the same: arguments that are used "
                "alike are sharded alike."
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
        # Paths stay whole, so that they can be copied.
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
    """A conflict, and what resolving it costs where a mesh is given; ``data`` gets both."""
    from toast import report

    found = analysis.explain_conflict(number)
    data["conflict"] = dataclasses.asdict(found)
    shown: list[Any] = [report.conflict_text(found)]
    if mesh is not None:
        from toast.explain import resolutions  # which needs the cost model

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
    """Complain before the long work where options do not go together."""
    asked = bool(dimensions) + (conflict is not None) + conflicts
    if asked != 1:
        given = "several things" if asked else "nothing"
        raise ExplainError(
            f"{given} to explain: give either two dimensions (x:0 w:1), or --conflict K, or "
            "--conflicts"
        )
    if dimensions and len(dimensions) != 2:
        raise ExplainError(
            f"{len(dimensions)} dimension{'s' if len(dimensions) > 1 else ''} given "
            f"({', '.join(dimensions)}): a chain has two ends; give two, such as x:0 w:1"
        )
    if mesh is not None and conflict is None:
        raise ExplainError("--mesh prices the resolutions of a conflict; give --conflict K as well")
    if axis is not None and mesh is None:
        raise ExplainError(f"--axis {axis}: an axis of which mesh? give --mesh as well")
    if hardware is not None and mesh is None:
        raise ExplainError(
            f"--hardware {hardware}: prices the resolutions of a conflict on a mesh; give --mesh "
            "as well"
        )
