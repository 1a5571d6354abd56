"""``toast diff`` and ``apply``, and what ``toast explain`` says of plans."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toast.cli.common import (
    JsonOption,
    OutputOption,
    ReportOption,
    Source,
    command,
    console,
    group,
    progress,
    warn,
)
from toast.units import size_text

if TYPE_CHECKING:
    from toast.plan import Applied, Plan

app = group("")

ProgramArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PROGRAM",
        help="Where TARGET is a plan: another TARGET than the one it was made from.",
        show_default=False,
    ),
]
ArgumentOption = Annotated[
    str | None,
    typer.Option(
        "--argument",
        help="Of a plan: why this argument is sharded as it is; with * all of a group, such as "
        "params.layers[*].wq.",
    ),
]
CollectiveOption = Annotated[
    str | None,
    typer.Option("--collective", help="Of a plan: why a collective is there; a number, or all."),
]
WhyNotOption = Annotated[
    str | None,
    typer.Option(
        "--why-not",
        help="Of a plan: what another sharding would do: \"params['wq']=P('model', None)\"; * in "
        "the path stands for anything.",
    ),
]
WhyNotBudget = Annotated[
    float | None,
    typer.Option("--budget", min=0.0, help="Seconds that --why-not may search.", show_default="10"),
]


def _plan_file(metavar: str) -> Any:
    return typer.Argument(metavar=metavar, help="A plan, as toast plan --json wrote it.")


@command(app)
def diff(
    first: Annotated[pathlib.Path, _plan_file("A.json")],
    second: Annotated[pathlib.Path, _plan_file("B.json")],
    json_file: JsonOption = None,
) -> None:
    """Compare two plans: arguments, actions, collectives, time and memory; only what differs.

    Exits with code 1 when they differ.
    """
    from toast import report
    from toast.errors import PlanError
    from toast.files import write_all
    from toast.plan import diff

    found = diff(first, second)
    if json_file:
        write_all({json_file: json.dumps(found.to_dict(), indent=2) + "\n"}, PlanError)
    console().print(report.difference_tables(found))
    if not found.same:
        raise typer.Exit(1)


@command(app)
def apply(
    plan: Annotated[pathlib.Path, _plan_file("PLAN.json")],
    source: Source,
    mesh: Annotated[
        str | None, typer.Option("--mesh", help="Another mesh than the plan's: data=4,model=4.")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="Other hardware than the plan's: a name or a file."),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(
            "--memory",
            help="Limit per device in GiB, default: the plan's; an error if the plan does not fit.",
        ),
    ] = None,
    json_file: JsonOption = None,
    output: OutputOption = None,
    html: ReportOption = None,
) -> None:
    """Apply an earlier plan to TARGET, which may have changed; say what no longer matches.

    Arguments are found by their paths, other values by the ops that make them, actions by the
    dimensions that they shard. The plan is priced anew, beside what it said then.
    """
    from toast import api, report
    from toast.errors import PlanError
    from toast.files import check_writable, write_all
    from toast.plan import read

    saved = read(plan)  # complain before the long work
    check_writable((json_file, output, html), PlanError)
    with progress() as show:
        analysis = source.analysis(show)
        applied = api.apply_plan(
            saved, analysis, mesh=mesh, hardware=hardware,
            memory_bytes=None if memory is None else memory * 2**30, progress=show,
            cache=source.cache,
        )  # fmt: skip
    if memory is not None and not applied.plan.fits:
        raise PlanError(
            f"memory limit of {memory:g} GiB per device: {plan} needs "
            f"{size_text(applied.plan.after.peak_bytes)} here; raise the limit, or search with "
            "toast plan --memory"
        )
    given = hardware or (saved.origin.hardware if saved.origin else "") or saved.hardware
    made = dataclasses.replace(applied.plan, origin=source.origin(given))
    texts: dict[str | pathlib.Path, str] = {}
    if json_file:
        data = {**made.to_dict(), "applied": applied.to_dict()}
        texts[json_file] = json.dumps(data, indent=2) + "\n"
    if output:
        texts[output] = made.annotated()
    if html:
        texts[html] = report.html_text(made)
    write_all(texts, PlanError)
    warn([*report.missing_rules(analysis), *applied.notes])
    console().print(report.applied_tables(applied))
    if not made.fits:
        warn([
            f"the plan needs {size_text(made.after.peak_bytes)} per device, more than "
            f"{size_text(made.memory_bytes)}"
        ])  # fmt: skip


def load_plan(source: Source, target: str | None = None, *, module: bool = True) -> Applied:
    """The plan that ``source`` names, on ``target``, or on the one that its file says.

    Options of ``source`` that say how to read TARGET go before those in the file; ``module`` is as
    for :meth:`Source.program`.  Raises
    :class:`toast.errors.PlanError` where neither says any TARGET.
    """
    from toast import api
    from toast.errors import PlanError
    from toast.plan import Origin, read

    saved = read(source.target)
    if saved.origin is None and target is None:
        raise PlanError(
            f"{saved.name}: does not say which TARGET it was made from; name it behind the file"
        )
    origin = saved.origin or Origin("")
    if target is not None and target != origin.target:
        origin = Origin(target)
    given = {name: size for name, size in source.sizes.items() if size is not None}
    found = Source(
        origin.target, {**origin.sizes, **given}, source.shapes or origin.shapes,
        source.rules or tuple(map(pathlib.Path, origin.rules)), source.cache,
    )  # fmt: skip
    with progress() as show:
        analysis = found.analysis(show, module=module)
        applied = api.apply_plan(saved, analysis, progress=show, cache=source.cache)
    warn(applied.remarks)
    made_from = found.origin(origin.hardware or saved.hardware)
    return dataclasses.replace(applied, plan=dataclasses.replace(applied.plan, origin=made_from))


def explain_plan(
    plan: Plan,
    *,
    argument: str | None = None,
    collective: str | None = None,
    alternative: str | None = None,
    budget: float = 10.0,
    json_file: pathlib.Path | None = None,
) -> None:
    """Print what is asked of a plan: an argument, a collective (by number, or all), a why-not."""
    from toast import report
    from toast.errors import PlanError
    from toast.files import write_all

    found: list[Any] = []
    shown: list[Any] = []
    if argument is not None:
        found.append(plan.explain_argument(argument))
        shown.append(report.argument_explanation(found[-1]))
    if collective is not None and collective != "all":
        if not collective.isdecimal():
            raise PlanError(f"--collective {collective}: give a number, or all")
        found.append(plan.explain_collective(int(collective)))
        shown.append(report.collective_explanation(found[-1]))
    if collective == "all":
        every = plan.explain_collectives()
        found += every
        shown.append(report.collectives_table(every))
    if alternative is not None:
        pattern, equals, spec = alternative.rpartition("=P")
        if not pattern or not equals:
            raise PlanError(f"--why-not '{alternative}': write params['wq']=P('model', None)")
        with progress() as show:
            show("search")
            found.append(plan.why_not(pattern, "P" + spec, budget=budget))
        shown.append(report.why_not_tables(found[-1]))
    if json_file:
        data = {"version": 1, "explained": [part.to_dict() for part in found]}
        write_all({json_file: json.dumps(data, indent=2) + "\n"}, PlanError)
    for part in shown:
        console().print(part)
