"""``toast report``."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toast.cli.common import (
    HardwareOption,
    JsonOption,
    LimitOption,
    MemoryOption,
    SafetyOption,
    SeedOption,
    Source,
    SourcesOption,
    TraceOption,
    command,
    command_line,
    group,
    progress,
    warn,
)
from toast.cli.json_files import write_json
from toast.cli.plan_file_commands import (
    ProgramArgument,
    load_plan_and_source,
    policy_plans,
)

if TYPE_CHECKING:
    from toast.evaluation.compare import MethodResult
    from toast.plan import Plan

app = group("")


@command(app)
def report(
    context: typer.Context,
    source: Source,
    program: ProgramArgument = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            help="Mesh axes and sizes: data=4,model=4; append @model,data to make data the "
            "innermost axis. Axes slice, dcn and dcn_* go over the network that joins slices. "
            "A plan has its own mesh.",
        ),
    ] = None,
    output: Annotated[
        pathlib.Path, typer.Option("-o", "--output", help="HTML file to write.")
    ] = pathlib.Path("report.html"),
    hardware: HardwareOption = "tpu-v5e",
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help="Comma-separated methods to compare, as for toast compare: toast,manual,alpa.",
        ),
    ] = "toast",
    limit: LimitOption = 60.0,
    memory: MemoryOption = None,
    safety: SafetyOption = None,
    seed: SeedOption = 0,
    sources: SourcesOption = None,
    trace: TraceOption = None,
    json_file: JsonOption = None,
    beside: Annotated[
        list[pathlib.Path] | None,
        typer.Option(
            "--beside",
            help="Show another plan of the program beside it: a file of toast plan --json; "
            "repeatable.",
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="DIMENSION=NAME",
            help="Name the color of a dimension: tokens:0=batch; * matches any text; repeatable. "
            "Names of common arguments are known.",
        ),
    ] = None,
) -> None:
    """Plan TARGET and write an HTML report that opens offline.

    If TARGET is a plan file, the report describes that plan, and there is no search. If the program
    of the plan is neither a zoo model nor a file in the same folder, add it after the file.

    The report shows the arguments with their shardings, the actions with their reasons, the time
    and memory of each part, the conflicts, and every op with its source line. --methods and
    --beside add the plans of other methods and earlier plans, with what differs.
    """
    from toast import report as reports
    from toast.errors import PlanError
    from toast.evaluation import compare as stage
    from toast.files import check_writable, is_plan, write_all
    from toast.hardware import Mesh, load
    from toast.search import Settings

    named = reports.parse_names(name)
    check_writable((output, trace, json_file), PlanError)
    if is_plan(source.target):
        _refuse(context, source.target)
        own = context.get_parameter_source("hardware")
        chosen = hardware if own and own.name == "COMMANDLINE" else None
        applied, found = load_plan_and_source(source, program, hardware=chosen)
        # The page does not show the error stream.
        note = "; ".join(filter(None, (applied.plan.note, *applied.remarks)))
        plan = dataclasses.replace(applied.plan, note=note)
        with progress() as show:
            policies = policy_plans(found, plan, show)
            others = _earlier(beside, plan, show)
        compared = [stage.MethodResult.of("this plan", plan), *others] if others else ()
        page = reports.html_text(
            plan, compared, sources=sources, policies=policies,
            origin=reports.PageOrigin(command_line()), names=named,
        )  # fmt: skip
        write_all({output: page, **_traced(trace, plan)}, PlanError)
        write_json(json_file, output=output, verdict=reports.verdict_of(plan, compared).to_dict())
        print(f"written to {output}")
        return
    if program is not None:
        raise PlanError(f"{program}: PROGRAM is only for plans; report on one TARGET at a time")
    if mesh is None:
        raise PlanError("--mesh is missing; add the axes and sizes, such as --mesh data=4,model=4")
    wanted = stage.chosen(methods)
    parsed, machine = Mesh.parse(mesh), load(hardware)
    with progress() as show:
        analysis = source.on(machine).analysis(show)
        rows = stage.compare(
            analysis, parsed, machine, wanted,
            strategies=source.strategies, limit=limit,
            memory_bytes=None if memory is None else memory * 2**30, safety=safety,
            settings=Settings(seed=seed), progress=show,
        )  # fmt: skip
        rows = source.marked(rows, hardware)
        best = reports.best_plan(rows)
        compared = [*rows, *_earlier(beside, best, show)]
        show("writing the report")
        page = reports.html_text(
            best, compared if len(compared) > 1 else (), sources,
            policy_plans(source.on(machine), best, show),
            origin=reports.PageOrigin(command_line()), names=named,
        )  # fmt: skip
        write_all({output: page, **_traced(trace, best)}, PlanError)
        write_json(json_file, output=output, verdict=reports.verdict_of(best, compared).to_dict())
    warn(reports.missing_rules(analysis))
    print(f"written to {output}")


def _earlier(
    paths: list[pathlib.Path] | None, plan: Plan, show: Callable[[Any], None]
) -> list[MethodResult]:
    """The plans in files, applied to the program of ``plan``, named by their files.

    What of them does not match is a note, of their rows too.
    """
    from toast import api
    from toast.evaluation.compare import MethodResult

    rows = []
    for path in paths or ():
        show(f"pricing {path.name}")
        applied = api.apply_plan(
            path, plan.analysis, hardware=plan.hardware, memory_bytes=plan.memory_bytes,
            safety=plan.safety,
        )  # fmt: skip
        warn(f"{path.name}: {remark}" for remark in applied.remarks)
        # The page does not show the error stream.
        differs = "; ".join(applied.remarks)
        note = "; ".join(filter(None, (applied.plan.note, differs)))
        own = dataclasses.replace(applied.plan, note=note)
        rows.append(MethodResult.of(path.stem, own, note=differs))
    return rows


def _traced(path: pathlib.Path | None, plan: Plan | None) -> dict[str | pathlib.Path, str]:
    """The file of a trace of ``plan``, if one is asked for."""
    return {path: json.dumps(plan.trace()) + "\n"} if path and plan else {}


def _refuse(context: typer.Context, plan: str) -> None:
    """Reject options whose values a plan file already has."""
    from toast.errors import PlanError

    for name in ("mesh", "methods", "limit", "memory", "safety", "seed"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            remedy = "use toast plan for a new plan"
            if name == "methods":
                remedy = "use toast report TARGET --methods, or --beside another plan"
            raise PlanError(f"{plan}: --{name} cannot be used with a plan; {remedy}")
