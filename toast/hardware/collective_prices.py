"""What collectives cost on a mesh: the algorithms that its links allow, the cheapest chosen.

The time of every algorithm is a line: a latency, and seconds per byte.  So what a group of devices
needs for a collective is the least of a few lines, and one table per mesh holds those of every
collective on every product of axes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from toast.errors import MeshError
from toast.hardware.description import Hardware, Interconnect
from toast.hardware.links import MeshOnLinks, Ring, lay_out
from toast.hardware.mesh import Mesh

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Collectives by the names StableHLO gives them.  Their bytes are those that ``nccl-tests`` counts:
#: of an all-gather the gathered result, of a reduce-scatter the operand, of the others what one
#: device holds (of a collective-permute: sends).
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One way to run a collective on one group of devices."""

    name: str
    latency_s: float
    seconds_per_byte: float

    def seconds(self, size: float) -> float:
        """Time for ``size`` bytes."""
        return self.latency_s + size * self.seconds_per_byte


class Collectives:
    """The time of every collective on every product of axes of a mesh laid on hardware."""

    def __init__(self, hardware: Hardware, mesh: Mesh) -> None:
        """Raises :class:`toast.errors.MeshError` where the mesh is larger than the system."""
        check_size(hardware, mesh)
        self.mesh = mesh
        layout = lay_out(hardware.interconnect, mesh)
        masks = list(itertools.product((False, True), repeat=len(mesh.axes)))
        self._groups = [
            [_algorithms(hardware, kind, layout, tuple(reversed(mask))) for mask in masks]
            for kind in COLLECTIVES
        ]
        least = [[_envelope(lines) for lines in kind] for kind in self._groups]
        most = max(len(lines) for kind in least for lines in kind)
        shape = len(COLLECTIVES), len(masks), most
        self._latency: Floats = np.full(shape, np.inf)
        self._slope: Floats = np.zeros(shape)
        #: Devices on each group of axes.
        self.devices: Ints = np.array([
            math.prod(n for n, here in zip(mesh.sizes, reversed(mask), strict=True) if here)
            for mask in masks
        ])  # fmt: skip
        part = (self.devices - 1) / self.devices
        self._sent: Floats = np.stack([part, 2 * part, part, part, np.ones(len(masks))])
        for k, kind in enumerate(least):
            for g, lines in enumerate(kind):
                for i, line in enumerate(lines):
                    self._latency[k, g, i] = line.latency_s
                    self._slope[k, g, i] = line.seconds_per_byte

    def seconds(self, kind: int, size: Floats, group: npt.NDArray[np.integer[Any]]) -> Floats:
        """Time of a collective with the cheapest algorithm; 0 on a group of one device.

        ``kind`` is a place in :data:`COLLECTIVES`; ``size`` (bytes) and ``group`` have one shape.
        In the number of a group, axis ``a`` of the mesh is bit ``a``.
        """
        found = self._latency[kind, group, 0] + size * self._slope[kind, group, 0]
        for line in range(1, self._latency.shape[2]):
            other = self._latency[kind, group, line] + size * self._slope[kind, group, line]
            np.minimum(found, other, out=found)
        return np.asarray(found)

    def sent_share(self, kind: int, group: npt.NDArray[np.integer[Any]]) -> Floats:
        """Bytes that a device sends round a ring, over those that the collective counts."""
        return np.asarray(self._sent[kind, group])

    def algorithms(self, kind: str, axes: Sequence[str]) -> tuple[Algorithm, ...]:
        """All algorithms for a collective on the product of ``axes``."""
        group = sum(1 << self.mesh.names.index(axis) for axis in axes)
        return tuple(self._groups[COLLECTIVES.index(kind)][group])

    def cheapest(self, kind: str, size: float, axes: Sequence[str]) -> Algorithm:
        """The algorithm that :meth:`seconds` reckons with for ``size`` bytes."""
        return min(self.algorithms(kind, axes), key=lambda line: line.seconds(size))


