"""Where the axes of a mesh lie on the hardware's links."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from toast.hardware.description import Interconnect
from toast.hardware.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class Ring:
    """What a group of devices has of one dimension of a torus."""

    devices: int
    #: Whether its ends are linked.
    closed: bool
    #: Bytes per second of one link in one direction that the group may count on.
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class _Segment:
    """The part of one axis on one dimension of a torus, with as many devices."""

    axis: int
    devices: int


@dataclasses.dataclass(frozen=True)
class MeshOnLinks:
    """A mesh on an interconnect."""

    _link: Interconnect
    _sizes: tuple[int, ...]
    #: Axes as they lie on the devices, major to minor.
    _placed: tuple[int, ...]
    #: Torus: the segments of each dimension, major to minor.
    _dimensions: tuple[tuple[_Segment, ...], ...]

    def rings(self, mask: Sequence[bool]) -> tuple[Ring, ...]:
        """What a group over the axes in ``mask`` has of each dimension of a torus.

        Groups whose devices stand apart, because a minor axis that is not theirs lies between them,
        interleave: as many as there are devices on such axes share the links.
        """
        lengths = [math.prod(s.devices for s in segments) for segments in self._dimensions]
        least = self._link.wraparound_from
        closed = [length >= least for length in lengths]
        if self._link.dimensions == 3:  # is built of cubes: all its dimensions are closed or none
            closed = [all(length % least == 0 for length in lengths)] * 3
        found = []
        for segments, ends in zip(self._dimensions, closed, strict=True):
            chosen = [i for i, s in enumerate(segments) if mask[s.axis]]
            devices = math.prod(segments[i].devices for i in chosen)
            if devices == 1:
                continue
            within = segments[chosen[0] :]
            apart = math.prod(s.devices for s in within if not mask[s.axis])
            found.append(Ring(
                devices, ends and chosen[0] == 0, self._link.bandwidth_bytes_per_s / apart,
            ))  # fmt: skip
        return tuple(found)

    def nodes(self, mask: Sequence[bool]) -> tuple[int, int]:
        """Of a group over the axes in ``mask`` on a switch: devices per node, and nodes.

        Minor axes fill a node first.
        """
        inside = outside = stride = 1
        one_node = math.prod(self._sizes) <= self._link.devices_per_node
        for axis in reversed(self._placed):
            size = self._sizes[axis]
            if mask[axis]:
                # Of this axis, as many as fit into the node beside what lies inside them.
                room = max(1, self._link.devices_per_node // stride)
                here = size if one_node else math.gcd(size, room)
                inside, outside = inside * here, outside * (size // here)
            stride *= size
        return inside, outside


def lay_out(link: Interconnect, mesh: Mesh) -> MeshOnLinks:
    """The axes of ``mesh``, in the order that they are placed in, on a slice as large as it needs.

    **Torus**: minor to major over the sides of :func:`slice_of`, as ``jax.experimental.mesh_utils``
    assigns them.  An axis takes whole sides where it can, as many as it can: one of 16 both sides
    of 4x4 chips.  Else it takes parts of sides, which the axes major to it stand apart on.

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
        begun = (n for n, side, rest in zip(split, sides, left, strict=True) if rest < side)
        return math.prod(whole), len(whole), math.prod(begun), split

    for axis in reversed(mesh.placed):
        split = max(_splits(sizes[axis], left), key=preferred)
        for number, devices in enumerate(split):
            left[number] //= devices
            if devices > 1:
                parts[number].insert(0, _Segment(axis, devices))
    return MeshOnLinks(link, sizes, mesh.placed, tuple(map(tuple, parts)))


def slice_of(devices: int, dimensions: int) -> tuple[int, ...]:
    """The sides of the most cubic slice of a torus, smallest first (in 3D: last)."""
    sides = [1] * dimensions
    for prime in sorted(_primes(devices), reverse=True):
        sides[sides.index(min(sides))] *= prime
    return tuple(sorted(sides, reverse=dimensions > 2))


def _primes(number: int) -> list[int]:
    found, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return [*found, number] if number > 1 else found


def _splits(size: int, sides: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """``size`` as a product of a divisor of each of ``sides``."""
    if not sides:
        if size == 1:
            yield ()
        return
    for part in range(1, size + 1):
        if size % part == sides[0] % part == 0:
            for rest in _splits(size // part, sides[1:]):
                yield part, *rest
