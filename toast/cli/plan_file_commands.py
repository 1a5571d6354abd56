"""``toast diff`` and ``apply``, and the part of ``toast explain`` for plans."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toast.cli.common import (
    JsonOption,
    OutputOption,
    ReportOption,
    Source,
    SourcesOption,
    StrictOption,
    command,
    command_line,
    console,
    group,
    memory_gib,
    progress,
    warn,
)
from toast.units import size_text

if TYPE_CHECKING:
    from toast.hardware import Hardware
    from toast.plan import Applied, Plan, Saved, WhyNot
    from toast.program import MemoryPolicy

app = group("")

ProgramArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PROGRAM",
        help="If TARGET is a plan: its program. Required unless it is a zoo model or a file in the "
        "folder of the plan.",
        show_default=False,
    ),
]
ArgumentOption = Annotated[
    str | None,
    typer.Option(
        "--argument",
        help="For a plan: explain the sharding of this argument; * selects a group, such as "
        "params.layers[*].wq.",
    ),
]
CollectiveOption = Annotated[
    str | None,
    typer.Option(
        "--collective", help="For a plan: explain the collective with this number, or all."
    ),
]
AnnotationsOption = Annotated[
    bool,
    typer.Option(
        "--annotations",
        help="For a plan: list the annotations in its program (toast.split and others), with their "
        "shardings and collectives.",
    ),
]
WhyNotOption = Annotated[
    str | None,
    typer.Option(
        "--why-not",
        help="For a plan: show the effect of another sharding: \"params['wq']=P('model', None)\"; "
        "* matches any text. Or that of another memory policy: remat=full, microbatches=4, or the "
        "plan's with another choice for some values: offload=NAME, keep=NAME, recompute=NAME, or "
        "for weights of a layer: gathered=NAME (the gathered copies stay), keep=NAME (gathered "
        "again). remat=auto plans jointly, from the plan's shardings on, so that toast plan "
        "--remat auto may find another plan.",
    ),
]
WhyNotBudget = Annotated[
    float | None,
    typer.Option(
        "--budget", min=0.0, help="Time limit of --why-not in seconds.", show_default="10"
    ),
]
WhyNotOutput = Annotated[
    pathlib.Path | None,
    typer.Option("-o", "--output", help="Write the plan of --why-not to this JSON file."),
]


#: An alternative that is another memory policy; with ``P(...)``, it is the sharding of an argument.
_POLICY = re.compile(r"(remat|microbatches|keep|recompute|offload|gathered)=(?!P\()(.+)", re.DOTALL)


def _plan_file(metavar: str) -> Any:
    return typer.Argument(metavar=metavar, help="Plan file, written by toast plan --json.")


@command(app)
def diff(
    first: Annotated[pathlib.Path, _plan_file("A.json")],
    second: Annotated[pathlib.Path, _plan_file("B.json")],
    json_file: JsonOption = None,
) -> None:
    """Print the differences between two plans.

    They may be in the arguments, actions, other values, collectives, time and memory. Exits with
    code 1 if the plans differ.
    """
    from toast import report
    from toast.errors import PlanError
    from toast.files import write_all
    from toast.plan import diff

    difference = diff(first, second)
    if json_file:
        write_all({json_file: json.dumps(difference.to_dict(), indent=2) + "\n"}, PlanError)
    console().print(report.difference_tables(difference))
    if not difference.same:
        raise typer.Exit(1)


@command(app)
def apply(
    plan: Annotated[pathlib.Path, _plan_file("PLAN.json")],
    source: Source,
    mesh: Annotated[str | None, typer.Option("--mesh", help="Mesh; default: the plan's.")] = None,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="Device name or hardware file; default: the plan's."),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(
            "--memory",
            parser=memory_gib,
            metavar="SIZE",
            help="Memory limit per device in GiB, or with a unit (600MiB); default: the plan's. If "
            "it is set, it is an error if the plan does not fit.",
        ),
    ] = None,
    safety: Annotated[
        float | None,
        typer.Option(
            "--safety",
            help="Odds with which XLA's memory must be within the limit; default: the plan's.",
        ),
    ] = None,
    strict: StrictOption = False,
    json_file: JsonOption = None,
    output: OutputOption = None,
    html: ReportOption = None,
    sources: SourcesOption = None,
) -> None:
    """Apply a saved plan to TARGET, which may have changed.

    The output lists the parts of the plan that do not match. Arguments are matched by their paths,
    other values by the ops that define them, and actions by the dimensions that they shard. The old
    and the new price are printed side by side.
    """
    from toast import api, report
    from toast.errors import PlanError
    from toast.files import check_writable, write_all
    from toast.hardware import load
    from toast.plan import provenance, read

    saved = read(plan)  # raises errors before the long work
    check_writable((json_file, output, html), PlanError)
    with progress() as show:
        machine = provenance.machine_of(saved) if hardware is None else load(hardware)
        if source.is_traced and saved.memory is not None:  # as the plan was
            policy = saved.memory.policy
            source = dataclasses.replace(
                source,
                remat=source.remat or (policy.label if policy else None),
                microbatches=source.microbatches or saved.memory.microbatches,
            )
        analysis = source.on(machine).analysis(show)
        applied = api.apply_plan(
            saved, analysis, mesh=mesh, hardware=hardware,
            memory_bytes=None if memory is None else memory * 2**30, safety=safety,
            progress=show, cache=source.cache,
        )  # fmt: skip
    if memory is not None and not applied.plan.fits:
        wanting = f"needs {size_text(applied.plan.after.peak_bytes)}"
        if applied.plan.after.peak_bytes <= applied.plan.memory_bytes:
            wanting = applied.plan.unsafe_text.replace(";", ",")
        raise PlanError(
            f"memory limit of {size_text(memory * 2**30)} per device: {plan} {wanting}; raise the "
            "limit, or search with toast plan --memory"
        )
    hardware_name = hardware or (saved.origin.hardware if saved.origin else "") or saved.hardware
    result = dataclasses.replace(applied.plan, origin=source.origin(hardware_name))
    texts: dict[str | pathlib.Path, str] = {}
    if json_file:
        data = {**result.to_dict(), "applied": applied.to_dict()}
        texts[json_file] = json.dumps(data, indent=2) + "\n"
    if output:
        texts[output] = result.annotated()
    if html:
        texts[html] = report.html_text(
            result, sources=sources, origin=report.PageOrigin(command_line())
        )
    write_all(texts, PlanError)
    warn([*report.missing_rules(analysis), *applied.notes])
    console().print(report.applied_tables(applied))
    if strict and not result.fits:
        raise typer.Exit(1)


def load_plan(
    source: Source,
    target: str | None = None,
    *,
    hardware: str | None = None,
    module: bool = True,
) -> Applied:
    """The plan of :func:`load_plan_and_source`."""
    return load_plan_and_source(source, target, hardware=hardware, module=module)[0]


def load_plan_and_source(
    source: Source,
    target: str | None = None,
    *,
    hardware: str | None = None,
    module: bool = True,
) -> tuple[Applied, Source]:
    """Load the plan file that ``source`` names and apply it to a program, which is returned, too.

    The program is ``target`` or, without it, the one that the file records.  The file is data: it
    may name a model of the zoo, or files in its own folder.  The user must name a function, or a
    file in another folder, as ``target``, ``hardware`` or rules.  Options of ``source`` take
    precedence over those in the file; ``module`` is as for :meth:`Source.program`.  Raises
    :class:`toast.errors.PlanError` if there is no program, or if the file beside the plan contains
    another program.
    """
    from toast import api
    from toast.errors import PlanError
    from toast.plan import read

    saved = read(source.target)
    machine = _machine(saved, hardware)
    program_source, is_file = _program_source(source, target, saved, machine)
    with progress() as show:
        analysis = program_source.analysis(show, module=module)
        if is_file and analysis.program.origin_digest != saved.digest:
            raise PlanError(
                f"{saved.name}: {program_source.target} is not the program of the plan; add TARGET "
                "after the file name"
            )
        applied = api.apply_plan(
            saved, analysis, hardware=machine, progress=show, cache=source.cache
        )
    warn(applied.remarks)
    written = saved.origin.hardware if saved.origin else ""
    new_origin = program_source.origin(hardware or written or saved.hardware)
    plan = dataclasses.replace(applied.plan, origin=new_origin)
    return dataclasses.replace(applied, plan=plan), program_source


def _program_source(
    source: Source, target: str | None, saved: Saved, machine: Hardware
) -> tuple[Source, bool]:
    """The program of a plan, and whether it is a file (:func:`load_plan_and_source`)."""
    from toast import targets
    from toast.plan import Origin

    origin = saved.origin or Origin("")
    if target is not None:
        if target != origin.target:
            origin = Origin(target)
        named, is_file = target, False
    else:
        named, is_file = targets.of_plan(saved)
    rules = source.rules or (targets.rules_of_plan(saved) if origin.rules else ())
    sizes = {name: size for name, size in source.sizes.items() if size is not None}
    found = Source(
        named, {**origin.sizes, **sizes}, source.shapes or origin.shapes, rules, source.cache,
        source.donate or origin.donate, source.platform or origin.platform or None,
        source.trip_counts or origin.trip_counts, source.remat or origin.remat or None,
        source.microbatches or origin.microbatches or None,
    ).on(machine)  # fmt: skip
    return found, is_file


def plan_with(source: Source, plan: Plan, option: str, value: str, budget: float) -> WhyNot[Plan]:
    """Compare a plan with another one of its program, planned anew.

    ``option`` and ``value`` are those of ``--why-not``: ``remat`` or ``microbatches``; or ``keep``,
    ``recompute``, ``offload`` or ``gathered`` with names of residuals, for the policy of the plan
    with another choice for these alone.

    ``source`` is the program, as :func:`load_plan_and_source` returns it; the search starts from
    ``plan`` and takes at most ``budget`` seconds.  Raises
    :class:`toast.errors.PlanError` for a number of microbatches that is none,
    :class:`toast.errors.TargetError` for names that no residual has, and the errors of
    :func:`toast.plan`.
    """
    from toast.errors import PlanError
    from toast.other_policies import alternative

    if option == "microbatches" and not re.fullmatch(r"[1-9]\d{0,8}", value):
        raise PlanError(f"--why-not 'microbatches={value}': write a number, such as 4")
    with progress() as show:
        return alternative(
            plan, option, int(value) if option == "microbatches" else value,
            functools.partial(_planned, source, plan, budget, show), own_policy=source.remat,
            may_cut_batch=source.microbatches is None, progress=show, asked="--why-not ",
        )  # fmt: skip


def _planned(
    source: Source,
    plan: Plan,
    budget: float,
    show: Callable[[Any], None],
    policy: str | MemoryPolicy | None,
    /,
    start: Plan | None = None,
    microbatches: int | None = None,
) -> Plan:
    """The plan of ``source``, the program of ``plan``, with a memory policy.

    The search starts from another plan, or else from the shardings of ``plan``, under the same
    options, and takes at most ``budget`` seconds.  The result may not fit.
    """
    from toast.other_policies import planned_alike

    source = dataclasses.replace(
        source, remat=policy, microbatches=microbatches or source.microbatches
    )
    analysis = source.analysis(show, partitioner=plan.analysis.lowering)
    other = planned_alike(plan, analysis, start=start, budget=budget, progress=show)
    written = plan.origin.hardware if plan.origin else plan.hardware.name
    return dataclasses.replace(other, origin=source.origin(written))


def policy_plans(source: Source, plan: Plan, show: Callable[[Any], None]) -> list[Plan]:
    """The plan with everything kept, and with everything recomputed, to compare their memory.

    They have the very shardings of ``plan``.  ``source`` is its program.  There are none for a
    program that is not traced, or a plan without a memory policy.
    """
    from toast.errors import ToastError
    from toast.plan import with_same_shardings

    if plan.policy is None or not source.is_traced:
        return []
    plans = []
    for preset in ("none", "full"):
        if plan.policy.preset == preset:
            continue
        count = plan.microbatches if plan.microbatches > 1 else source.microbatches
        chosen = dataclasses.replace(source, remat=preset, microbatches=count)
        with contextlib.suppress(ToastError):  # blocks may not be what they were
            analysis = chosen.analysis(show, partitioner=plan.analysis.lowering)
            other = with_same_shardings(plan, analysis)
            written = plan.origin.hardware if plan.origin else plan.hardware.name
            plans.append(dataclasses.replace(other, origin=chosen.origin(written)))
    return plans


def _machine(saved: Saved, hardware: str | None) -> Hardware:
    """The hardware of a plan; ``hardware`` is the user's option, or None."""
    from toast.errors import PlanError
    from toast.hardware import load
    from toast.plan import provenance
    from toast.plan.files import hardware_digest

    if hardware is None:
        return provenance.machine_of(saved)
    machine = load(hardware)
    if hardware_digest(machine) != saved.hardware_digest:
        raise PlanError(
            f"--hardware {hardware}: a plan is explained on its own hardware; use toast apply to "
            "price it on other hardware"
        )
    return machine


