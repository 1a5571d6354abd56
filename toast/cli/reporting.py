"""``toast report``."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated

import typer

from toast.cli.common import (
    HardwareOption,
    LimitOption,
    MemoryOption,
    SeedOption,
    Source,
    command,
    group,
    progress,
    warn,
)
from toast.cli.plans import ProgramArgument, load_plan

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
            help="Axes and sizes: data=4,model=4; @model,data behind it lays data innermost. A "
            "plan has its own.",
        ),
    ] = None,
    output: Annotated[
        pathlib.Path, typer.Option("-o", "--output", help="The HTML file to write.")
    ] = pathlib.Path("report.html"),
    hardware: HardwareOption = "tpu-v5e",
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help="Methods to compare, as of toast compare: toast,manual,alpa.",
        ),
    ] = "toast",
    limit: LimitOption = 60.0,
    memory: MemoryOption = None,
    seed: SeedOption = 0,
) -> None:
    """Plan TARGET and write a report: one HTML file that opens offline.

    TARGET may be a plan, as toast plan --json wrote it: the report is its own then, and nothing is
    searched for. It says itself what it was made from, unless that is named behind it.

    Arguments and their shardings, actions with reasons, where time and memory go, conflicts, and
    every op with its source line. With --methods, other methods' plans beside it.
    """
    from toast import compare as stage
    from toast import report as reports
    from toast.errors import PlanError
    from toast.files import check_writable, is_plan, write_all
    from toast.hardware import Mesh, load
    from toast.search import Settings

    check_writable((output,), PlanError)
    if is_plan(source.target):
        _refuse(context, source.target)
        applied = load_plan(source, program)
        # Who gets the page sees no error stream.
        note = "; ".join(filter(None, (applied.plan.note, *applied.remarks)))
        plan = dataclasses.replace(applied.plan, note=note)
        write_all({output: reports.html_text(plan)}, PlanError)
        print(f"written to {output}")
        return
    if program is not None:
        raise PlanError(f"{program}: one TARGET at a time; only a plan has a PROGRAM behind it")
    if mesh is None:
        raise PlanError("--mesh is missing: give the axes and sizes, --mesh data=4,model=4")
    wanted = stage.chosen(methods)
    parsed, machine = Mesh.parse(mesh), load(hardware)
    with progress() as show:
        analysis = source.analysis(show)
        rows = stage.compare(
            analysis, parsed, machine, wanted,
            strategies=source.strategies, limit=limit,
            memory_bytes=None if memory is None else memory * 2**30,
            settings=Settings(seed=seed), progress=show,
        )  # fmt: skip
        show("writing the report")
        write_all({output: reports.comparison_html(source.marked(rows, hardware))}, PlanError)
    warn(reports.missing_rules(analysis))
    print(f"written to {output}")


def _refuse(context: typer.Context, plan: str) -> None:
    """Complain of options that a plan has its own of."""
    from toast.errors import PlanError

    for name in ("mesh", "hardware", "methods", "limit", "memory", "seed"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise PlanError(
                f"{plan}: a plan's report has no --{name}; plan its TARGET anew for that"
            )
