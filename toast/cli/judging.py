"""``toast verify`` and ``validate``: what XLA says of plans."""

from __future__ import annotations

import enum
import pathlib
from typing import Annotated

import typer

from toast.cli.common import (
    HardwareOption,
    MeshOption,
    SeedOption,
    Source,
    TimeoutOption,
    command,
    console,
    group,
    progress,
    use_cpu_devices,
)

app = group("")


@command(app)
def verify(
    source: Source,
    mesh: MeshOption,
    hardware: HardwareOption = "tpu-v5e",
    seed: SeedOption = 0,
) -> None:
    """Plan TARGET (a model in its small form), run it on CPU devices, sharded and not, and compare.

    The plan is made as if links had no latency and memory were scarce, so that a small program is
    sharded as a large one would be.  Exits with code 1 when an output differs.
    """
    from toast.errors import MeshError
    from toast.hardware import Mesh

    parsed = Mesh.parse(mesh)
    if parsed.devices > 256:
        raise MeshError(f"mesh {mesh}: verify runs on at most 256 CPU devices; use a smaller mesh")
    use_cpu_devices(parsed.devices)
    from toast import api, report
    from toast.hardware import load
    from toast.search import Settings

    with progress() as show:
        analysis = source.analysis(show, small=True)
        made = api.plan(
            analysis, mesh=parsed, hardware=api.small_scale(analysis, parsed, load(hardware)),
            settings=Settings(seed=seed), progress=show,
        )  # fmt: skip
        show(f"running {analysis.program.name} on {parsed.devices} devices")
        verification = made.verify(seed=seed)
    console().print(report.verification_table(made, verification))
    if not verification.equal:
        raise typer.Exit(1)


class Judge(enum.StrEnum):
    """Who judges plans."""

    tpu = "tpu"
    cpu = "cpu"


@command(app)
def validate(
    source: Source,
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
    timeout: TimeoutOption = 600,
    seed: SeedOption = 0,
) -> None:
    """Compare predictions with what XLA says of the same plans; no TPU is needed.

    The found plan, the unsharded program, the strategies that experts write for a model, single
    actions and random states. Verdicts are kept in ~/.cache/toast. The TPU compiler comes with the
    extra toast-partitioner[tpu].
    """
    from toast.errors import MeshError, PlanError
    from toast.files import check_writable, write_all
    from toast.hardware import Mesh, load

    parsed, machine = Mesh.parse(mesh), load(hardware)
    check_writable((plot,), PlanError)
    if oracle is Judge.cpu:
        if parsed.devices > 256:
            raise MeshError(f"mesh {mesh}: at most 256 CPU devices; use a smaller mesh")
        if full or plot:
            raise PlanError("--full and --plot are for --oracle tpu; CPU devices only run plans")
        use_cpu_devices(parsed.devices)
    from toast import api
    from toast import validate as stage

    small = oracle is Judge.cpu
    with progress() as show:
        analysis = source.analysis(show, small=small)
        if small:
            machine = api.small_scale(analysis, parsed, machine)
        found = stage.validate(
            analysis, parsed, machine, oracle=oracle.value, plans=plans,
            strategies=source.strategies,
            seed=seed, full=full, timeout=timeout, progress=show,
        )  # fmt: skip
    if plot:
        write_all({plot: stage.plot(found)}, PlanError)
    console().print(stage.table(found))
