"""``toast hardware``."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from toast.cli.common import command, console, group, progress

app = group("List, show and calibrate hardware descriptions.")
Device = Annotated[str, typer.Argument(metavar="NAME", help="Device name or hardware file.")]


@command(app, "list")
def hardware_list() -> None:
    """List the devices that TOAST describes."""
    from toast import report
    from toast.hardware import load, names

    console().print(report.hardware_list([load(name) for name in names()]))


@command(app, "show")
def hardware_show(
    device: Device,
    mesh: Annotated[
        str | None, typer.Option("--mesh", help="Mesh for the collectives, such as data=4,model=4.")
    ] = None,
) -> None:
    """Show a device's figures and the cost of collectives on a mesh."""
    from toast import report
    from toast.hardware import Mesh, load

    console().print(report.hardware_tables(load(device), Mesh.parse(mesh) if mesh else None))


@command(app, "calibrate")
def hardware_calibrate(
    device: Device,
    collectives: Annotated[
        pathlib.Path,
        typer.Option(
            help="CSV file of measured times with columns collective,devices,bytes,seconds; bytes "
            "are counted as in nccl-tests."
        ),
    ],
    output: Annotated[
        pathlib.Path | None,
        typer.Option(
            "-o", "--output", help="Hardware file to write; default: NAME-calibrated.toml."
        ),
    ] = None,
    source: Annotated[
        str, typer.Option("--source", help="Source to record for the fitted figures.")
    ] = "Measured",
) -> None:
    """Fit the collectives of a switched device to measurements and write a hardware file."""
    from toast import report
    from toast.errors import HardwareError
    from toast.files import check_writable, write_all
    from toast.hardware import calibrate, load

    machine, times = load(device), calibrate.read_table(collectives)
    place = output or pathlib.Path(f"{pathlib.Path(device).stem}-calibrated.toml")
    if place.suffix != ".toml":
        raise HardwareError(f"--output {place}: the name of a hardware file must end in .toml")
    check_writable((place,), HardwareError)
    with progress() as show:
        fitted = calibrate.calibrate(machine, times, progress=show)
    write_all({place: calibrate.file_text(device, fitted, source)}, HardwareError)
    console().print(report.calibration_table(fitted))
    print(f"written to {place}")
