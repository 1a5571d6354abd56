"""``toast plan``, ``analyze``, ``compare`` and ``models``."""

from __future__ import annotations

import dataclasses
import enum
import json
import pathlib
from typing import TYPE_CHECKING, Annotated

import typer

from toast.cli.common import (
    HardwareOption,
    JsonOption,
    LimitOption,
    MemoryOption,
    MeshOption,
    OutputOption,
    ReportOption,
    SeedOption,
    Source,
    TimeoutOption,
    command,
    console,
    group,
    progress,
    warn,
)
from toast.errors import PinError
from toast.units import size_text

if TYPE_CHECKING:
    from toast.space import Constraints

app = group("")

PinOption = Annotated[
    list[str] | None,
    typer.Option("--pin", help="Fix shardings: \"params['wq']=P('model', None)\"; * is any."),
]
ForbidOption = Annotated[
    list[str] | None,
    typer.Option("--forbid", help='Keep arguments off mesh axes: "params*=data".'),
]
FixOption = Annotated[
    list[str] | None,
    typer.Option("--fix", help='Shard a dimension, wherever it goes, first: "tokens:0=data".'),
]
KeepOption = Annotated[
    bool,
    typer.Option("--keep-constraints", help="Hold the program's own shardings, of arguments too."),
]
DevicesOption = Annotated[
    int | None,
    typer.Option("--devices", help="Try every mesh of so many devices; in place of --mesh."),
]
BudgetOption = Annotated[
    float | None, typer.Option("--budget", min=0.0, help="Seconds that TOAST's search may take.")
]
RestartsOption = Annotated[
    int,
    typer.Option("--restarts", min=1, help="Independent searches of TOAST; the best counts."),
]
ProcessesOption = Annotated[
    int,
    typer.Option(
        "--processes",
        min=1,
        help="Searches that run at a time; without a budget the plan does not depend on it.",
    ),
]


class Beside(enum.StrEnum):
    """Which collectives run beside products."""

    none = "none"
    partial = "partial"
    full = "full"


OverlapOption = Annotated[
    Beside,
    typer.Option(
        "--overlap",
        help="Collectives that run beside products: none; partial, those of the background "
        "where products are independent of them; full, all.",
    ),
]


class Resolve(enum.StrEnum):
    """Whether compatible conflicts are resolved alike."""

    compatible = "compatible"
    independent = "independent"


@command(app)
def plan(
    source: Source,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            help="Axes and sizes: data=4,model=4; @model,data behind it lays "
            "data innermost. Or give --devices.",
        ),
    ] = None,
    devices: DevicesOption = None,
    hardware: HardwareOption = "tpu-v5e",
    memory: Annotated[
        float | None,
        typer.Option("--memory", help="Limit per device in GiB; an error if no plan fits."),
    ] = None,
    budget: BudgetOption = None,
    overlap: OverlapOption = Beside.partial,
    seed: SeedOption = 0,
    restarts: RestartsOption = 1,
    processes: ProcessesOption = 1,
    pin: PinOption = None,
    forbid: ForbidOption = None,
    fix: FixOption = None,
    keep_constraints: KeepOption = False,
    resolution: Annotated[
        Resolve,
        typer.Option(
            "--resolution",
            help="Conflicts: compatible ones alike, or each independent of the others.",
        ),
    ] = Resolve.compatible,
    start: Annotated[
        pathlib.Path | None,
        typer.Option("--start", help="Begin the search with the plan in this JSON file."),
    ] = None,
    json_file: JsonOption = None,
    output: OutputOption = None,
    html: ReportOption = None,
) -> None:
    """Find the best sharding of TARGET on a mesh and explain it.

    With --devices in place of --mesh, find the best mesh too.
    """
    from toast import api, given, report
    from toast.errors import PlanError
    from toast.files import check_writable, write_all
    from toast.hardware import load
    from toast.search import Settings

    machine = load(hardware)
    given.candidate_meshes(mesh, devices, machine)  # complain before the long work
    check_writable((json_file, output, html), PlanError)
    with progress() as show:
        analysis = source.analysis(show)
        made = api.plan(
            analysis,
            mesh=mesh,
            devices=devices,
            hardware=machine,
            memory_bytes=None if memory is None else memory * 2**30,
            overlap=overlap.value,
            constraints=_constraints(pin, forbid, fix, keep_constraints),
            resolution=resolution.value,
            start=start,
            settings=Settings(seed=seed, budget=budget, restarts=restarts, processes=processes),
            progress=show,
        )
    made = dataclasses.replace(made, origin=source.origin(hardware))
    warn(report.missing_rules(analysis))
    texts: dict[str | pathlib.Path, str] = {}
    if json_file:
        texts[json_file] = made.json_text()
    if output:
        texts[output] = made.annotated()
    if html:
        texts[html] = report.html_text(made)
    write_all(texts, PlanError)
    console().print(report.plan_tables(made))
    if not made.fits:
        warn([
            f"the plan needs {size_text(made.after.peak_bytes)} per device, more than the "
            f"{size_text(made.memory_bytes)} of {machine.name}; use a larger mesh"
        ])  # fmt: skip


