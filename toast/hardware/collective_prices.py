"""The time of collectives on a mesh: that of the fastest algorithm that the links allow.

The time of every algorithm is linear: a latency plus seconds per byte.  The time of a collective on
a group of devices is therefore the minimum of a few lines.  One table per mesh holds the lines of
every collective on every product of axes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from toast.errors import MeshError
from toast.hardware.description import Hardware, Interconnect, Network, Protocol
from toast.hardware.links import MeshOnLinks, Ring, lay_out
from toast.hardware.mesh import Mesh
from toast.hardware.network_axes import network_axes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: Square slices of at most as many devices on a side scatter sums over all of them.
_LARGEST_SCATTERING_SQUARE = 2

#: Collectives by their names in StableHLO.  Bytes are counted as in ``nccl-tests``: those of the
#: gathered result for an all-gather, of the operand for a reduce-scatter, of the data that one
#: device sends for a collective-permute, and of the data on one device for the others.
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One way to run a collective on one group of devices."""

    #: The name, such as ``ring``.
    name: str
    #: Seconds that it takes however few the bytes.
    latency_s: float
    #: Seconds of each byte, in addition.
    seconds_per_byte: float
    #: The sizes at which it may run: from the first one to below the second.
    least_bytes: float = 0.0
    #: The size below which it may run.
    most_bytes: float = math.inf

    def seconds(self, size: float) -> float:
        """Time for ``size`` bytes."""
        return self.latency_s + size * self.seconds_per_byte


class Collectives:
    """The time of every collective on every product of axes of a mesh on a kind of device."""

    def __init__(self, hardware: Hardware, mesh: Mesh) -> None:
        """The collectives of ``mesh.real``: axes of one device are left out.

        Raises :class:`toast.errors.MeshError` if the mesh is larger than the system.
        """
        check_size(hardware, mesh)
        names, self.mesh = mesh.names, (mesh := mesh.real)
        #: The bit of each axis in the number of a group; 0 for axes that are left out.
        self._bit = {**dict.fromkeys(names, 0), **{a: 1 << i for i, a in enumerate(mesh.names)}}
        layout = _Slices(hardware, mesh)
        # Bit ``a`` of a group's number is axis ``a``.
        masks = [mask[::-1] for mask in itertools.product((False, True), repeat=len(mesh.axes))]
        self._groups = [[layout.algorithms(kind, mask) for mask in masks] for kind in COLLECTIVES]
        least = [[_pieces(lines) for lines in kind] for kind in self._groups]
        #: ``[groups]`` those over which XLA for TPUs sums whole, and slices, to scatter a sum.
        self.scatters_by_sums: Bools = np.array([layout.scatters_by_sums(mask) for mask in masks])
        #: ``[groups]`` those over which it adds shards with zeros around them, to gather.
        self.gathers_by_sums: Bools = np.array([layout.gathers_by_sums(mask) for mask in masks])
        most = max(len(pieces) for kind in least for pieces in kind)
        shape = len(COLLECTIVES), len(masks), most
        # A group's lines by size; each holds from its start to that of the next.
        self._start: Floats = np.full(shape, np.inf)
        self._latency: Floats = np.zeros(shape)
        self._slope: Floats = np.zeros(shape)
        #: Devices on each group of axes.
        self.devices: Ints = np.array([
            math.prod(n for n, here in zip(mesh.sizes, mask, strict=True) if here)
            for mask in masks
        ])  # fmt: skip
        part = (self.devices - 1) / self.devices
        self._sent: Floats = np.stack([part, 2 * part, part, part, np.ones(len(masks))])
        for k, kind in enumerate(least):
            for g, pieces in enumerate(kind):
                for i, (start, line) in enumerate(pieces):
                    self._start[k, g, i] = start
                    self._latency[k, g, i] = line.latency_s
                    self._slope[k, g, i] = line.seconds_per_byte

    def seconds(self, kind: int, size: Floats, group: npt.NDArray[np.integer[Any]]) -> Floats:
        """Seconds of a collective with the algorithm that runs; 0 on a group of one device.

        ``kind`` is an index into :data:`COLLECTIVES`.  ``size`` (in bytes) and ``group`` have the
        same shape, which is also that of the result.  Bit ``a`` of a group's number says whether
        the group includes axis ``a`` of :attr:`mesh`.
        """
        seconds = self._latency[kind, group, 0] + size * self._slope[kind, group, 0]
        for line in range(1, self._latency.shape[2]):
            other = self._latency[kind, group, line] + size * self._slope[kind, group, line]
            seconds = np.where(size >= self._start[kind, group, line], other, seconds)
        return np.asarray(seconds)

    def sent_share(self, kind: int, group: npt.NDArray[np.integer[Any]]) -> Floats:
        """The bytes that a device sends on a ring, divided by the bytes of the collective.

        ``kind`` and ``group`` are as in :meth:`seconds`; the result has the shape of ``group``.
        """
        return np.asarray(self._sent[kind, group])

    def algorithms(self, kind: str, axes: Sequence[str]) -> tuple[Algorithm, ...]:
        """All algorithms of a collective (by name) on the product of ``axes`` (by name)."""
        group = sum(self._bit[axis] for axis in axes)
        return tuple(self._groups[COLLECTIVES.index(kind)][group])

    def cheapest(self, kind: str, size: float, axes: Sequence[str]) -> Algorithm:
        """The algorithm that :meth:`seconds` uses for ``size`` bytes."""
        lines = self.algorithms(kind, axes)
        here = [line for line in lines if line.least_bytes <= size < line.most_bytes]
        return min(here, key=lambda line: line.seconds(size))


