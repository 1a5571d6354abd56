"""Lists the meshes that a number of devices can form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from toast.errors import MeshError
from toast.hardware.collective_prices import COLLECTIVES, Collectives, check_size
from toast.hardware.description import Hardware
from toast.hardware.mesh import Mesh

#: Names of the axes.
_AXES = ("a", "b", "c")


def meshes_of(devices: int, hardware: Hardware) -> tuple[Mesh, ...]:
    """The meshes of ``devices`` devices with one to three axes, named a, b and c.

    Every axis has at least two devices.  Axes are ordered from the longest to the shortest.  Other
    orders are listed too if some collective takes a different time in them.

    More devices than a slice has are several slices of the same size: a first axis with the name of
    the network that joins them, before the others.

    Raises :class:`toast.errors.MeshError` for fewer than two devices, or more than the system has.
    """
    if devices < 2:
        raise MeshError(f"{devices} devices do not form a mesh; use at least 2")
    check_size(hardware, devices)
    if devices > hardware.max_devices:
        return _of_slices(devices, hardware)
    meshes = []
    for axes in range(1, len(_AXES) + 1):
        for sizes in _factors(devices, axes, devices):
            known = set()
            for order in sorted(set(itertools.permutations(sizes)), reverse=True):
                mesh = Mesh(tuple(zip(_AXES, order, strict=False)))
                times = _times(hardware, mesh)
                if times not in known:
                    known.add(times)
                    meshes.append(mesh)
    return tuple(meshes)


def _of_slices(devices: int, hardware: Hardware) -> tuple[Mesh, ...]:
    """The meshes over the fewest slices of equal sizes."""
    network = hardware.networks[0]
    for slices in range(-(-devices // hardware.max_devices), network.max_slices + 1):
        if devices % slices == 0 and (own := devices // slices) > 1:
            slices_first = ((network.axis, slices),)
            return tuple(Mesh((*slices_first, *mesh.axes)) for mesh in meshes_of(own, hardware))
    raise MeshError(
        f"{devices} devices are no slices of equal sizes of {hardware.name}, which have at most "
        f"{hardware.max_devices} devices each; use another number"
    )


def _factors(number: int, parts: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``number`` as ``parts`` factors from 2 to ``most``, in descending order."""
    if parts == 1:
        if 2 <= number <= most:
            yield (number,)
        return
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    for first in sorted({*small, *(number // d for d in small)}, reverse=True):
        if 2 <= first <= most:
            for rest in _factors(number // first, parts - 1, first):
                yield first, *rest


def _times(hardware: Hardware, mesh: Mesh) -> tuple[str, ...]:
    """The times of all collectives on a mesh; equal for meshes with equal times."""
    costs = Collectives(hardware, mesh)
    sorted_sizes = sorted(mesh.sizes, reverse=True)
    orders = [
        names
        for names in itertools.permutations(mesh.names)
        if [dict(mesh.axes)[name] for name in names] == sorted_sizes
    ]
    return min(
        tuple(
            f"{line.latency_s:.9e} {line.seconds_per_byte:.9e}"
            for kind in COLLECTIVES
            for count in range(1, len(names) + 1)
            for group in itertools.combinations(names, count)
            for line in costs.algorithms(kind, group)
        )
        for names in orders
    )
