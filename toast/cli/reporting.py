"""``toast report``."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from toast.cli.common import (
    HardwareOption,
    MeshOption,
    SeedOption,
    Source,
    command,
    group,
    progress,
    warn,
)

app = group("")


@command(app)
def report(
    source: Source,
    mesh: MeshOption,
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
    limit: Annotated[
        float,
        typer.Option(
            "--limit", min=0.0, help="Seconds that AutoMap's search and Alpa's solver may take."
        ),
    ] = 60.0,
    memory: Annotated[
        float | None, typer.Option("--memory", help="Limit per device in GiB.")
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Plan TARGET and write a report: one HTML file that opens offline.

    Arguments and their shardings, actions with reasons, where time and memory go, conflicts, and
    every op with its source line. With --methods, other methods' plans beside it.
    """
    from toast import compare as stage
    from toast import report as reports
    from toast.errors import PlanError
    from toast.files import write_all
    from toast.hardware import Mesh, load

    wanted = stage.chosen(methods)
    parsed, machine = Mesh.parse(mesh), load(hardware)
    with progress() as show:
        analysis = source.analysis(show)
        rows = stage.compare(
            analysis, parsed, machine, wanted,
            strategies=source.strategies, limit=limit,
            memory_bytes=None if memory is None else memory * 2**30, seed=seed, progress=show,
        )  # fmt: skip
        show("writing the report")
        write_all({output: reports.comparison_html(source.marked(rows, hardware))}, PlanError)
    warn(reports.missing_rules(analysis))
    print(f"written to {output}")
