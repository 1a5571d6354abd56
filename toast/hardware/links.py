"""What a mesh axis gets from the hardware it is laid on: bandwidth and latency."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from toast.hardware.description import Hardware, Interconnect
from toast.hardware.mesh import Mesh

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Links:
    """Per mesh axis, per device and in one direction; achievable rates.

    With ``n`` devices on an axis and ``b`` bytes on each, every collective takes
    ``(n - 1) / n * bytes / bandwidth``: an all-gather to ``b`` bytes or a reduce-scatter of them at
    ``bandwidth_bytes_per_s``, an all-reduce twice that, an all-to-all at its own bandwidth.
    """

    #: ``[axes]`` bytes per second of a ring collective.
    bandwidth_bytes_per_s: Floats
    #: ``[axes]`` bytes per second at which a device's data reaches all others in an all-to-all.
    all_to_all_bandwidth_bytes_per_s: Floats
    #: ``[axes]`` seconds of one step.
    latency_s: Floats
    #: Whether a collective over several axes uses the links of all of them at once.
    parallel_axes: bool


def axis_links(hardware: Hardware, mesh: Mesh) -> Links:
    """The links of each axis of ``mesh``, the last axis innermost.

    The mesh is one slice of a torus as large as it needs, or fills nodes of a switch one by one.
    """
    link = hardware.interconnect
    rows = _torus(link, mesh.sizes) if link.topology == "torus" else _switch(link, mesh.sizes)
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return Links(table[:, 0], table[:, 1], table[:, 2], link.topology == "torus")


def _torus(link: Interconnect, sizes: tuple[int, ...]) -> list[tuple[float, float, float]]:
    """Axes lie on the dimensions of the torus as :func:`_laid_out` says.

    **Ring collectives.**  Where the ends of a dimension are linked, a device sends both ways round
    the ring: 2 links.  On an open line the device at the end receives all there is through its one
    link: 1 link.  An axis folded over several dimensions uses those of each at once.

    **All-to-all.**  Every device has ``b`` bytes, ``b / n`` for each.  Cut a ring of ``n`` in two
    halves: each way ``n / 2 * n / 2`` pairs send ``b / n`` bytes, ``b * n / 4`` in all, over the 2
    links that the cut meets (1 on an open line): ``b * n / 8`` bytes per link.  Shortest paths
    reach this bound.  In general (``n`` odd, or folded over sides of which the longest is ``m``) it
    is ``b * floor(m * m / 4) / m`` bytes over those links.

    Axes that share a dimension share its links: the groups of a major axis interleave, as many as
    there are devices on the axes inside it, and each gets its part of the rate.
    """
    places = _laid_out(sizes, link.dimensions)
    lengths = [side * place.inside for place in places if not place.outside for side in place.sides]
    closed = [length >= link.wraparound_from for length in lengths]
    cube = link.dimensions < 3 or sum(closed) == 3  # a 3D torus is closed in cubes of all three
    rows = []
    for n, place in zip(sizes, places, strict=True):
        rate = link.bandwidth_bytes_per_s / place.inside
        rings, cross = 0, math.inf
        for side in place.sides:
            ends = cube and not place.outside and side * place.inside >= link.wraparound_from
            links = 2 if ends else 1
            rings += links
            cross = min(cross, links * side / (side * side // 4) * (n - 1) / n)
        ring = rate * rings if place.sides else rate
        rows.append((ring, rate * cross if place.sides else rate, link.latency_s))
    return rows


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an axis lies."""

    #: Its extent on each of its dimensions, longest first; none if it has one device.
    sides: tuple[int, ...] = ()
    #: Devices on minor axes of the same dimension.
    inside: int = 1
    #: Whether a major axis lies on the same dimension.
    outside: bool = False


def _laid_out(sizes: tuple[int, ...], dimensions: int) -> list[_Place]:
    """Major to minor over the dimensions; axes of one device take none.

    Spare dimensions fold the axis that is longest, as in a slice of 4x4 chips for one axis of 16.
    With more axes than dimensions, the major ones share the first dimension.
    """
    real = [axis for axis, size in enumerate(sizes) if size > 1]
    sharing = real[: len(real) - dimensions + 1] if len(real) > dimensions else []
    sides: dict[int, tuple[int, ...]] = {axis: (sizes[axis],) for axis in real[len(sharing) :]}
    for _ in range(dimensions - len(real) if not sharing else 0):
        folded = {axis: _folded(sizes[axis], len(sides[axis]) + 1) for axis in sides}
        split = [axis for axis in sides if folded[axis][-1] > 1]
        if split:
            longest = max(split, key=lambda axis: sides[axis][0])
            sides[longest] = folded[longest]
    places = [_Place(sides.get(axis, ())) for axis in range(len(sizes))]
    inside = 1
    for axis in reversed(sharing):
        places[axis] = _Place((sizes[axis],), inside, outside=axis != sharing[0])
        inside *= sizes[axis]
    return places


def _folded(size: int, parts: int) -> tuple[int, ...]:
    """``size`` as a product of ``parts`` whole numbers, longest first and that one least."""
    if parts == 1:
        return (size,)
    small = [d for d in range(1, math.isqrt(size) + 1) if size % d == 0]
    for longest in (*small, *(size // d for d in reversed(small))):
        if longest**parts >= size:
            rest = _folded(size // longest, parts - 1)
            if rest[0] <= longest:
                return longest, *rest
    raise AssertionError(size)  # size, 1, 1 ... is such a product


def _switch(link: Interconnect, sizes: tuple[int, ...]) -> list[tuple[float, float, float]]:
    """Minor axes fill a node first; an axis that leaves it runs at the network's rate."""
    rows = []
    inside = 1
    for size in reversed(sizes):
        inside *= size
        if inside <= link.devices_per_node:
            rate, latency = link.bandwidth_bytes_per_s, link.latency_s
        else:
            rate, latency = link.network_bandwidth_bytes_per_s, link.network_latency_s
        rows.append((rate, rate, latency))
    return rows[::-1]
