"""The command line: ``toast plan``, ``compare``, ``analyze``, ``verify``, ``validate`` ..."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import json
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import rich.console
import rich.progress
import rich.table
import typer

from toast.analysis import Analysis
from toast.errors import PinError, ToastError
from toast.space import Constraints
from toast.units import size_text

app = typer.Typer(
    help="The automatic partitioner for JAX: find, explain and run the best sharding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Target = Annotated[
    str,
    typer.Argument(help="A model's name (toast models), a StableHLO file, or module:function."),
]
MeshOption = Annotated[
    str,
    typer.Option(
        "--mesh", help="Axes and sizes: data=4,model=4; @model,data behind it lays data innermost."
    ),
]
HardwareOption = Annotated[
    str, typer.Option("--hardware", help="A name (tpu-v5e) or the path of a hardware file.")
]
ArgOption = Annotated[
    list[str] | None,
    typer.Option("--arg", help="Example argument of a module:function, as f32[8,4]; repeatable."),
]
RulesOption = Annotated[
    list[pathlib.Path] | None,
    typer.Option("--rules", help="A further rule file, or folder of them; repeatable."),
]
JsonOption = Annotated[
    pathlib.Path | None, typer.Option("--json", help="Write everything to this JSON file.")
]
LayersOption = Annotated[int | None, typer.Option("--layers", help="Layers of a model.")]
SequenceOption = Annotated[int | None, typer.Option("--sequence", help="Sequence length.")]
BatchOption = Annotated[int | None, typer.Option("--batch", help="Batch size.")]
EdgesOption = Annotated[int | None, typer.Option("--edges", help="Edges of a graph.")]
ExpertsOption = Annotated[int | None, typer.Option("--experts", help="Experts per layer.")]
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
    bool, typer.Option("--keep-constraints", help="Hold the program's own sharding constraints.")
]
DevicesOption = Annotated[
    int | None,
    typer.Option("--devices", help="Try every mesh of so many devices; in place of --mesh."),
]
RestartsOption = Annotated[
    int, typer.Option("--restarts", min=1, help="Independent searches; the best counts.")
]
ProcessesOption = Annotated[
    int,
    typer.Option(
        "--processes", min=1, help="Searches that run at a time; the plan does not depend on it."
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Same seed, same plan.")]


def _console() -> rich.console.Console:
    # Pipes get wide lines instead of wrapped cells.
    width = None if sys.stdout.isatty() else 160
    return rich.console.Console(width=width, soft_wrap=False)


def _fail(message: str) -> None:
    print(f"toast: {' '.join(message.split())}", file=sys.stderr)


def _errors(command: Callable[..., None]) -> Callable[..., None]:
    """Print a ToastError as one line and exit with code 2."""

    @functools.wraps(command)
    def wrapped(*arguments: Any, **keywords: Any) -> None:
        try:
            command(*arguments, **keywords)
        except ToastError as error:
            _fail(str(error))
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            _fail("interrupted")
            raise typer.Exit(130) from None

    return wrapped


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Any], None]]:
    """A status line on the terminal's error stream while stages run."""
    console = rich.console.Console(stderr=True)
    with console.status("starting") as status:

        def show(event: Any) -> None:
            if isinstance(event, str):
                status.update(event)
            else:
                status.update(
                    f"search: round {event.number + 1}, {event.states} states, "
                    f"best cost {event.cost:.4g}"
                )

        yield show


def _sizes(
    layers: int | None,
    sequence: int | None,
    batch: int | None,
    edges: int | None,
    experts: int | None,
) -> dict[str, int | None]:
    """The options that change a model's size, by name."""
    return {
        "layers": layers, "sequence": sequence, "batch": batch, "edges": edges, "experts": experts,
    }  # fmt: skip


