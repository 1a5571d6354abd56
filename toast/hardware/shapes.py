"""All meshes that a number of devices can form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from toast.errors import MeshError
from toast.hardware.collective_prices import COLLECTIVES, Collectives, check_size
from toast.hardware.description import Hardware
from toast.hardware.mesh import Mesh

#: Axes of the meshes that are tried, by name.
_AXES = ("a", "b", "c")


def meshes_of(devices: int, hardware: Hardware) -> tuple[Mesh, ...]:
    """The meshes of ``devices`` with one to three axes of more than one device, called a, b and c.

    Axes go from the longest to the shortest.  Other orders follow where the hardware makes a
    difference between them: where some collective takes another time on the same axes.
    Raises :class:`toast.errors.MeshError` for fewer than two devices, or more than the system has.
    """
    if devices < 2:
        raise MeshError(f"{devices} devices do not form a mesh; use at least 2")
    check_size(hardware, devices)
    found = []
    for axes in range(1, len(_AXES) + 1):
        for sizes in _factors(devices, axes, devices):
            known = set()
            for order in sorted(set(itertools.permutations(sizes)), reverse=True):
                mesh = Mesh(tuple(zip(_AXES, order, strict=False)))
                times = _times(hardware, mesh)
                if times not in known:
                    known.add(times)
                    found.append(mesh)
    return tuple(found)


def _factors(number: int, parts: int, most: int) -> Iterator[tuple[int, ...]]:
    """``number`` as products of ``parts`` numbers from 2 to ``most``, the larger ones first."""
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
    """What collectives cost on the axes of a mesh, whatever the order that they stand in."""
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
