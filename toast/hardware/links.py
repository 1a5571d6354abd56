"""The links of the hardware that the axes of a mesh use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from toast.hardware.description import Interconnect
from toast.hardware.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class Ring:
    """The part of one dimension of a torus that a group of devices uses."""

    devices: int
    #: Whether the ends are linked.
    closed: bool
    #: Bytes per second of one link in one direction that are available to the group.
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class _Segment:
    """The part of one mesh axis that lies on one dimension of a torus."""

    axis: int
    devices: int


@dataclasses.dataclass(frozen=True)
class MeshOnLinks:
    """A mesh on an interconnect: which links each group of devices uses."""

    _link: Interconnect
    _sizes: tuple[int, ...]
    #: Axis numbers in the order of the devices, major to minor.
    _placed: tuple[int, ...]
    #: Torus: the segments of each dimension, major to minor.
    _dimensions: tuple[tuple[_Segment, ...], ...]

    def rings(self, mask: Sequence[bool]) -> tuple[Ring, ...]:
        """The rings of a group over the axes in ``mask``, at most one per dimension of a torus.

        ``mask`` has one entry per mesh axis.  If another, more minor axis lies between the devices
        of a group, the groups interleave: one group for each device of that axis shares the links.
        """
        lengths = [math.prod(s.devices for s in segments) for segments in self._dimensions]
        least = self._link.wraparound_from
        closed = [length >= least for length in lengths]
        if self._link.dimensions == 3:  # built of cubes: all its dimensions are closed, or none is
            closed = [all(length % least == 0 for length in lengths)] * 3
        rings = []
        for segments, ends in zip(self._dimensions, closed, strict=True):
            chosen = [i for i, s in enumerate(segments) if mask[s.axis]]
            devices = math.prod(segments[i].devices for i in chosen)
            if devices == 1:
                continue
            span = segments[chosen[0] :]
            groups = math.prod(s.devices for s in span if not mask[s.axis])
            rings.append(Ring(
                devices, ends and chosen[0] == 0, self._link.bandwidth_bytes_per_s / groups,
            ))  # fmt: skip
        return tuple(rings)

    @property
    def sides(self) -> tuple[int, ...]:
        """The sides of the slice of a torus, without those of one device; empty for a switch."""
        lengths = (math.prod(s.devices for s in segments) for segments in self._dimensions)
        return tuple(length for length in lengths if length > 1)

    def nodes(self, mask: Sequence[bool]) -> tuple[int, int]:
        """Devices per node, and nodes, of a group over the axes in ``mask`` on a switch.

        ``mask`` has one entry per mesh axis.  Minor axes fill a node first.
        """
        inside = outside = stride = 1
        one_node = math.prod(self._sizes) <= self._link.devices_per_node
        for axis in reversed(self._placed):
            size = self._sizes[axis]
            if mask[axis]:
                # This axis fills the part of a node that the axes minor to it leave.
                room = max(1, self._link.devices_per_node // stride)
                here = size if one_node else math.gcd(size, room)
                inside, outside = inside * here, outside * (size // here)
            stride *= size
        return inside, outside


def lay_out(link: Interconnect, mesh: Mesh) -> MeshOnLinks:
    """Places ``mesh`` on the smallest slice that holds it, in the mesh's order of devices.

    **Torus**: axes are placed from minor to major on the sides of :func:`slice_of`, as
    ``jax.experimental.mesh_utils`` does.  An axis takes as many whole sides as it can: an axis of
    16 devices takes both sides of 4x4 chips.  Otherwise it takes parts of sides; the devices of
    more major axes on the same side are then not neighbours.

    **Switch**: devices fill one node after another, in the order of the mesh.
    """
    sizes = mesh.sizes
    if link.topology != "torus":
        return MeshOnLinks(link, sizes, mesh.placed, ())
    sides = slice_of(mesh.devices, link.dimensions)
    left = list(sides)
    parts: list[list[_Segment]] = [[] for _ in sides]

    def preferred(split: tuple[int, ...]) -> tuple[object, ...]:
        whole = [n for n, side in zip(split, sides, strict=True) if n == side > 1]
        partial = (n for n, side, rest in zip(split, sides, left, strict=True) if rest < side)
        return math.prod(whole), len(whole), math.prod(partial), split

    for axis in reversed(mesh.placed):
        split = max(_splits(sizes[axis], left), key=preferred)
        for number, devices in enumerate(split):
            left[number] //= devices
            if devices > 1:
                parts[number].insert(0, _Segment(axis, devices))
    return MeshOnLinks(link, sizes, mesh.placed, tuple(map(tuple, parts)))


def slice_of(devices: int, dimensions: int) -> tuple[int, ...]:
    """The sides of the slice of a torus that is closest to a cube.

    Sides ascend in 2D and descend in 3D, as in the names of TPU slices.
    """
    sides = [1] * dimensions
    for prime in sorted(_primes(devices), reverse=True):
        sides[sides.index(min(sides))] *= prime
    return tuple(sorted(sides, reverse=dimensions > 2))


def _primes(number: int) -> list[int]:
    primes, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            primes.append(divisor)
            number //= divisor
        divisor += 1
    return [*primes, number] if number > 1 else primes


def _splits(size: int, sides: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to write ``size`` as a product of one divisor of each of ``sides``."""
    if not sides:
        if size == 1:
            yield ()
        return
    for part in range(1, size + 1):
        if size % part == sides[0] % part == 0:
            for rest in _splits(size // part, sides[1:]):
                yield part, *rest
