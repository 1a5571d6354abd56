"""``toast hardware``."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from toast.cli.common import JsonOption, command, console, group, progress, use_cpu_devices
from toast.cli.json_files import write_json

app = group("List, show and calibrate hardware descriptions.")
Device = Annotated[str, typer.Argument(metavar="NAME", help="Device name or hardware file.")]


@command(app, "list")
def hardware_list(json_file: JsonOption = None) -> None:
    """List the devices that TOAST describes."""
    from toast import report
    from toast.hardware import load, names

    machines = [load(name) for name in names()]
    write_json(json_file, devices=machines)
    console().print(report.hardware_list(machines))


@command(app, "show")
def hardware_show(
    device: Device,
    mesh: Annotated[
        str | None, typer.Option("--mesh", help="Mesh for the collectives, such as data=4,model=4.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Show a device's figures, what they stand on, and the cost of collectives on a mesh."""
    from toast import report
    from toast.hardware import Mesh, load
    from toast.hardware.sources import figure_sources

    machine, shape = load(device), Mesh.parse(mesh) if mesh else None
    write_json(json_file, device=machine)
    console().print(report.hardware_tables(machine, shape, figure_sources(device)))


@command(app, "calibrate")
def hardware_calibrate(
    device: Device,
    collectives: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="CSV file of measured times with columns collective,devices,bytes,seconds; bytes "
            "are counted as in nccl-tests."
        ),
    ] = None,
    products: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="CSV file of measured times of matrix products with columns m,n,k,dtype,seconds, "
            "or tflops_per_s in place of seconds."
        ),
    ] = None,
    run: Annotated[
        bool,
        typer.Option(
            "--run",
            help="Measure products, memory and collectives on the devices of this machine, and "
            "write the tables beside the hardware file.",
        ),
    ] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, help="Time for --run, in seconds.")
    ] = 120,
    output: Annotated[
        pathlib.Path | None,
        typer.Option(
            "-o", "--output", help="Hardware file to write; default: NAME-calibrated.toml."
        ),
    ] = None,
    source: Annotated[
        str, typer.Option("--source", help="Source to record for the fitted figures.")
    ] = "Measured",
    json_file: JsonOption = None,
) -> None:
    """Fit a device's products and collectives to measurements and write a hardware file.

    Only switched devices have measured collectives. With --run, the devices must be those of the
    hardware file.
    """
    from toast import report
    from toast.errors import HardwareError
    from toast.files import check_writable, write_all
    from toast.hardware import calibrate, load, measured_tables, product_fit

    if run and (collectives or products):
        raise HardwareError("--run measures both tables; remove --collectives and --products")
    if not (run or collectives or products):
        raise HardwareError("nothing to fit; add --collectives FILE, --products FILE or --run")
    machine = load(device)
    times = measured_tables.read_table(collectives) if collectives else None
    gemms = measured_tables.read_products(products) if products else None
    place = output or pathlib.Path(f"{pathlib.Path(device).stem}-calibrated.toml")
    if place.suffix != ".toml":
        raise HardwareError(f"--output {place}: the name of a hardware file must end in .toml")
    tables = {
        kind: place.with_name(f"{place.stem}-{kind}.csv") for kind in ("products", "collectives")
    }
    check_writable((place, *(tables.values() if run else ())), HardwareError)
    texts: dict[str | pathlib.Path, str] = {}
    figures: dict[tuple[str, str], float] = {}
    with progress() as show:
        if run:
            if machine.platform == "cpu":
                use_cpu_devices(machine.interconnect.devices_per_node or 1)
            from toast.evaluation.measure import measure

            found = measure(machine, seconds=seconds, progress=show)
            gemms, times = found.products, found.collectives
            note = f"{source}: {found.devices} {found.device_kind}, toast hardware calibrate --run"
            peak = machine.memory_bytes_per_s / machine.memory_efficiency
            figures["efficiency", "memory"] = min(1.0, found.memory_bytes_per_s / peak)
            for kind, table in (("products", gemms), ("collectives", times)):
                if len(table):
                    texts[tables[kind]] = measured_tables.table_text(table, note)
            write_all(texts, HardwareError)  # also if there are too few rows to fit
            times = times if len(times) else None
        if gemms is not None:
            show("fitting products")
            fitted_products = product_fit.calibrate_products(machine, gemms)
            figures |= fitted_products.figures
        fitted = None
        if times is not None:
            fitted = calibrate.calibrate(machine, times, progress=show)
    text = calibrate.file_text(device, fitted, source, figures)
    write_all({place: text}, HardwareError)
    errors = {
        "products": None if gemms is None else fitted_products.errors.to_dict("records"),
        "collectives": None if fitted is None else fitted.errors.to_dict("records"),
    }
    written = [*texts, place]
    write_json(
        json_file, figures={".".join(filter(None, at)): v for at, v in figures.items()},
        errors=errors, written=written,
    )  # fmt: skip
    if gemms is not None:
        console().print(report.product_calibration_table(fitted_products))
    if fitted is not None:
        console().print(report.calibration_table(fitted))
    for path in written:
        print(f"written to {path}")
