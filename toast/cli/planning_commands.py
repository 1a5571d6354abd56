"""``toast plan``, ``analyze``, ``compare`` and ``models``."""

from __future__ import annotations

import dataclasses
import enum
import json
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toast.cli.common import (
    HardwareOption,
    JsonOption,
    LimitOption,
    LoweringOption,
    MemoryOption,
    MeshOption,
    OutputOption,
    Partitioner,
    ReportOption,
    SafetyOption,
    SeedOption,
    Source,
    SourcesOption,
    StrictOption,
    TimeoutOption,
    TraceOption,
    UnevenOption,
    command,
    command_line,
    console,
    group,
    memory_gib,
    progress,
    warn,
)
from toast.cli.json_files import write_json
from toast.cli.plan_file_commands import policy_plans
from toast.errors import PinError

if TYPE_CHECKING:
    from toast.plan import Plan
    from toast.program import MemoryPolicy
    from toast.space import Constraints

app = group("")

PinOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        help="Fix the sharding of arguments or named values: \"params['wq']=P('model', None)\"; * "
        "matches any text.",
    ),
]
ForbidOption = Annotated[
    list[str] | None,
    typer.Option("--forbid", help='Do not shard arguments along mesh axes: "params*=data".'),
]
FixOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fix", help='Shard a dimension and its color before the search: "tokens:0=data".'
    ),
]
KeepOption = Annotated[
    bool,
    typer.Option(
        "--keep-constraints", help="Keep the shardings in the program, including its arguments'."
    ),
]
DevicesOption = Annotated[
    int | None,
    typer.Option(
        "--devices",
        help="Number of devices; the search also chooses the mesh. Use it instead of --mesh.",
    ),
]
BudgetOption = Annotated[
    float | None, typer.Option("--budget", min=0.0, help="Time limit of TOAST's search in seconds.")
]
RestartsOption = Annotated[
    int,
    typer.Option("--restarts", min=1, help="Number of searches; the best plan is kept."),
]
ProcessesOption = Annotated[
    int,
    typer.Option(
        "--processes",
        min=1,
        help="Number of parallel searches; without a budget it does not change the plan.",
    ),
]


class OverlapChoice(enum.StrEnum):
    """The collectives that overlap with matrix products."""

    none = "none"
    partial = "partial"
    gathers = "gathers"
    asynchronous = "asynchronous"
    full = "full"


OverlapOption = Annotated[
    OverlapChoice,
    typer.Option(
        "--overlap",
        help="Collectives that overlap with independent matrix products: none; partial, those that "
        "the compiler runs in the background by default; gathers, also all-gathers, as with its "
        "flags for them; asynchronous, also sums, as with its flags for those; full, all.",
    ),
]


class ResolutionChoice(enum.StrEnum):
    """Whether compatible conflicts are resolved together."""

    compatible = "compatible"
    independent = "independent"