def _analyzed(
    target: str,
    sizes: dict[str, int | None],
    arg: list[str] | None,
    rules: list[pathlib.Path] | None,
    progress: Callable[[Any], None],
    *,
    small: bool = False,
) -> Analysis:
    """The analysis of TARGET, its seconds of lowering included."""
    from toast import api, targets

    progress("lowering")
    begin = time.perf_counter()
    program = targets.load(target, options=sizes, shapes=arg or (), small=small)
    lowering = time.perf_counter() - begin
    analysis = api.analyze(program, rules=rules or (), progress=progress)
    analysis.seconds["lowering"] = lowering
    return analysis


def _warn(lines: list[str]) -> None:
    for line in lines:
        print(f"toast: note: {line}", file=sys.stderr)


def _constraints(
    pin: list[str] | None, forbid: list[str] | None, fix: list[str] | None, keep: bool
) -> Constraints:
    """The user's constraints; raises :class:`toast.errors.PinError` where they do not parse."""
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
    return {
        pattern: [axis.strip() for axis in axes.split(",")]
        for pattern, axes in _parted(given, option, example).items()
    }


class Beside(enum.StrEnum):
    """Which collectives run beside products."""

    none = "none"
    partial = "partial"
    full = "full"


class Resolve(enum.StrEnum):
    """Whether compatible conflicts are resolved alike."""

    compatible = "compatible"
    independent = "independent"


@app.command()
@_errors
def plan(
    target: Target,
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
    budget: Annotated[
        float | None, typer.Option("--budget", min=0.0, help="Seconds the search may take.")
    ] = None,
    overlap: Annotated[
        Beside,
        typer.Option(
            "--overlap",
            help="Collectives that run beside products: none; partial, those of the background "
            "where products are independent of them; full, all.",
        ),
    ] = Beside.partial,
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
    layers: LayersOption = None,
    sequence: SequenceOption = None,
    batch: BatchOption = None,
    edges: EdgesOption = None,
    experts: ExpertsOption = None,
    arg: ArgOption = None,
    rules: RulesOption = None,
    json_file: JsonOption = None,
    output: Annotated[
        pathlib.Path | None,
        typer.Option("-o", "--output", help="Write the StableHLO with Shardy annotations here."),
    ] = None,
) -> None:
    """Find the best sharding of TARGET on a mesh and explain it.

    With --devices in place of --mesh, find the best mesh too.
    """
    from toast import api, report
    from toast.errors import PlanError
    from toast.files import write_all
    from toast.hardware import load
    from toast.search import Settings

    sizes = _sizes(layers, sequence, batch, edges, experts)
    machine = load(hardware)
    api.candidate_meshes(mesh, devices, machine)  # complain before the long work
    with _progress() as progress:
        analysis = _analyzed(target, sizes, arg, rules, progress)
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
            progress=progress,
        )
    _warn(report.missing_rules(analysis))
    texts: dict[str | pathlib.Path, str] = {}
    if json_file:
        texts[json_file] = made.json_text()
    if output:
        texts[output] = made.annotated()
    write_all(texts, PlanError)
    _console().print(report.plan_tables(made))
    if not made.fits:
        _warn([
            f"the plan needs {size_text(made.after.peak_bytes)} per device, more than the "
            f"{size_text(made.memory_bytes)} of {machine.name}; use a larger mesh"
        ])  # fmt: skip


@app.command()
@_errors
def analyze(
    target: Target,
    layers: LayersOption = None,
    sequence: SequenceOption = None,
    batch: BatchOption = None,
    edges: EdgesOption = None,
    experts: ExpertsOption = None,
    arg: ArgOption = None,
    rules: RulesOption = None,
    json_file: JsonOption = None,
    facts: Annotated[
        pathlib.Path | None,
        typer.Option("--facts", help="Write the fact base as text for clingo to this file."),
    ] = None,
) -> None:
    """Print the counts of TARGET's analysis: names, colors, conflicts, groups; and stage times."""
    from toast import report
    from toast.errors import PlanError
    from toast.files import write_all

    sizes = _sizes(layers, sequence, batch, edges, experts)
    with _progress() as progress:
        analysis = _analyzed(target, sizes, arg, rules, progress)
    _warn(report.missing_rules(analysis))
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
    _console().print(report.analysis_table(analysis))


