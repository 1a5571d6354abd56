"""``toast lower``."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from toast.cli.common import (
    HardwareOption,
    JsonOption,
    SeedOption,
    Source,
    UnevenOption,
    command,
    console,
    group,
    progress,
    warn,
)
from toast.cli.json_files import write_json
from toast.cli.plan_file_commands import ProgramArgument, load_plan
from toast.cli.planning_commands import BudgetOption

app = group("")


@command(app)
def lower(
    context: typer.Context,
    source: Source,
    program: ProgramArgument = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh", help="Mesh axes and sizes: data=4,model=4. A plan has its own mesh."
        ),
    ] = None,
    hardware: HardwareOption = "tpu-v5e",
    budget: BudgetOption = None,
    seed: SeedOption = 0,
    uneven: UnevenOption = None,
    output: Annotated[
        pathlib.Path | None,
        typer.Option("-o", "--output", help="Write the program of one device to this file."),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Write the program that one device runs, with every collective as an op.

    TARGET is planned first, as by toast plan --lowering local, unless it is a plan file. The output
    compares the collectives of the program with those that the plan predicts. Exits with code 1 if
    they differ, or if an op has no local form and runs whole.
    """
    from toast import api, report
    from toast.errors import PlanError
    from toast.files import check_writable, is_plan, write_all
    from toast.hardware import Collectives, load
    from toast.search import Settings

    check_writable((output, json_file), PlanError)
    if is_plan(source.target):
        for name in ("mesh", "budget", "seed", "uneven"):
            given = context.get_parameter_source(name)
            if given is not None and given.name == "COMMANDLINE":
                raise PlanError(
                    f"{source.target}: --{name} cannot be used with a plan; use toast plan for a "
                    "new plan"
                )
        given = context.get_parameter_source("hardware")
        own = hardware if given and given.name == "COMMANDLINE" else None
        plan = load_plan(source, program, hardware=own).plan
    else:
        if program is not None:
            raise PlanError(f"{program}: PROGRAM is only for plans; lower one TARGET at a time")
        if mesh is None:
            raise PlanError(
                "--mesh is missing; add the axes and sizes, such as --mesh data=4,model=4"
            )
        machine = load(hardware)
        with progress() as show:
            analysis = source.on(machine).analysis(show, partitioner="local")
            plan = api.plan(
                analysis, mesh=mesh, hardware=machine,
                uneven=uneven, settings=Settings(seed=seed, budget=budget), progress=show,
            )  # fmt: skip
        warn(report.missing_rules(analysis, noted=plan.note))
    with progress() as show:
        show("lowering")
        local = plan.lowered()
        predicted = plan.model.local_collectives(plan.state)
        if output:
            write_all({output: local.text}, PlanError)
    counts = local.counts()
    rows = [
        {"kind": kind, "axes": axes, "bytes": size, "count": counts[kind, axes, size],
         "predicted": predicted[kind, axes, size]}
        for kind, axes, size in sorted({**counts, **predicted})
    ]  # fmt: skip
    equal = counts == predicted
    write_json(json_file, collectives=rows, gathered=local.gathered, equal=equal, output=output)
    prices = Collectives(plan.hardware, plan.mesh)
    console().print(report.lowering_tables(
        local, predicted, lambda c: prices.cheapest(c.kind, c.bytes, c.axes).seconds(c.bytes),
    ))  # fmt: skip
    if output:
        print(f"written to {output}")
    if local.gathered or not equal:
        raise typer.Exit(1)