@command(app)
def plan(
    source: Source,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            help="Mesh axes and sizes: data=4,model=4; append @model,data to make data the "
            "innermost axis. Axes slice, dcn and dcn_* go over the network that joins slices. "
            "Alternatively, use --devices.",
        ),
    ] = None,
    devices: DevicesOption = None,
    hardware: HardwareOption = "tpu-v5e",
    memory: Annotated[
        float | None,
        typer.Option(
            "--memory",
            parser=memory_gib,
            metavar="SIZE",
            help="Memory limit per device in GiB, or with a unit (600MiB); it is an error if no "
            "plan fits.",
        ),
    ] = None,
    safety: SafetyOption = None,
    budget: BudgetOption = None,
    overlap: OverlapOption = OverlapChoice.partial,
    seed: SeedOption = 0,
    restarts: RestartsOption = 1,
    processes: ProcessesOption = 1,
    pin: PinOption = None,
    forbid: ForbidOption = None,
    fix: FixOption = None,
    keep_constraints: KeepOption = False,
    resolution: Annotated[
        ResolutionChoice,
        typer.Option(
            "--resolution",
            help="Resolve compatible conflicts together, or each conflict independently.",
        ),
    ] = ResolutionChoice.compatible,
    uneven: UnevenOption = None,
    lowering: LoweringOption = Partitioner.xla,
    start: Annotated[
        pathlib.Path | None,
        typer.Option("--start", help="Start the search from the plan in this JSON file."),
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(
            "--fit",
            metavar="SIZE",
            help="Find the largest batch, sequence or other size of TARGET that fits, or the "
            "fewest devices (devices), and print a table of plans with their speed. "
            "Each row of --json has the command that makes its plan.",
        ),
    ] = None,
    confirm: Annotated[
        bool,
        typer.Option(
            "--confirm",
            help="Ask XLA's TPU compiler whether the plan fits, and plan again within less memory "
            "until it does; needs libtpu, but no TPU.",
            show_default=False,
        ),
    ] = False,
    strict: StrictOption = False,
    json_file: JsonOption = None,
    output: OutputOption = None,
    html: ReportOption = None,
    sources: SourcesOption = None,
    trace: TraceOption = None,
) -> None:
    """Find the best sharding of TARGET on a mesh and explain it.

    With --devices instead of --mesh, find the best mesh as well. If the plan does not fit, the last
    table says what it takes. With --fit, find out which sizes fit.
    """
    from toast import api, inputs, report
    from toast.cli import fit_option
    from toast.errors import PlanError
    from toast.files import check_writable, write_all
    from toast.hardware import load
    from toast.plan import joint_plan
    from toast.search import Settings

    machine = load(hardware)
    settings = Settings(seed=seed, budget=budget, restarts=restarts, processes=processes)
    options: dict[str, Any] = {
        "safety": inputs.safety_of(safety), "overlap": overlap.value,
        "constraints": _constraints(pin, forbid, fix, keep_constraints),
        "resolution": resolution.value, "uneven": uneven,
    }  # fmt: skip
    words = fit_option.option_words({
        "--hardware": hardware, "--memory": memory, "--safety": safety, "--seed": seed or None,
        "--overlap": None if overlap is OverlapChoice.partial else overlap.value,
        "--pin": pin, "--forbid": forbid, "--fix": fix, "--keep-constraints": keep_constraints,
        "--resolution": None if resolution is ResolutionChoice.compatible else resolution.value,
        "--uneven": uneven, "--lowering": None if lowering is Partitioner.xla else lowering.value,
        "--restarts": None if restarts == 1 else restarts,
    })  # fmt: skip
    sizing = fit_option.Sizing(source, machine, lowering.value, settings, options, words)
    memory_bytes = None if memory is None else memory * 2**30
    if fit is not None:
        fit_option.check_single(
            start=start, output=output, report=html, trace=trace, confirm=confirm or None
        )
        check_writable((json_file,), PlanError)
        answer = sizing.answer(fit, mesh, devices, memory_bytes)
        if json_file:
            write_all({json_file: json.dumps(answer.to_dict(), indent=2) + "\n"}, PlanError)
        console().print(report.fit_tables(answer))
        if answer.stopped == "interrupt":
            raise KeyboardInterrupt
        if strict and not answer.fits:
            raise typer.Exit(1)
        return
    inputs.candidate_meshes(mesh, devices, machine)  # raises errors before the long work
    check_writable((json_file, output, html, trace), PlanError)
    begin, within = start, memory_bytes

    def planned(
        policy: str | MemoryPolicy | None, start: Plan | None = None,
        microbatches: int | None = None,
    ) -> Plan:  # fmt: skip
        count = microbatches or source.microbatches
        chosen = dataclasses.replace(source, remat=policy, microbatches=count)
        analysis = chosen.on(machine).analysis(show, partitioner=lowering.value)
        result = api.plan(
            analysis,
            mesh=mesh,
            devices=devices,
            hardware=machine,
            memory_bytes=within,
            start=start or begin,
            settings=settings,
            progress=show,
            **options,
        )
        return dataclasses.replace(result, origin=chosen.origin(hardware))

    def planned_within(limit: float | None) -> Plan:
        nonlocal within
        within = limit
        if source.remat == "auto":
            return joint_plan(planned, show, may_cut_batch=source.microbatches is None)
        return planned(source.remat)

    with progress() as show:
        if confirm:
            from toast.evaluation.confirmed import confirmed_plan

            result = confirmed_plan(planned_within, machine, memory_bytes, show)
        else:
            result = planned_within(memory_bytes)
    warn(report.missing_rules(result.analysis, noted=result.note))
    texts: dict[str | pathlib.Path, str] = {}
    if json_file:
        texts[json_file] = result.json_text()
    if trace:
        texts[trace] = json.dumps(result.trace()) + "\n"
    if output:
        local = lowering is Partitioner.local
        texts[output] = result.lowered().text if local else result.annotated()
    if html:
        with progress() as show:
            policies = policy_plans(source.on(machine), result, show)
        texts[html] = report.html_text(
            result, sources=sources, policies=policies, origin=report.PageOrigin(command_line())
        )
    write_all(texts, PlanError)
    console().print(report.plan_tables(result, remedies=False))
    if not result.fits:
        console().print(report.remedy_tables(sizing.remedies(result, mesh, devices)))
        if strict:
            raise typer.Exit(1)


