"""``toast verify`` and ``validate``: check plans with XLA."""

from __future__ import annotations

import enum
import pathlib
from typing import Annotated

import typer

from toast.cli.common import (
    HardwareOption,
    JsonOption,
    LoweringOption,
    MeshOption,
    Partitioner,
    SeedOption,
    Source,
    TimeoutOption,
    command,
    console,
    deadline,
    group,
    progress,
    use_cpu_devices,
)
from toast.cli.json_files import write_json

app = group("")


@command(app)
def verify(
    source: Source,
    mesh: MeshOption,
    hardware: HardwareOption = "tpu-v5e",
    timeout: Annotated[
        float, typer.Option("--timeout", help="Time limit of the run in seconds.")
    ] = 600,
    seed: SeedOption = 0,
    lowering: LoweringOption = Partitioner.xla,
    json_file: JsonOption = None,
) -> None:
    """Run TARGET sharded and unsharded and compare the outputs.

    The program runs on CPU devices. A model is planned and run in its small form. The search
    assumes links without latency and scarce memory, so that a small program is sharded like a large
    one. Exits with code 1 if an output differs, or all outputs are NaN.
    """
    from toast.errors import MeshError
    from toast.hardware import Mesh

    parsed = Mesh.parse(mesh)
    if parsed.devices > 256:
        raise MeshError(f"mesh {mesh}: toast verify runs at most 256 devices; use a smaller mesh")
    use_cpu_devices(parsed.devices)
    from toast import api, report
    from toast.hardware import load
    from toast.search import Settings

    with progress() as show:
        analysis = source.analysis(show, small=True, partitioner=lowering.value)
        plan = api.plan(
            analysis, mesh=parsed, hardware=api.small_scale(analysis, parsed, load(hardware)),
            settings=Settings(seed=seed), progress=show,
        )  # fmt: skip
        name = analysis.program.name
        show(f"running {name} on {parsed.devices} devices")
        with deadline(timeout, f"{name}: running it"):
            verification = plan.verify(seed=seed)
    write_json(
        json_file, program=name, mesh=dict(parsed.axes), equal=verification.equal,
        outputs=verification.outputs, collectives=verification.collectives,
        predicted=plan.after.collectives,
    )  # fmt: skip
    console().print(report.verification_table(plan, verification))
    if not verification.equal:
        raise typer.Exit(1)


class Reference(enum.StrEnum):
    """The reference that plans are compared with."""

    tpu = "tpu"
    cpu = "cpu"
    gpu = "gpu"


@command(app)
def validate(
    source: Source,
    mesh: MeshOption,
    hardware: HardwareOption = "tpu-v5e",
    oracle: Annotated[
        Reference,
        typer.Option(
            "--oracle",
            help="tpu: compile with XLA's TPU compiler. cpu: run on CPU devices (a model in its "
            "small form) and compare the collectives. gpu: compile for the GPUs of this machine, "
            "which must be those of --hardware, and time the plans.",
        ),
    ] = Reference.tpu,
    plans: Annotated[
        int,
        typer.Option(
            "--plans",
            min=0,
            help="Number of additional plans, alternately single actions and random states.",
        ),
    ] = 8,
    full: Annotated[
        bool,
        typer.Option("--full", help="Compile to the end, to compare step times as well."),
    ] = False,
    plot: Annotated[
        pathlib.Path | None, typer.Option("--plot", help="Write a scatter plot (SVG) to this file.")
    ] = None,
    timeout: TimeoutOption = 600,
    seed: SeedOption = 0,
    lowering: LoweringOption = Partitioner.xla,
    json_file: JsonOption = None,
) -> None:
    """Compare predictions with XLA's results for the same plans.

    No TPU is needed. The plans are TOAST's, the unsharded program, the expert strategies of a
    model, single actions and random states. Results are cached in ~/.cache/toast. The TPU compiler
    needs the extra toast-partitioner[tpu].
    """
    from toast.errors import MeshError, PlanError
    from toast.files import check_writable, write_all
    from toast.hardware import Mesh, load

    parsed, machine = Mesh.parse(mesh), load(hardware)
    check_writable((plot,), PlanError)
    if oracle is Reference.cpu:
        if parsed.devices > 256:
            raise MeshError(
                f"mesh {mesh}: --oracle cpu runs at most 256 devices; use a smaller mesh"
            )
        if full or plot:
            raise PlanError("--full and --plot need --oracle tpu; remove them, or add --oracle tpu")
        use_cpu_devices(parsed.devices)
    from toast import api
    from toast.evaluation import validate as stage

    if oracle is Reference.gpu:  # before minutes of analysis
        from toast.evaluation.oracle import check_devices

        check_devices(machine, parsed)
    small = oracle is Reference.cpu
    with progress() as show:
        analysis = (source if small else source.on(machine)).analysis(
            show, small=small, partitioner=lowering.value
        )
        if small:
            machine = api.small_scale(analysis, parsed, machine)
        validation = stage.validate(
            analysis, parsed, machine, oracle=oracle.value, lowering=lowering.value,
            plans=plans, strategies=source.strategies, seed=seed, full=full, timeout=timeout,
            progress=show,
        )  # fmt: skip
    if plot:
        write_all({plot: stage.plot(validation)}, PlanError)
    write_json(
        json_file, program=analysis.program.name, mesh=dict(parsed.axes), hardware=machine.name,
        memory_bytes=validation.memory_bytes, plans=validation.rows,
    )  # fmt: skip
    console().print(stage.table(validation))
