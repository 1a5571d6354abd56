"""Terminal tables of hardware."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from toast.hardware import COLLECTIVES, Collectives, Hardware, Mesh
from toast.hardware.calibrate import Calibration
from toast.hardware.product_fit import ProductCalibration
from toast.text_tables import TextTable
from toast.units import rate_text, size_text, time_text

#: The sizes in the table of collectives, in bytes.
_SIZES = (2**20, 2**26)


def hardware_list(machines: Iterable[Hardware]) -> RenderableType:
    """The output of ``toast hardware list``; rates include the efficiencies."""
    table = TextTable(
        "name", "description", "matrix products", "memory", "bandwidth", "links", "max devices",
        title="Devices (achievable rates)", title_justify="left",
    )  # fmt: skip
    for machine in machines:
        link = machine.interconnect
        shape = (
            f"{link.dimensions}D torus"
            if link.topology == "torus"
            else f"nodes of {link.devices_per_node}"
        )
        halves = [dtype for dtype in ("bf16", "f16") if dtype in machine.flops_per_s]
        dtype = (*halves, *machine.flops_per_s)[0]
        table.add_row(
            machine.name, machine.description,
            f"{dtype} {machine.peak(dtype) / 1e12:.4g} TFLOP/s",
            size_text(machine.memory_capacity_bytes), rate_text(machine.memory_bytes_per_s),
            f"{shape}, {rate_text(link.bandwidth_bytes_per_s)}", str(machine.max_devices),
        )  # fmt: skip
    return table


def hardware_tables(machine: Hardware, mesh: Mesh | None = None) -> RenderableType:
    """The output of ``toast hardware show``, with collectives on ``mesh`` or on a default mesh."""
    link = machine.interconnect
    table = TextTable("figure", "value", title=f"{machine.name}: {machine.description}")
    for dtype, flops in machine.flops_per_s.items():
        reached = flops * machine.matmul_efficiency
        table.add_row(f"{dtype} products", f"{reached / 1e12:.4g} of {flops / 1e12:.4g} TFLOP/s")
    if machine.attention_efficiency is not None:
        table.add_row("attention", f"{machine.attention_efficiency:.4g} of the peak")
    if machine.products.units > 1:
        table.add_row("  tiles at once", str(machine.products.units))
    if machine.product_latency_s:
        table.add_row("a product, besides", time_text(machine.product_latency_s))
    if machine.overlap_efficiency < 1:
        cost = 1 - machine.overlap_efficiency
        table.add_row("collectives beside products", f"take {cost:.0%} of their time")
    table.add_row("memory", size_text(machine.memory_capacity_bytes))
    table.add_row("  for one program", size_text(machine.memory_limit_bytes))
    table.add_row("  bandwidth", rate_text(machine.memory_bytes_per_s))
    if machine.allocator_efficiency < 1:
        table.add_row("  in use at the peak", f"{machine.allocator_efficiency:.0%}")
    if machine.host_bytes_per_s < math.inf:
        table.add_row("  to the host, one direction", rate_text(machine.host_bytes_per_s))
    table.add_row("topology", link.topology)
    if link.topology == "torus":
        table.add_row("  dimensions", str(link.dimensions))
        table.add_row("  wrap-around links from", f"{link.wraparound_from} devices")
        table.add_row("  link, one direction", rate_text(link.bandwidth_bytes_per_s))
        table.add_row("  step", time_text(link.latency_s))
        default = "x=4,y=4" if link.dimensions == 2 else "x=4,y=4,z=4"
    else:
        table.add_row("  devices per node", str(link.devices_per_node))
        table.add_row("  link in a node", rate_text(link.bandwidth_bytes_per_s))
        table.add_row("  step in a node", time_text(link.latency_s))
        table.add_row("  network, per device", rate_text(link.network_bandwidth_bytes_per_s))
        table.add_row("  step between nodes", time_text(link.network_latency_s))
        default = f"x={link.devices_per_node}"
    if mesh is None and Mesh.parse(default).devices > machine.max_devices:
        default = f"x={machine.max_devices}"
    table.add_row("largest system", f"{machine.max_devices} devices")
    return Group(table, _collectives(machine, mesh or Mesh.parse(default)))


def _collectives(machine: Hardware, mesh: Mesh) -> TextTable:
    costs = Collectives(machine, mesh)
    table = TextTable(
        "collective", "axes",
        *map(size_text, _SIZES), "algorithm at each size",
        title=f"Collectives on {mesh}",
    )  # fmt: skip
    real = [name for name, size in mesh.real.axes if size > 1]
    for kind in COLLECTIVES:
        for count in range(1, len(real) + 1):
            for axes in itertools.combinations(real, count):
                chosen = [costs.cheapest(kind, size, axes) for size in _SIZES]
                table.add_row(
                    kind, ", ".join(axes),
                    *(time_text(a.seconds(s)) for a, s in zip(chosen, _SIZES, strict=True)),
                    "; ".join(dict.fromkeys(a.name for a in chosen)),
                )  # fmt: skip
    return table


def calibration_table(fitted: Calibration) -> RenderableType:
    """The output of ``toast hardware calibrate``: the errors of the fit."""
    table = TextTable("collective", "devices", "bytes", "rows", "mean error", "worst error")
    for row in fitted.errors.to_dict("records"):
        table.add_row(
            str(row["collective"]), str(row["devices"]), str(row["size"]), str(row["rows"]),
            f"{row['mean']:.1%}", f"{row['max']:.1%}",
        )  # fmt: skip
    kinds = set(fitted.errors["collective"])
    lines = Text(f"{sum(m.kind in kinds for m in fitted.measured)} algorithms fitted")
    return Group(table, lines)


def product_calibration_table(fitted: ProductCalibration) -> RenderableType:
    """The fitted figures of products, and the errors of the fit."""
    table = TextTable("products", "FLOPs", "rows", "mean error", "worst error")
    for row in fitted.errors.to_dict("records"):
        table.add_row(
            str(row["dtype"]), str(row["flops"]), str(row["rows"]),
            f"{row['mean']:.1%}", f"{row['max']:.1%}",
        )  # fmt: skip
    figures = (
        f"{'.'.join(filter(None, place))} = {value:.3g}" for place, value in fitted.figures.items()
    )
    return Group(table, Text(f"fitted: {', '.join(figures)}"))