@command(app)
def analyze(
    source: Source,
    json_file: JsonOption = None,
    facts: Annotated[
        pathlib.Path | None,
        typer.Option("--facts", help="Write the fact base to this file as text for clingo."),
    ] = None,
) -> None:
    """Analyze TARGET: count its names, colors, conflicts and groups.

    The time of each stage is printed as well.
    """
    from toast import report
    from toast.errors import PlanError
    from toast.files import check_writable, write_all

    check_writable((json_file, facts), PlanError)
    with progress() as show:
        analysis = source.analysis(show)
    warn(report.missing_rules(analysis))
    texts: dict[str | pathlib.Path, str] = {}
    if facts:
        texts[facts] = analysis.facts.to_lp()
    if json_file:
        data = {
            "version": 1,
            "program": analysis.program.name,
            "counts": analysis.counts(),
            "seconds": analysis.seconds,
            "without_rule": [analysis.program.describe(op) for op in analysis.without_rule],
        }
        texts[json_file] = json.dumps(data, indent=2) + "\n"
    write_all(texts, PlanError)
    console().print(report.analysis_table(analysis))


def _constraints(
    pin: list[str] | None, forbid: list[str] | None, fix: list[str] | None, keep: bool
) -> Constraints:
    """Parse the user's constraints; raises :class:`toast.errors.PinError`."""
    from toast.space import Constraints

    return Constraints(
        pin=_parted(pin, "--pin", "params*=P('model')", "=P"),
        forbid=_several(forbid, "--forbid", "params*=data"),
        fix=_several(fix, "--fix", "tokens:0=data"),
        keep=keep,
    )


def _parted(texts: list[str] | None, option: str, example: str, at: str = "=") -> dict[str, str]:
    """Parse ``PATTERN=VALUE`` options; a pattern may contain ``=``."""
    values: dict[str, str] = {}
    for text in texts or ():
        pattern, equals, value = text.rpartition(at)
        if not pattern or not equals:
            raise PinError(f"{option} '{text}': write {example}")
        value = equals.removeprefix("=") + value
        if pattern in values:
            raise PinError(f"{option} {pattern} occurs twice: {values[pattern]} and {value}")
        values[pattern] = value
    return values


def _several(texts: list[str] | None, option: str, example: str) -> dict[str, list[str]]:
    """Parse ``PATTERN=AXES`` options; repeated patterns combine their axes."""
    axes_of: dict[str, list[str]] = {}
    for text in texts or ():
        ((pattern, axes),) = _parted([text], option, example).items()
        axes_of.setdefault(pattern, []).extend(axis.strip() for axis in axes.split(","))
    return axes_of


class Compiler(enum.StrEnum):
    """Compilers that check plans."""

    tpu = "tpu"
    gpu = "gpu"