@app.command()
@_errors
def verify(
    target: Target,
    mesh: MeshOption,
    hardware: HardwareOption = "tpu-v5e",
    seed: SeedOption = 0,
    layers: LayersOption = None,
    sequence: SequenceOption = None,
    batch: BatchOption = None,
    edges: EdgesOption = None,
    experts: ExpertsOption = None,
    arg: ArgOption = None,
    rules: RulesOption = None,
) -> None:
    """Plan TARGET (a model in its small form), run it on CPU devices, sharded and not, and compare.

    The plan is made as if links had no latency and memory were scarce, so that a small program is
    sharded as a large one would be.  Exits with code 1 when an output differs.
    """
    from toast.errors import MeshError
    from toast.hardware import Mesh

    sizes = _sizes(layers, sequence, batch, edges, experts)
    parsed = Mesh.parse(mesh)
    if parsed.devices > 256:
        raise MeshError(f"mesh {mesh}: verify runs on at most 256 CPU devices; use a smaller mesh")
    _use_cpu_devices(parsed.devices)
    from toast import api, report
    from toast.hardware import load
    from toast.search import Settings

    with _progress() as progress:
        analysis = _analyzed(target, sizes, arg, rules, progress, small=True)
        made = api.plan(
            analysis, mesh=parsed, hardware=api.small_scale(analysis, parsed, load(hardware)),
            settings=Settings(seed=seed), progress=progress,
        )  # fmt: skip
        progress(f"running {analysis.program.name} on {parsed.devices} devices")
        verification = made.verify(seed=seed)
    _console().print(report.verification_table(made, verification))
    if not verification.equal:
        raise typer.Exit(1)


