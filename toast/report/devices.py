"""Terminal tables of hardware."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from toast.boundary.printable import printable
from toast.hardware import (
    ASYNCHRONOUS,
    COLLECTIVES,
    Algorithm,
    Collectives,
    Hardware,
    Interconnect,
    Measured,
    Mesh,
)
from toast.hardware.calibrate import Calibration
from toast.hardware.network_axes import network_axes
from toast.hardware.product_fit import ProductCalibration
from toast.hardware.sources import FigureSources
from toast.report.price_basis import price_basis
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
    table.spare("description")
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


def hardware_tables(
    machine: Hardware, mesh: Mesh | None = None, sources: FigureSources | None = None
) -> RenderableType:
    """The output of ``toast hardware show``, with collectives on ``mesh`` or on a default mesh.

    ``sources`` are those of the hardware file; figures without any have an empty cell.
    """
    link, stated = machine.interconnect, sources or FigureSources()
    table = TextTable(
        "figure", "value", "stands on", title=f"{machine.name}: {machine.description}"
    )

    def add(figure: str, value: str, *keys: tuple[str, str]) -> None:
        table.add_row(figure, value, stated.of(*keys))

    for dtype, flops in machine.flops_per_s.items():
        reached = flops * machine.matmul_efficiency
        add(
            f"{dtype} products", f"{reached / 1e12:.4g} of {flops / 1e12:.4g} TFLOP/s",
            ("flops_per_s", dtype), ("efficiency", "matmul"),
        )  # fmt: skip
    if machine.attention_efficiency is not None:
        share = f"{machine.attention_efficiency:.4g} of the peak"
        add("attention", share, ("efficiency", "attention"))
    if machine.products.units > 1:
        add("  tiles at once", str(machine.products.units), ("products", "units"))
    if machine.products.results_per_s < math.inf:
        results = f"{machine.products.results_per_s:.3g} per second"
        add("  elements of results", results, ("tile", "results_per_s"))
    if machine.product_latency_s:
        latency = time_text(machine.product_latency_s)
        add("a product, besides", latency, ("", "product_latency_s"))
    if machine.kernel_latency_s:
        latency = time_text(machine.kernel_latency_s)
        add("another kernel, besides", latency, ("", "kernel_latency_s"))
    if waited := {*ASYNCHRONOUS} - {*machine.background}:
        names = ", ".join(sorted(name.replace("_", "-") + "s" for name in waited))
        add("products wait for", names, ("", "background"))
    if machine.overlap_efficiency < 1:
        cost = 1 - machine.overlap_efficiency
        beside = f"take {cost:.0%} of their time"
        add("collectives beside products", beside, ("efficiency", "overlap"))
    add("memory", size_text(machine.memory_capacity_bytes), ("memory", "capacity_bytes"))
    add("  for one program", size_text(machine.memory_limit_bytes), ("memory", "limit_bytes"))
    add(
        "  bandwidth", rate_text(machine.memory_bytes_per_s),
        ("memory", "bandwidth_bytes_per_s"), ("efficiency", "memory"),
    )  # fmt: skip
    if machine.single_op_share < 1:
        rate = rate_text(machine.memory_bytes_per_s * machine.single_op_share)
        add("  in kernels of one op", rate, ("efficiency", "single_op"))
    if machine.allocator_efficiency < 1:
        used = f"{machine.allocator_efficiency:.0%}"
        add("  in use at the peak", used, ("efficiency", "allocator"))
    if machine.has_host_link:
        add(
            "  to the host, one direction", rate_text(machine.host_bytes_per_s),
            ("host", "bandwidth_bytes_per_s"), ("efficiency", "host"),
        )  # fmt: skip
    default = _add_links(link, add)
    if mesh is None and Mesh.parse(default).devices > machine.max_devices:
        default = f"x={machine.max_devices}"
    add("largest system", f"{machine.max_devices} devices", ("", "max_devices"))
    if machine.power_w is not None:
        add("power, at most", f"{machine.power_w:g} W", ("", "power_w"))
    for network in machine.networks:
        slices = f"axis {network.axis}, at most {network.max_slices}"
        add("slices on a network", slices, ("network", "max_slices"))
        add(
            "  of a device, one direction", rate_text(network.bandwidth_bytes_per_s),
            ("network", "bandwidth_bytes_per_s"), ("efficiency", "link"),
        )  # fmt: skip
        add("  step", time_text(network.latency_s), ("network", "latency_s"))
    parts: list[RenderableType] = [table, *map(Text, price_basis(machine))]
    if stated.sources:
        lines = (f"  {s.tag}: {s.title}, {s.address}" for s in stated.sources)
        parts.append(Text("\n".join(["Sources", *map(printable, lines)])))
    return Group(*parts, _collectives(machine, mesh or Mesh.parse(default), stated))


def _add_links(link: Interconnect, add: Callable[..., None]) -> str:
    """Adds the rows of the links; returns the default mesh for the collectives."""

    def of(*keys: str) -> Iterator[tuple[str, str]]:
        return (("interconnect", key) for key in keys)

    efficiency = ("efficiency", "link")
    add("topology", link.topology)
    if link.topology == "torus":
        add("  dimensions", str(link.dimensions), *of("dimensions"))
        ends = f"{link.wraparound_from} devices"
        add("  wrap-around links from", ends, *of("wraparound_from"))
        rate = rate_text(link.bandwidth_bytes_per_s)
        add("  link, one direction", rate, *of("link_bandwidth_bytes_per_s"), efficiency)
        add("  step", time_text(link.latency_s), *of("latency_s"))
        return "x=4,y=4" if link.dimensions == 2 else "x=4,y=4,z=4"
    add("  devices per node", str(link.devices_per_node), *of("devices_per_node"))
    rate = rate_text(link.bandwidth_bytes_per_s)
    add("  link in a node", rate, *of("node_bandwidth_bytes_per_s"), efficiency)
    add("  step in a node", time_text(link.latency_s), *of("node_latency_s"))
    rate = rate_text(link.network_bandwidth_bytes_per_s)
    add("  network, per device", rate, *of("network_bandwidth_bytes_per_s"), efficiency)
    add("  step between nodes", time_text(link.network_latency_s), *of("network_latency_s"))
    return f"x={link.devices_per_node}"


def _collectives(machine: Hardware, mesh: Mesh, stated: FigureSources) -> TextTable:
    costs = Collectives(machine, mesh)
    table = TextTable(
        "collective", "axes",
        *map(size_text, _SIZES), "algorithm at each size", "stands on",
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
                    stated.of(*_figures_of(machine, mesh.real, kind, axes, chosen)),
                )  # fmt: skip
    return table


def _figures_of(
    machine: Hardware, mesh: Mesh, kind: str, axes: Sequence[str], chosen: Sequence[Algorithm]
) -> Iterator[tuple[str, str]]:
    """The figures of the hardware file from which the time of a collective follows."""
    over = {name for _, names in network_axes(machine, mesh.names) for name in names}
    inside = [name for name in axes if name not in over]
    if over.intersection(axes):
        yield from _NETWORK
    if machine.interconnect.topology == "torus":
        yield from _LINKS if inside else ()
    elif inside:
        yield from _on_switch(machine, mesh, kind, inside, chosen)


#: Figures of a file by table and key: of the network between slices, of links between chips, inside
#: a node and between nodes.
_NETWORK = (("network", "bandwidth_bytes_per_s"), ("network", "latency_s"), ("efficiency", "link"))
_LINKS = (
    ("interconnect", "link_bandwidth_bytes_per_s"), ("interconnect", "latency_s"),
    ("efficiency", "link"),
)  # fmt: skip
_IN_NODES = (
    ("interconnect", "node_bandwidth_bytes_per_s"), ("interconnect", "node_latency_s"),
    ("efficiency", "link"),
)  # fmt: skip
_BETWEEN_NODES = (
    ("interconnect", "network_bandwidth_bytes_per_s"), ("interconnect", "network_latency_s"),
    ("efficiency", "link"),
)  # fmt: skip


def _on_switch(
    machine: Hardware, mesh: Mesh, kind: str, axes: Sequence[str], chosen: Sequence[Algorithm]
) -> Iterator[tuple[str, str]]:
    """The figures of a collective on axes of nodes, which devices fill from the last axis on."""
    most, inner = machine.interconnect.devices_per_node, 1
    in_node = between = False
    for number in reversed(mesh.placed):
        name, size = mesh.axes[number]
        in_node |= name in axes and inner < most
        between |= name in axes and inner * size > most
        inner *= size
    # Sums of two levels are scattered inside a node, and gathered.
    parts = ("reduce_scatter", "all_gather") if kind == "all_reduce" and between else (kind,)
    two_levels = [not between or "two-level" in line.name for line in chosen]
    measured = {line.kind for line in machine.measured}
    for part in parts if in_node and any(two_levels) else ():
        keys = (field.name for field in dataclasses.fields(Measured))
        yield from ((f"collective.{part}", key) for key in keys) if part in measured else _IN_NODES
    if in_node and not all(two_levels):
        yield from _IN_NODES
    if between:
        yield from _BETWEEN_NODES


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
