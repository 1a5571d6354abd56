"""What a mesh axis gets from the hardware it is laid on: bandwidth and latency."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from toast.hardware.description import Hardware, Interconnect
from toast.hardware.mesh import Mesh

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Links:
    """Per mesh axis, per device and direction."""

    #: ``[axes]`` bytes per second of a ring collective: all-gather of ``b`` bytes in all takes
    #: ``b * (n - 1) / n`` over this.
    bandwidth_bytes_per_s: Floats
    #: ``[axes]`` bytes per second at which a device's data reaches all others in an all-to-all.
    all_to_all_bandwidth_bytes_per_s: Floats
    #: ``[axes]`` seconds of one step.
    latency_s: Floats
    #: Whether a collective over several axes uses the links of all of them at once.
    parallel_axes: bool


def axis_links(hardware: Hardware, mesh: Mesh) -> Links:
    """The links of each axis of ``mesh``, the last axis innermost."""
    link = hardware.interconnect
    rows = _torus(link, mesh) if link.topology == "torus" else _switch(link, mesh)
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return Links(table[:, 0], table[:, 1], table[:, 2], link.topology == "torus")


def _torus(link: Interconnect, mesh: Mesh) -> list[tuple[float, float, float]]:
    """Each axis takes dimensions of the torus.

    A ring collective uses both directions of a dimension's links at once: directly where the ends
    are linked, and on an open line of chips by folding the ring (each direction carries half).
    On a ring of n chips the average distance of an all-to-all is n / 4 hops over 2 links in each
    direction, so a device's data moves at 8 / n of a link's rate; on an open line at 4 / n, where
    the middle links carry n^2 / 4 of the n^2 pairs.  Never faster than the links of one chip.
    """
    rows = []
    for size in mesh.sizes:
        ring = 2.0 * link.bandwidth_bytes_per_s
        closed = size >= link.wraparound_from
        cross = min(2.0, (8.0 if closed else 4.0) / max(size, 1)) * link.bandwidth_bytes_per_s
        rows.append((ring, cross, link.latency_s))
    return rows


def _switch(link: Interconnect, mesh: Mesh) -> list[tuple[float, float, float]]:
    """Minor axes fill a node first; an axis that leaves it runs at the network's rate."""
    rows = []
    inside = 1
    for size in reversed(mesh.sizes):
        inside *= size
        if inside <= link.devices_per_node:
            rate, latency = link.bandwidth_bytes_per_s, link.latency_s
        else:
            rate, latency = link.network_bandwidth_bytes_per_s, link.network_latency_s
        rows.append((rate, rate, latency))
    return rows[::-1]