def _envelope(lines: Sequence[Algorithm]) -> list[Algorithm]:
    """The algorithms that are the cheapest for some size."""
    found: list[Algorithm] = []
    for line in sorted(lines, key=lambda line: (line.seconds_per_byte, line.latency_s)):
        if found and line.latency_s >= found[-1].latency_s:
            continue
        # The last is the cheapest between where it meets this one and where the one before.
        while len(found) > 1 and _meet(found[-1], line) >= _meet(found[-2], found[-1]):
            found.pop()
        found.append(line)
    return found


def _meet(flat: Algorithm, steep: Algorithm) -> float:
    """Bytes beyond which ``flat`` is the cheaper one."""
    return (flat.latency_s - steep.latency_s) / (steep.seconds_per_byte - flat.seconds_per_byte)


def check_size(hardware: Hardware, mesh: Mesh | int) -> None:
    """Raises :class:`toast.errors.MeshError` where the mesh is larger than the system.

    Instead of a mesh it may be a number of devices.
    """
    if isinstance(mesh, Mesh):
        devices, asked, remedy = mesh.devices, f"mesh {mesh} has ", "a smaller mesh"
    else:
        devices, asked, remedy = mesh, "", "fewer"
    if devices > hardware.max_devices:
        raise MeshError(
            f"{asked}{devices} devices; a {hardware.name} system has at most "
            f"{hardware.max_devices}; use {remedy}"
        )


def _algorithms(
    hardware: Hardware, kind: str, layout: MeshOnLinks, mask: tuple[bool, ...]
) -> list[Algorithm]:
    link = hardware.interconnect
    if link.topology == "torus":
        rings = layout.rings(mask)
        return list(_on_torus(kind, rings, link)) if rings else [Algorithm("none", 0.0, 0.0)]
    inside, outside = layout.nodes(mask)
    if inside * outside == 1:
        return [Algorithm("none", 0.0, 0.0)]
    return list(_on_switch(kind, inside, outside, hardware))