def _pieces(lines: Sequence[Algorithm]) -> list[tuple[float, Algorithm]]:
    """The algorithms that run, and the size from which each does, from small to large sizes."""
    ends = {end for line in lines for end in (line.least_bytes, line.most_bytes)}
    pieces: list[tuple[float, Algorithm]] = []
    for start, end in itertools.pairwise(sorted({0.0, math.inf, *ends})):
        here = [line for line in lines if line.least_bytes <= start < line.most_bytes]
        before: Algorithm | None = None
        for line in reversed(_envelope(here)):
            since = max(start, _meet(line, before)) if before else start
            before = line
            if since < end:
                if pieces and pieces[-1][0] == since:
                    pieces.pop()
                pieces.append((since, line))
    return pieces


def _envelope(lines: Sequence[Algorithm]) -> list[Algorithm]:
    """The algorithms that are the fastest for some size, from large to small sizes."""
    fastest: list[Algorithm] = []
    for line in sorted(lines, key=lambda line: (line.seconds_per_byte, line.latency_s)):
        if fastest and line.latency_s >= fastest[-1].latency_s:
            continue
        # The last line is lowest between its intersections with this line and with the previous.
        while len(fastest) > 1 and _meet(fastest[-1], line) >= _meet(fastest[-2], fastest[-1]):
            fastest.pop()
        fastest.append(line)
    return fastest


def _meet(flat: Algorithm, steep: Algorithm) -> float:
    """The number of bytes beyond which ``flat`` is faster."""
    return (flat.latency_s - steep.latency_s) / (steep.seconds_per_byte - flat.seconds_per_byte)


def check_size(hardware: Hardware, mesh: Mesh | int) -> None:
    """Checks that a mesh, or a number of devices, is not larger than the system.

    Raises :class:`toast.errors.MeshError` if it is.
    """
    most = hardware.max_devices
    if isinstance(mesh, Mesh):
        devices, prefix, remedy = mesh.devices, f"mesh {mesh} has ", "a smaller mesh"
        sizes = dict(mesh.real.axes)
        across = network_axes(hardware, mesh.real.names)
        joining = [name for _, names in across for name in names]
        outermost = [mesh.real.names[number] for number in mesh.real.placed][: len(joining)]
        for network, names in across:
            for name in names:
                if name not in outermost:
                    raise MeshError(
                        f"mesh {mesh}: axis {name} joins slices of {hardware.name}, so it must be "
                        f"the first axis, such as {name}={sizes[name]},data=4"
                    )
            slices = math.prod(sizes[name] for name in names)
            if slices > network.max_slices:
                axes = f"axis {names[0]}" if len(names) == 1 else f"axes {', '.join(names)}"
                raise MeshError(
                    f"mesh {mesh}: {axes} of {slices} slices; a {hardware.name} system has at "
                    f"most {network.max_slices}; use fewer"
                )
            devices //= slices
        if across:
            prefix += "slices of "
        elif hardware.networks and devices > most:
            first = min(network.axis for network in hardware.networks)
            remedy = f"{remedy}, or several slices along an axis {first}"
    else:
        devices, prefix, remedy = mesh, "", "fewer"
        most *= math.prod(network.max_slices for network in hardware.networks)
    if devices > most:
        raise MeshError(
            f"{prefix}{devices} devices; a {hardware.name} system has at most {most}; use {remedy}"
        )