def explain_plan(
    plan: Plan,
    *,
    argument: str | None = None,
    collective: str | None = None,
    annotations: bool = False,
    alternative: str | None = None,
    budget: float = 10.0,
    json_file: pathlib.Path | None = None,
    output: pathlib.Path | None = None,
    replan: Callable[[str, str, float], WhyNot[Plan]] | None = None,
) -> None:
    """Print explanations of a plan.

    They are of an ``argument``, of a ``collective`` (its number, or all), of all ``annotations``,
    and of an ``alternative``: a sharding, or another memory policy or number of microbatches, with
    which ``replan`` plans the program (:func:`plan_with`).
    """
    from toast import report
    from toast.errors import PlanError
    from toast.files import write_all

    explanations: list[Any] = []
    shown: list[Any] = []
    if argument is not None:
        explanations.append(plan.explain_argument(argument))
        shown.append(report.argument_explanation(explanations[-1]))
    if collective is not None and collective != "all":
        if not collective.isdecimal():
            raise PlanError(f"--collective {collective}: use a number, or all")
        explanations.append(plan.explain_collective(int(collective)))
        shown.append(report.collective_explanation(explanations[-1]))
    if collective == "all":
        every = plan.explain_collectives()
        explanations += every
        shown.append(report.collectives_table(every))
    if annotations:
        annotated = plan.explain_annotations()
        explanations += annotated
        shown.append(report.annotations_table(annotated))
    policy = _POLICY.fullmatch(alternative or "")
    if policy and replan:
        explanations.append(replan(policy[1], policy[2], budget))
        shown.append(report.why_not_tables(explanations[-1]))
    elif alternative is not None:
        pattern, equals, spec = alternative.rpartition("=P")
        if not pattern or not equals:
            raise PlanError(
                f"--why-not '{alternative}': write params['wq']=P('model', None), or remat=, "
                "microbatches=, keep=, recompute=, offload= or gathered= with a value"
            )
        with progress() as show:
            show("search")
            explanations.append(plan.why_not(pattern, "P" + spec, budget=budget))
        shown.append(report.why_not_tables(explanations[-1]))
    texts: dict[str | pathlib.Path, str] = {}
    if json_file:
        data = {"version": 1, "explained": [part.to_dict() for part in explanations]}
        texts[json_file] = json.dumps(data, indent=2) + "\n"
    if output:
        texts[output] = explanations[-1].accept().json_text()
    write_all(texts, PlanError)
    for part in shown:
        console().print(part)
    if output:
        print(f"plan of the alternative written to {output}")