@command(app)
def analyze(
    source: Source,
    json_file: JsonOption = None,
    facts: Annotated[
        pathlib.Path | None,
        typer.Option("--facts", help="Write the fact base as text for clingo to this file."),
    ] = None,
) -> None:
    """Print the counts of TARGET's analysis: names, colors, conflicts, groups; and stage times."""
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
    """The user's constraints; raises :class:`toast.errors.PinError` where they do not parse."""
    from toast.space import Constraints

    return Constraints(
        pin=_parted(pin, "--pin", "params*=P('model')", "=P"),
        forbid=_several(forbid, "--forbid", "params*=data"),
        fix=_several(fix, "--fix", "tokens:0=data"),
        keep=keep,
    )


def _parted(given: list[str] | None, option: str, example: str, at: str = "=") -> dict[str, str]:
    """``PATTERN=VALUE`` pairs; a pattern may have ``=`` in it."""
    found: dict[str, str] = {}
    for text in given or ():
        pattern, equals, value = text.rpartition(at)
        if not pattern or not equals:
            raise PinError(f"{option} '{text}': write {example}")
        value = equals.removeprefix("=") + value
        if pattern in found:
            raise PinError(f"{option} {pattern} is given twice: {found[pattern]} and {value}")
        found[pattern] = value
    return found


def _several(given: list[str] | None, option: str, example: str) -> dict[str, list[str]]:
    """``PATTERN=AXES`` pairs; a pattern that is given twice has the axes of both."""
    found: dict[str, list[str]] = {}
    for text in given or ():
        ((pattern, axes),) = _parted([text], option, example).items()
        found.setdefault(pattern, []).extend(axis.strip() for axis in axes.split(","))
    return found


class Compiler(enum.StrEnum):
    """Who judges plans without running them."""

    tpu = "tpu"


@command(app)
def compare(
    source: Source,
    mesh: MeshOption,
    hardware: HardwareOption = "tpu-v5e",
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help="toast; manual, the best of what experts write for a model, and of all "
            "combinations; automap, a search that propagates after every action; alpa, an integer "
            "linear program; shardy, the batch on all axes, and propagation.",
        ),
    ] = "toast,manual,automap,alpa,shardy",
    limit: LimitOption = 60.0,
    budget: BudgetOption = None,
    memory: MemoryOption = None,
    overlap: OverlapOption = Beside.partial,
    pin: PinOption = None,
    forbid: ForbidOption = None,
    fix: FixOption = None,
    keep_constraints: KeepOption = False,
    oracle: Annotated[
        Compiler | None,
        typer.Option("--oracle", help="tpu: XLA's TPU compiler judges every plan as well."),
    ] = None,
    timeout: TimeoutOption = 600,
    seed: SeedOption = 0,
    restarts: RestartsOption = 1,
    processes: ProcessesOption = 1,
    json_file: JsonOption = None,
    html: ReportOption = None,
) -> None:
    """Partition TARGET by TOAST and by other methods; all priced by the same cost model.

    A search that reaches its limit gives the best that it has, and says so. An interrupt ends it
    with the rows so far. The TPU compiler comes with the extra toast-partitioner[tpu].

    Pins and other constraints go to all methods. A plan that does not hold them, as AutoMap's and
    Shardy's may not, has that in its note.
    """
    from toast import compare as stage
    from toast import report
    from toast.errors import PlanError
    from toast.files import check_writable, write_all
    from toast.hardware import Mesh, load
    from toast.search import Settings

    check_writable((json_file, html), PlanError)
    constraints = _constraints(pin, forbid, fix, keep_constraints)
    wanted = stage.chosen(methods)
    parsed, machine = Mesh.parse(mesh), load(hardware)
    memory_bytes = machine.memory_limit_bytes if memory is None else memory * 2**30
    with progress() as show:
        analysis = source.analysis(show)
        try:
            rows, interrupted = stage.compare(
                analysis, parsed, machine, wanted,
                strategies=source.strategies,
                limit=limit, memory_bytes=memory_bytes, overlap=overlap.value,
                constraints=constraints,
                settings=Settings(seed=seed, budget=budget, restarts=restarts, processes=processes),
                oracle=oracle.value if oracle else None, timeout=timeout, progress=show,
            ), False  # fmt: skip
        except stage.Interrupted as interrupt:
            rows, interrupted = interrupt.rows, True
    warn(report.missing_rules(analysis))
    texts: dict[str | pathlib.Path, str] = {}
    if html:
        texts[html] = report.comparison_html(source.marked(rows, hardware))
    if json_file:
        data = {
            "version": 1, "program": analysis.program.name, "mesh": dict(parsed.axes),
            "hardware": machine.name, "memory_bytes": memory_bytes, "limit_seconds": limit,
            "budget_seconds": budget, "overlap": overlap.value,
            "constraints": dataclasses.asdict(constraints),
            "methods": [row.to_dict() for row in rows],
        }  # fmt: skip
        texts[json_file] = json.dumps(data, indent=2, allow_nan=False) + "\n"
    write_all(texts, PlanError)
    console().print(report.comparison_table(analysis, parsed, machine, memory_bytes, rows))
    if interrupted:
        raise KeyboardInterrupt


@command(app)
def models() -> None:
    """List the models that TARGET may name."""
    from toast.models import ZOO
    from toast.tables import Table

    table = Table("name", "what it is")
    table.add_column("parameters", justify="right")
    table.add_column("options")
    for name, entry in ZOO.items():
        parameters = f"{entry.build().parameter_count:,}"
        table.add_row(name, entry.summary, parameters, " ".join(f"--{o}" for o in entry.options))
    console().print(table)