def _use_cpu_devices(count: int) -> None:
    """Ask XLA for ``count`` CPU devices; must come before jax starts its backends."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's remarks on how it reshards
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [f for f in flags if not f.startswith("--xla_force_host_platform_device_count")]
    flags.append(f"--xla_force_host_platform_device_count={count}")
    os.environ["XLA_FLAGS"] = " ".join(flags)


class Judge(enum.StrEnum):
    """Who judges plans."""

    tpu = "tpu"
    cpu = "cpu"


@app.command()
@_errors
def validate(
    target: Target,
    mesh: MeshOption,
    hardware: HardwareOption = "tpu-v5e",
    oracle: Annotated[
        Judge,
        typer.Option(
            "--oracle",
            help="tpu: the TPU compiler. cpu: run on CPU devices (a model in its small form), for "
            "numbers and kinds of collectives.",
        ),
    ] = Judge.tpu,
    plans: Annotated[
        int, typer.Option("--plans", min=0, help="Single actions and random states, by turns.")
    ] = 8,
    full: Annotated[
        bool,
        typer.Option("--full", help="Let the compiler finish, for the time of its schedule."),
    ] = False,
    plot: Annotated[
        pathlib.Path | None, typer.Option("--plot", help="Write a scatter plot (SVG) here.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds a compile may take.")] = 600,
    seed: SeedOption = 0,
    layers: LayersOption = None,
    sequence: SequenceOption = None,
    batch: BatchOption = None,
    edges: EdgesOption = None,
    experts: ExpertsOption = None,
    arg: ArgOption = None,
    rules: RulesOption = None,
) -> None:
    """Compare predictions with what XLA says of the same plans; no TPU is needed.

    The found plan, the unsharded program, the strategies that experts write for a model, single
    actions and random states. Verdicts are kept in ~/.cache/toast. The TPU compiler comes with the
    extra toast-partitioner[tpu].
    """
    from toast.errors import MeshError, PlanError
    from toast.files import write_all
    from toast.hardware import Mesh, load

    sizes = _sizes(layers, sequence, batch, edges, experts)
    parsed, machine = Mesh.parse(mesh), load(hardware)
    if oracle is Judge.cpu:
        if parsed.devices > 256:
            raise MeshError(f"mesh {mesh}: at most 256 CPU devices; use a smaller mesh")
        if full or plot:
            raise PlanError("--full and --plot are for --oracle tpu; CPU devices only run plans")
        _use_cpu_devices(parsed.devices)
    from toast import api
    from toast import validate as stage
    from toast.models import ZOO

    small = oracle is Judge.cpu
    with _progress() as progress:
        analysis = _analyzed(target, sizes, arg, rules, progress, small=small)
        if small:
            machine = api.small_scale(analysis, parsed, machine)
        found = stage.validate(
            analysis, parsed, machine, oracle=oracle.value, plans=plans,
            strategies=ZOO[target].strategies if target in ZOO else None,
            seed=seed, full=full, timeout=timeout, progress=progress,
        )  # fmt: skip
    if plot:
        write_all({plot: stage.plot(found)}, PlanError)
    _console().print(stage.table(found))


class Compiler(enum.StrEnum):
    """Who judges plans without running them."""

    tpu = "tpu"


@app.command()
@_errors
def compare(
    target: Target,
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
    limit: Annotated[
        float,
        typer.Option(
            "--limit", min=0.0, help="Seconds that AutoMap's search and Alpa's solver may take."
        ),
    ] = 60.0,
    memory: Annotated[
        float | None, typer.Option("--memory", help="Limit per device in GiB.")
    ] = None,
    oracle: Annotated[
        Compiler | None,
        typer.Option("--oracle", help="tpu: XLA's TPU compiler judges every plan as well."),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds a compile may take.")] = 600,
    seed: SeedOption = 0,
    layers: LayersOption = None,
    sequence: SequenceOption = None,
    batch: BatchOption = None,
    edges: EdgesOption = None,
    experts: ExpertsOption = None,
    arg: ArgOption = None,
    rules: RulesOption = None,
    json_file: JsonOption = None,
) -> None:
    """Partition TARGET by TOAST and by other methods; all priced by the same cost model.

    A search that reaches its limit gives the best that it has, and says so. The TPU compiler comes
    with the extra toast-partitioner[tpu].
    """
    from toast import compare as stage
    from toast import report
    from toast.errors import PlanError
    from toast.files import write_all
    from toast.hardware import Mesh, load
    from toast.models import ZOO

    wanted = stage.chosen(methods)
    sizes = _sizes(layers, sequence, batch, edges, experts)
    parsed, machine = Mesh.parse(mesh), load(hardware)
    memory_bytes = machine.memory_limit_bytes if memory is None else memory * 2**30
    with _progress() as progress:
        analysis = _analyzed(target, sizes, arg, rules, progress)
        rows = stage.compare(
            analysis, parsed, machine, wanted,
            strategies=ZOO[target].strategies if target in ZOO else None,
            limit=limit, memory_bytes=memory_bytes, seed=seed,
            oracle=oracle.value if oracle else None, timeout=timeout, progress=progress,
        )  # fmt: skip
    _warn(report.missing_rules(analysis))
    if json_file:
        data = {
            "version": 1, "program": analysis.program.name, "mesh": dict(parsed.axes),
            "hardware": machine.name, "memory_bytes": memory_bytes, "limit_seconds": limit,
            "methods": [row.to_dict() for row in rows],
        }  # fmt: skip
        write_all({json_file: json.dumps(data, indent=2, allow_nan=False) + "\n"}, PlanError)
    _console().print(report.comparison_table(analysis, parsed, machine, memory_bytes, rows))


@app.command()
@_errors
def models() -> None:
    """List the models that TARGET may name."""
    from toast.models import ZOO

    table = rich.table.Table("name", "what it is")
    table.add_column("parameters", justify="right")
    table.add_column("options")
    for name, entry in ZOO.items():
        parameters = f"{entry.build().parameter_count:,}"
        table.add_row(name, entry.summary, parameters, " ".join(f"--{o}" for o in entry.options))
    _console().print(table)


hardware_app = typer.Typer(
    help="Devices: what there are, what is known of them, and how to fit them to measurements.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(hardware_app, name="hardware")
Device = Annotated[
    str, typer.Argument(metavar="NAME", help="A device's name, or the path of a hardware file.")
]


@hardware_app.command("list")
@_errors
def hardware_list() -> None:
    """List the devices that --hardware may name."""
    from toast import report
    from toast.hardware import load, names

    _console().print(report.hardware_list([load(name) for name in names()]))


@hardware_app.command("show")
@_errors
def hardware_show(
    device: Device,
    mesh: Annotated[
        str | None, typer.Option("--mesh", help="Show collectives on this mesh: data=4,model=4.")
    ] = None,
) -> None:
    """Show what is known of a device, and what its collectives cost on a mesh."""
    from toast import report
    from toast.hardware import Mesh, load

    _console().print(report.hardware_tables(load(device), Mesh.parse(mesh) if mesh else None))


@hardware_app.command("calibrate")
@_errors
def hardware_calibrate(
    device: Device,
    collectives: Annotated[
        pathlib.Path,
        typer.Option(
            help="CSV of measured times: columns collective,devices,bytes,seconds, as nccl-tests "
            "counts them."
        ),
    ],
    output: Annotated[
        pathlib.Path | None,
        typer.Option("-o", "--output", help="The file to write; default: NAME-calibrated.toml."),
    ] = None,
    source: Annotated[
        str, typer.Option("--source", help="What the fitted figures are marked with.")
    ] = "Measured",
) -> None:
    """Fit the collectives of a switched device to measured times and write a hardware file."""
    from toast import report
    from toast.errors import HardwareError
    from toast.files import write_all
    from toast.hardware import calibrate, load

    fitted = calibrate.calibrate(load(device), calibrate.read_table(collectives))
    place = output or pathlib.Path(f"{pathlib.Path(device).stem}-calibrated.toml")
    if place.suffix != ".toml":
        raise HardwareError(f"--output {place}: hardware files end in .toml")
    write_all({place: calibrate.file_text(device, fitted, source)}, HardwareError)
    _console().print(report.calibration_table(fitted))
    print(f"written to {place}")


rules_app = typer.Typer(
    help="Sharding rules: what there are, whether they are sound, and how they compare.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(rules_app, name="rules")


@rules_app.command("list")
@_errors
def rules_list(rules: RulesOption = None) -> None:
    """List every op kind and custom call target that has a rule.

    With the kinds of factors it makes, and how many drawn ops it was proven on.
    """
    from toast import prove
    from toast.analysis import rule_entries

    known = prove.record()
    table = rich.table.Table("kind", "file", "factors", "ops proven on")
    for entry in rule_entries(rules or ()):
        name = f"{'custom_call ' if entry.custom_call else ''}{entry.kind}"
        # What is recorded is of the shipped rules.
        row = known.get(name, {}) if entry.shipped else {}
        factors = row.get("factors", "-") if entry.shards else "need-replication"
        table.add_row(name, str(entry.file), factors, row.get("instances", "-"))
    _console().print(table)


@rules_app.command("check")
@_errors
def rules_check(
    paths: Annotated[list[pathlib.Path], typer.Argument(help="Rule files, or folders of them.")],
    on: Annotated[
        str | None, typer.Option("--on", help="Also try the rules on the ops of this TARGET.")
    ] = None,
    arg: ArgOption = None,
) -> None:
    """Check rule files: syntax, predicates, variables, one rule per op, no code, sound factors."""
    from toast import lint, targets

    program = targets.load(on, shapes=arg or (), small=True) if on else None
    count, odd = lint.check(paths, program)
    _warn(list(odd))
    print(f"{count} rule files are sound")


@rules_app.command("annotate")
@_errors
def rules_annotate(
    target: Target,
    output: Annotated[
        pathlib.Path | None, typer.Option("-o", "--output", help="Write here instead of printing.")
    ] = None,
    arg: ArgOption = None,
    rules: RulesOption = None,
) -> None:
    """Write TARGET as StableHLO with our rule on every op, for Shardy's propagation to use."""
    from toast import interchange, targets
    from toast.errors import PlanError
    from toast.files import write_all

    text, count = interchange.annotated(targets.load(target, shapes=arg or ()), rules or ())
    if output:
        write_all({output: text}, PlanError)
        print(f"{count} ops annotated in {output}")
    else:
        print(text)