class _Slices:
    """A mesh over slices that networks join; each slice has the axes that no network has.

    Slices are the outermost parts of the mesh, as ``mesh_utils.create_hybrid_device_mesh`` lays
    them out.  A collective over slices has two levels, as one over the nodes of a switch: all bytes
    move inside a slice, and between slices each device sends its part.
    """

    def __init__(self, hardware: Hardware, mesh: Mesh) -> None:
        across = network_axes(hardware, mesh.names)
        joined = {name for _, names in across for name in names}
        self._hardware = hardware
        self._networks = [(net, [*map(mesh.names.index, names)]) for net, names in across]
        self._sizes = mesh.sizes
        self._own = [n for n, name in enumerate(mesh.names) if name not in joined]
        own = [mesh.names[n] for n in self._own]
        self._layout: MeshOnLinks | None = None
        if own:
            order = tuple(name for name in mesh.order if name in own)
            inner = Mesh(tuple(mesh.axes[n] for n in self._own), order)
            self._layout = lay_out(hardware.interconnect, inner)

    def scatters_by_sums(self, mask: tuple[bool, ...]) -> bool:
        """Whether XLA for TPUs sums whole over the axes in ``mask``, and slices, to scatter a sum.

        It does so over all devices of a square slice of at least 4 x 4, or of a slice with three
        dimensions: compiled for v5e and v6e (4 to 256 devices, 8x8 also for two slices), v4 and v5p
        (up to 128), and assumed for other squares.  It also does so over all devices of two
        slices, and is assumed to over those of more.
        """
        if self._hardware.platform != "tpu" or not all(mask[n] for n in self._own):
            return False
        if self._joins(mask):
            return all(mask) and bool(self._own)
        sides = self._sides
        square = len(set(sides)) == 1 and min(sides) > _LARGEST_SCATTERING_SQUARE
        return len(sides) > 2 or (len(sides) == 2 and square)

    def gathers_by_sums(self, mask: tuple[bool, ...]) -> bool:
        """Whether a gather over the axes in ``mask`` is a sum of shards with zeros around them.

        XLA for TPUs has no other over all devices of a slice of whole cubes (compiled for v5p).
        """
        inside = all(mask[n] for n in self._own) and not self._joins(mask)
        cube = self._hardware.interconnect.sides_of_cubes
        return (
            self._hardware.platform == "tpu" and inside and len(self._sides) > 2
            and all(side % cube == 0 for side in self._sides)
        )  # fmt: skip

    @property
    def _sides(self) -> tuple[int, ...]:
        """The sides of a slice, without those of one device; empty for a switch."""
        return () if self._layout is None else self._layout.sides

    def _joins(self, mask: tuple[bool, ...]) -> bool:
        """Whether ``mask`` has an axis over slices."""
        return any(mask[n] for _, numbers in self._networks for n in numbers)

    def algorithms(self, kind: str, mask: tuple[bool, ...]) -> list[Algorithm]:
        """The algorithms of a collective on the axes in ``mask``."""
        inner = tuple(mask[n] for n in self._own)
        slices = [
            (net, math.prod(self._sizes[n] for n in numbers if mask[n]))
            for net, numbers in self._networks
        ]
        levels = [(net, count) for net, count in slices if count > 1]
        devices = math.prod(self._sizes[n] for n in self._own if mask[n])
        return self._between(kind, inner, devices, levels)

    def _between(
        self, kind: str, inner: tuple[bool, ...], devices: int, levels: list[tuple[Network, int]]
    ) -> list[Algorithm]:
        """The algorithms on ``devices`` of a slice and on the slices of networks."""
        if not levels:
            if self._layout is None or devices == 1:
                return [Algorithm("none", 0.0, 0.0)]
            return _algorithms(self._hardware, kind, self._layout, inner)
        *lower, (network, slices) = levels
        inside = devices * math.prod(size for _, size in lower)
        rate = network.bandwidth_bytes_per_s
        if kind == "collective_permute":
            return [Algorithm("direct", network.latency_s, 1 / rate)]
        if kind == "all_to_all":
            n = inside * slices
            near = self._between(kind, inner, devices, lower)
            return [
                Algorithm(
                    "direct", network.latency_s + line.latency_s,
                    max((n - inside) / n / rate, line.seconds_per_byte * inside / n),
                    line.least_bytes, line.most_bytes,
                )
                for line in near
            ]  # fmt: skip
        across = _across(kind, slices, network.latency_s, rate)
        if inside == 1:
            return across

        def in_slice(kind: str) -> list[Algorithm]:
            return self._between(kind, inner, devices, lower)

        return [*_two_levels(kind, "slice", in_slice, across, inside)]