def _on_torus(kind: str, rings: Sequence[Ring], link: Interconnect) -> Iterator[Algorithm]:
    """Algorithms over the rings and lines that a group spans, one per torus dimension.

    **All-gather** of ``b`` bytes, **reduce-scatter** (the same backwards), **all-reduce** (both):
    a device receives ``(n - 1) / n * b`` over the links that it has.  Once round a ring it has one;
    both ways round two; at the end of an open line one.  Over several dimensions the data is split
    and each part starts on another dimension, so that the links of all are busy.

    **All-to-all**: every device has ``b`` bytes, ``b / n`` for each.  Cut a ring of ``m`` in two
    halves: each way ``m / 2 * m / 2`` of its pairs send, over the 2 links that the cut meets (1 on
    an open line): ``b * m / 8`` bytes per link, in general ``b * floor(m * m / 4) / m`` over those
    links.  Shortest paths reach this bound; the dimension with the most decides.
    """
    n = math.prod(ring.devices for ring in rings)
    part = (n - 1) / n
    if kind == "collective_permute":
        yield Algorithm("to the neighbour", link.latency_s, 1 / min(r.bandwidth for r in rings))
        return
    if kind == "all_to_all":
        slope = max(
            r.devices**2 // 4 / r.devices / (r.bandwidth * (2 if r.closed else 1)) for r in rings
        )
        hops = sum(r.devices // 2 if r.closed else r.devices - 1 for r in rings)
        yield Algorithm("shortest paths", link.latency_s * hops, slope)
        return
    both = 2 if kind == "all_reduce" else 1
    closed = all(ring.closed for ring in rings)
    if closed:
        hops, rate = sum(r.devices - 1 for r in rings), sum(r.bandwidth for r in rings)
        yield Algorithm("ring", both * link.latency_s * hops, both * part / rate)
    hops = sum(r.devices // 2 if r.closed else r.devices - 1 for r in rings)
    rate = sum(r.bandwidth * (2 if r.closed else 1) for r in rings)
    name = "bidirectional ring" if closed else "bidirectional line"
    yield Algorithm(name, both * link.latency_s * hops, both * part / rate)


def wire_share(kind: str, algorithm: str, devices: int) -> float:
    """Bytes that a device sends over those of the collective, among ``devices`` on a switch.

    In a **ring** all but one's own part go round (of an all-reduce twice); **recursive doubling**
    sends as much in fewer, larger steps; a **tree** takes everything up and down; an **in-switch**
    all-reduce sends everything once and the switch adds; **direct** is to each at once.
    """
    if algorithm == "tree":
        return 2.0
    if algorithm == "in-switch":
        return 1.0
    return (devices - 1) / devices * (2 if kind == "all_reduce" else 1)


def steps(kind: str, algorithm: str, devices: int) -> float:
    """Messages that wait for one another, as in :func:`wire_share`."""
    twice = 2 if kind == "all_reduce" else 1
    if algorithm in ("tree", "recursive doubling"):
        return twice * math.ceil(math.log2(devices))
    if algorithm in ("in-switch", "direct"):
        return 1.0
    return twice * (devices - 1)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _on_switch(kind: str, inside: int, outside: int, hardware: Hardware) -> Iterator[Algorithm]:
    """Algorithms for ``inside`` devices of each of ``outside`` nodes."""
    link = hardware.interconnect
    n = inside * outside
    network = link.network_bandwidth_bytes_per_s
    if kind == "collective_permute":
        far = outside > 1
        latency = link.network_latency_s if far else link.latency_s
        yield Algorithm("direct", latency, 1 / (network if far else link.bandwidth_bytes_per_s))
        return
    if outside == 1:
        yield from _in_node(kind, n, hardware)
        return
    if kind == "all_to_all":
        sent = (n - inside) / n / network
        near = (inside - 1) / n / link.bandwidth_bytes_per_s
        yield Algorithm("direct", link.network_latency_s, max(sent, near))
        return
    # Every device of a node has a port of its own, and as many rings run as there are ports.
    rate = min(link.bandwidth_bytes_per_s, inside * network)
    for name in ("ring", "tree") if kind == "all_reduce" else ("ring",):
        latency = (
            steps(kind, name, n) * link.network_latency_s
            if name == "ring"
            else steps(kind, name, inside) * link.latency_s
            + steps(kind, name, outside) * link.network_latency_s
        )
        yield Algorithm(name, latency, wire_share(kind, name, n) / rate)
    across = [
        Algorithm(name, steps(kind, name, outside) * link.network_latency_s,
                  wire_share(kind, name, outside) / network)
        for name in ("ring", "recursive doubling")
        if name == "ring" or _is_power_of_two(outside)
    ]  # fmt: skip
    if inside == 1:
        yield from across[1:]
        return
    # Two levels: inside a node everything, between nodes each device its part.
    within = ["reduce_scatter", "all_gather"] if kind == "all_reduce" else [kind]
    for outer in across:
        for parts in itertools.product(*(list(_in_node(k, inside, hardware)) for k in within)):
            yield Algorithm(
                f"two-level: {parts[0].name} in a node, {outer.name} between",
                sum(p.latency_s for p in parts) + outer.latency_s,
                sum(p.seconds_per_byte for p in parts) + outer.seconds_per_byte / inside,
            )


def _in_node(kind: str, devices: int, hardware: Hardware) -> Iterator[Algorithm]:
    """As measured, where the file has measurements of the kind; else as the links allow."""
    link = hardware.interconnect
    measured = [m for m in hardware.measured if m.kind == kind]
    for m in measured:
        yield Algorithm(
            m.algorithm + (f", {m.protocol}" if m.protocol else ""),
            m.latency_s + steps(kind, m.algorithm, devices) * m.step_latency_s,
            1 / m.memory_bandwidth_bytes_per_s
            + wire_share(kind, m.algorithm, devices) / m.link_bandwidth_bytes_per_s,
        )
    if measured:
        return
    offered = {"all_to_all": ["direct"], "all_reduce": ["ring", "recursive doubling", "tree"]}
    for name in offered.get(kind, ["ring", "recursive doubling"]):
        if name == "recursive doubling" and not _is_power_of_two(devices):
            continue
        yield Algorithm(
            name, steps(kind, name, devices) * link.latency_s,
            wire_share(kind, name, devices) / link.bandwidth_bytes_per_s,
        )  # fmt: skip