@rules_app.command("diff")
@_errors
def rules_diff(
    target: Target,
    arg: ArgOption = None,
    rules: RulesOption = None,
) -> None:
    """Compare our rule with Shardy's for every op of TARGET, up to the names of factors.

    Exits with code 1 when some differ.
    """
    from toast import interchange, targets

    program = targets.load(target, shapes=arg or ())
    compared, found = interchange.differences(program, rules or ())
    for difference in found:
        print(f"{difference.kind} at {difference.place}")
        print(f"  ours:     {difference.ours}\n  Shardy's: {difference.shardys}")
    print(f"{compared} ops compared, {len(found)} differ")
    if found:
        raise typer.Exit(1)


@rules_app.command("prove")
@_errors
def rules_prove(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE.lp | TARGET]",
            help="A rule file, proven on drawn ops of its kinds; or a program, on whose ops all "
            "rules are proven (a model in its small form). Default: all shipped rules.",
        ),
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Ops to draw of each kind.")] = 20,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            "--reference",
            help="What a custom call of a program computes: target=module:function; repeatable.",
        ),
    ] = None,
    arg: ArgOption = None,
    rules: RulesOption = None,
    seed: SeedOption = 0,
) -> None:
    """Run ops whole and in shards, split along each factor that can be sharded, and compare.

    Exits with code 1 when some rule is wrong.
    """
    from toast import prove, targets
    from toast.frontend import Program

    table = rich.table.Table("kind", "instances", "factors proven", "wrong", "not run")
    wrong: list[str] = []
    nothing: list[str] = []
    reasons: collections.Counter[str] = collections.Counter()
    with _progress() as progress:
        files = list(rules or ())
        if what is None or what.endswith(".lp"):
            files += [pathlib.Path(what)] if what else []
            kinds, nothing = prove.drawable(files)
            runs = (prove.prove_kind(kind, count, files, seed=seed) for kind in kinds)
            found: Iterable[tuple[Program, tuple[prove.Proof, ...]]] = (
                (run.program, run.proofs) for run in runs
            )
        else:
            references = targets.references(reference or ())
            program = targets.load(what, shapes=arg or (), small=True)
            proofs = prove.prove(program, files, references=references, seed=seed)
            found = [(program, proofs)]
        for program, proofs in found:
            for row in prove.tally(proofs):
                progress(f"running ops: {row.kind}")
                table.add_row(
                    row.kind, *map(str, (row.instances, row.proven, row.wrong, row.skipped))
                )
            reasons.update(p.outcome for p in proofs if not p.wrong and p.outcome != "proven")
            wrong += [
                f"{program.describe(proof.op)}: factor {proof.factor}: {proof.outcome}"
                for proof in proofs
                if proof.wrong
            ]
    _console().print(table)
    _warn(nothing + [f"{number} not run: {reason}" for reason, number in reasons.most_common(5)])
    for line in wrong:
        print(line)
    if wrong:
        raise typer.Exit(1)


def _show_warning(message: Warning | str, *_where: Any, **_more: Any) -> None:
    _warn([str(message)])


def main() -> None:
    """Entry point of the ``toast`` command."""
    warnings.showwarning = _show_warning
    app()