def _algorithms(
    hardware: Hardware, kind: str, layout: MeshOnLinks, mask: tuple[bool, ...]
) -> list[Algorithm]:
    link = hardware.interconnect
    if link.topology == "torus":
        rings = layout.rings(mask)
        if not rings:
            return [Algorithm("none", 0.0, 0.0)]
        if link.all_to_all is not None:
            return [_as_scheduled(kind, len(rings), link, link.all_to_all)]
        return list(_on_torus(kind, rings, link))
    inside, outside = layout.nodes(mask)
    if inside * outside == 1:
        return [Algorithm("none", 0.0, 0.0)]
    return list(_on_switch(kind, inside, outside, hardware))


def _as_scheduled(
    kind: str, dimensions: int, link: Interconnect, all_to_all: tuple[float, float]
) -> Algorithm:
    """A collective as XLA's scheduler sees it, on a group that spans dimensions of the torus.

    All bytes go over the two links of each, even if groups share these links.
    """
    rates = {"collective_permute": 1.0, "all_to_all": all_to_all[dimensions > 1]}
    both = 2 if kind == "all_reduce" else 1
    rate = link.bandwidth_bytes_per_s * rates.get(kind, 2 * dimensions / both)
    return Algorithm("as scheduled", 0.0, 1 / rate)