@command(app)
def compare(
    source: Source,
    mesh: MeshOption,
    hardware: HardwareOption = "tpu-v5e",
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help="Comma-separated: toast; manual, the best combination of expert strategies; "
            "automap, a search that propagates after every action; alpa, an integer linear "
            "program; shardy, the batch sharded along all axes, then propagation.",
        ),
    ] = "toast,manual,automap,alpa,shardy",
    limit: LimitOption = 60.0,
    budget: BudgetOption = None,
    memory: MemoryOption = None,
    safety: SafetyOption = None,
    overlap: OverlapOption = OverlapChoice.partial,
    pin: PinOption = None,
    forbid: ForbidOption = None,
    fix: FixOption = None,
    keep_constraints: KeepOption = False,
    oracle: Annotated[
        Compiler | None,
        typer.Option(
            "--oracle",
            help="tpu: also compile every plan with XLA's TPU compiler. gpu: compile it for the "
            "GPUs of this machine, and time its steps.",
        ),
    ] = None,
    timeout: TimeoutOption = 600,
    seed: SeedOption = 0,
    restarts: RestartsOption = 1,
    processes: ProcessesOption = 1,
    json_file: JsonOption = None,
    html: ReportOption = None,
    sources: SourcesOption = None,
) -> None:
    """Compare TOAST's plan for TARGET with those of other methods.

    The same cost model prices all plans. A search that reaches its limit returns its best plan so
    far, with a note. An interrupt prints the rows so far. The TPU compiler needs the extra
    toast-partitioner[tpu].

    Pins and other constraints apply to all methods. AutoMap and Shardy may violate them; a note
    then names the violation.
    """
    from toast import report
    from toast.errors import PlanError
    from toast.evaluation import compare as stage
    from toast.files import check_writable, write_all
    from toast.hardware import Mesh, load
    from toast.search import Settings

    check_writable((json_file, html), PlanError)
    constraints = _constraints(pin, forbid, fix, keep_constraints)
    wanted = stage.chosen(methods)
    parsed, machine = Mesh.parse(mesh), load(hardware)
    memory_bytes = machine.memory_limit_bytes if memory is None else memory * 2**30
    with progress() as show:
        analysis = source.on(machine).analysis(show)
        try:
            rows, interrupted = stage.compare(
                analysis, parsed, machine, wanted,
                strategies=source.strategies,
                limit=limit, memory_bytes=memory_bytes, safety=safety, overlap=overlap.value,
                constraints=constraints,
                settings=Settings(seed=seed, budget=budget, restarts=restarts, processes=processes),
                oracle=oracle.value if oracle else None, timeout=timeout, progress=show,
            ), False  # fmt: skip
        except stage.Interrupted as interrupt:
            rows, interrupted = interrupt.rows, True
    warn(report.missing_rules(analysis))
    texts: dict[str | pathlib.Path, str] = {}
    if html:
        texts[html] = report.comparison_html(
            source.marked(rows, hardware), sources, origin=report.PageOrigin(command_line())
        )
    if json_file:
        data = {
            "version": 1, "program": analysis.program.name, "mesh": dict(parsed.axes),
            "hardware": machine.name, "memory_bytes": memory_bytes, "safety": safety,
            "limit_seconds": limit, "budget_seconds": budget, "overlap": overlap.value,
            "constraints": dataclasses.asdict(constraints),
            "methods": [row.to_dict() for row in rows],
        }  # fmt: skip
        texts[json_file] = json.dumps(data, indent=2, allow_nan=False) + "\n"
    write_all(texts, PlanError)
    console().print(report.comparison_table(analysis, parsed, machine, memory_bytes, rows))
    if interrupted:
        raise KeyboardInterrupt


@command(app)
def models(json_file: JsonOption = None) -> None:
    """List the models of the zoo."""
    from toast import report, targets

    with targets.importing_jax():
        from toast.models import ZOO
    if json_file:
        rows = [
            {"name": name, "description": entry.summary, "options": entry.options,
             "parameters": entry.build().parameter_count}
            for name, entry in ZOO.items()
        ]  # fmt: skip
        write_json(json_file, models=rows)
    console().print(report.model_list(ZOO))
