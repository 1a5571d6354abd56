"""Where the axes of a mesh lie on the hardware's links."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

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
class Layout:
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
        closed = [length >= self._link.wraparound_from for length in lengths]
        # A 3D torus is closed in cubes: all three dimensions or none.
        cube = self._link.dimensions < 3 or sum(closed) == 3
        found = []
        for segments, ends in zip(self._dimensions, closed, strict=True):
            chosen = [i for i, s in enumerate(segments) if mask[s.axis]]
            devices = math.prod(segments[i].devices for i in chosen)
            if devices == 1:
                continue
            within = segments[chosen[0] :]
            apart = math.prod(s.devices for s in within if not mask[s.axis])
            found.append(Ring(
                devices, cube and ends and chosen[0] == 0,
                self._link.bandwidth_bytes_per_s / apart,
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


def lay_out(link: Interconnect, mesh: Mesh) -> Layout:
    """The axes of ``mesh``, in the order that they are placed in, on a slice as large as it needs.

    **Torus**: major to minor over the dimensions, as ``jax.experimental.mesh_utils`` assigns them;
    axes of one device take none.  Spare dimensions fold the axis that is longest, as in a slice of
    4x4 chips for one axis of 16.  With more axes than dimensions, the major ones share the first.

    **Switch**: devices fill one node after another, in the order of the mesh.
    """
    sizes = mesh.sizes
    real = [axis for axis in mesh.placed if sizes[axis] > 1]
    if link.topology != "torus" or not real:
        return Layout(link, sizes, mesh.placed, ())
    sharing = real[: len(real) - link.dimensions + 1] if len(real) > link.dimensions else real[:1]
    first = tuple(_Segment(axis, sizes[axis]) for axis in sharing)
    dimensions = [first, *((_Segment(axis, sizes[axis]),) for axis in real[len(sharing) :])]
    if len(sharing) == 1:
        dimensions = _folded_out(dimensions, sizes, link.dimensions)
    return Layout(link, sizes, mesh.placed, tuple(dimensions))


def _folded_out(
    dimensions: list[tuple[_Segment, ...]], sizes: Sequence[int], most: int
) -> list[tuple[_Segment, ...]]:
    """Fold the longest axis over another dimension, while there is one to spare."""
    sides: dict[int, tuple[int, ...]] = {
        segment.axis: (segment.devices,) for (segment,) in dimensions
    }
    for _ in range(most - len(dimensions)):
        folded = {axis: _folded(sizes[axis], len(sides[axis]) + 1) for axis in sides}
        split = [axis for axis in sides if folded[axis][-1] > 1]
        if split:
            longest = max(split, key=lambda axis: sides[axis][0])
            sides[longest] = folded[longest]
    return [(_Segment(axis, side),) for axis, of in sides.items() for side in of]


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