def _on_torus(kind: str, rings: Sequence[Ring], link: Interconnect) -> Iterator[Algorithm]:
    """The algorithms on the rings and lines of a group, one per dimension of the torus.

    **All-gather** of ``b`` bytes, **reduce-scatter** (the reverse) and **all-reduce** (both): a
    device receives ``(n - 1) / n * b`` bytes over its links.  It uses one link on a ring in one
    direction, two on a ring in both directions, and one at the end of an open line.  Shards go
    whole: in both directions on a ring of even size, the one from the opposite device arrives last
    over one of the two links, after ``n / 2`` steps, so that the time is that of all ``b`` bytes
    (XLA's scheduler has the same).  On several dimensions the data is split, and each part starts
    on a different dimension, so that all links are busy.

    **All-to-all**: every device has ``b`` bytes, ``b / n`` for each device.  A cut divides a ring
    of ``m`` devices into two halves.  In each direction, ``m / 2 * m / 2`` pairs send over the 2
    links of the cut (1 on an open line): ``b * m / 8`` bytes per link, in general
    ``b * floor(m * m / 4) / m`` bytes over these links.  Shortest paths reach this bound.  The
    slowest dimension determines the time.
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
    if closed and any(ring.devices % 2 == 0 for ring in rings):
        part = 1.0
    name = "bidirectional ring" if closed else "bidirectional line"
    yield Algorithm(name, both * link.latency_s * hops, both * part / rate)


def wire_share(kind: str, algorithm: str, devices: int) -> float:
    """The bytes that a device sends, divided by the bytes of the collective, on a switch.

    On a **ring**, all parts but a device's own go round, twice in an all-reduce.  **Recursive
    doubling** sends the same bytes in fewer, larger steps.  A **tree** moves all bytes up and down.
    In an **in-switch** all-reduce, each device sends all bytes once and the switch adds them.
    **Direct** sends to all devices at once.
    """
    if algorithm == "tree":
        return 2.0
    if algorithm == "in-switch":
        return 1.0
    return (devices - 1) / devices * (2 if kind == "all_reduce" else 1)


def steps(kind: str, algorithm: str, devices: int) -> float:
    """The number of messages in sequence for an algorithm of :func:`wire_share`."""
    phases = 2 if kind == "all_reduce" else 1
    if algorithm in ("tree", "recursive doubling"):
        return phases * math.ceil(math.log2(devices))
    if algorithm in ("in-switch", "direct"):
        return 1.0
    return phases * (devices - 1)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _on_switch(kind: str, inside: int, outside: int, hardware: Hardware) -> Iterator[Algorithm]:
    """The algorithms for ``inside`` devices in each of ``outside`` nodes."""
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
    # Every device of a node has its own port; there is one ring per port.
    rate = min(link.bandwidth_bytes_per_s, inside * network)
    for name in ("ring", "tree") if kind == "all_reduce" else ("ring",):
        latency = (
            steps(kind, name, n) * link.network_latency_s
            if name == "ring"
            else steps(kind, name, inside) * link.latency_s
            + steps(kind, name, outside) * link.network_latency_s
        )
        yield Algorithm(name, latency, wire_share(kind, name, n) / rate)
    across = _across(kind, outside, link.network_latency_s, network)
    if inside == 1:
        yield from across[1:]
        return
    yield from _two_levels(kind, "node", lambda k: _in_node(k, inside, hardware), across, inside)


def _across(kind: str, groups: int, latency_s: float, bytes_per_s: float) -> list[Algorithm]:
    """The algorithms between nodes or slices: a ring first."""
    return [
        Algorithm(name, steps(kind, name, groups) * latency_s,
                  wire_share(kind, name, groups) / bytes_per_s)
        for name in ("ring", "recursive doubling")
        if name == "ring" or _is_power_of_two(groups)
    ]  # fmt: skip


def _two_levels(
    kind: str,
    where: str,
    inner: Callable[[str], Iterable[Algorithm]],
    across: Sequence[Algorithm],
    inside: int,
) -> Iterator[Algorithm]:
    """Collectives with two levels over nodes or slices of ``inside`` devices.

    All bytes move inside a node (``inner``, by kind); between nodes each device sends its part.
    """
    within = ["reduce_scatter", "all_gather"] if kind == "all_reduce" else [kind]
    near = [list(inner(k)) for k in within]
    for outer in across:
        for parts in itertools.product(*near):
            least, most = max(p.least_bytes for p in parts), min(p.most_bytes for p in parts)
            if least < most:
                yield Algorithm(
                    f"two-level: {parts[0].name} in a {where}, {outer.name} between",
                    sum(p.latency_s for p in parts) + outer.latency_s,
                    sum(p.seconds_per_byte for p in parts) + outer.seconds_per_byte / inside,
                    least, most,
                )  # fmt: skip


def sizes_by_protocol(
    kind: str, devices: int, protocols: Sequence[Protocol]
) -> dict[Protocol, tuple[float, float]]:
    """The sizes at which the library chooses each protocol: from the first to below the second.

    It chooses the one with the shortest estimate.  Protocols that it never chooses are left out.
    """
    estimates = {
        Algorithm(
            f"{number}",
            p.latency_s + steps(kind, p.algorithm, devices) * p.step_latency_s,
            wire_share(kind, p.algorithm, devices) / p.bandwidth_bytes_per_s,
        ): p
        for number, p in enumerate(protocols)
    }
    pieces = _pieces(list(estimates))
    ends = [*(start for start, _ in pieces[1:]), math.inf][: len(pieces)]
    return {estimates[line]: (start, end) for (start, line), end in zip(pieces, ends, strict=True)}


def _in_node(kind: str, devices: int, hardware: Hardware) -> Iterator[Algorithm]:
    """The measured algorithms if the file has some of this kind; otherwise those of the links.

    If the file has estimates of protocols, each runs at the sizes at which the library chooses it.
    """
    link = hardware.interconnect
    measured = [m for m in hardware.measured if m.kind == kind]
    variants = {(m.algorithm, m.protocol) for m in measured}
    protocols = [p for p in hardware.protocols if (p.algorithm, p.name) in variants]
    sizes = {
        (p.algorithm, p.name): range_
        for p, range_ in sizes_by_protocol(kind, devices, protocols).items()
    }
    never = {(p.algorithm, p.name) for p in protocols} - set(sizes)
    for m in measured:
        if (m.algorithm, m.protocol) in never:
            continue
        yield Algorithm(
            m.algorithm + (f", {m.protocol}" if m.protocol else ""),
            m.latency_s + steps(kind, m.algorithm, devices) * m.step_latency_s,
            1 / m.memory_bandwidth_bytes_per_s
            + wire_share(kind, m.algorithm, devices) / m.link_bandwidth_bytes_per_s,
            *sizes.get((m.algorithm, m.protocol), (0.0, math.inf)),
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
