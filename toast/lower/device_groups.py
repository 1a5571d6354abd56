"""Numbers of devices: the groups of a collective, and the tile that each device holds.

Devices are numbered as partitions of XLA: in the order of the mesh, the last axis fastest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from toast.hardware import Mesh

Ints = npt.NDArray[np.int64]


@functools.lru_cache(maxsize=1024)
def groups(mesh: Mesh, axes: tuple[str, ...]) -> Ints:
    """``[groups, devices]`` the devices that differ along ``axes`` only, the first axis slowest."""
    grid = np.arange(mesh.devices, dtype=np.int64).reshape(mesh.sizes)
    inside = [mesh.names.index(axis) for axis in axes]
    outside = [axis for axis in range(len(mesh.sizes)) if axis not in inside]
    devices = math.prod(mesh.sizes[axis] for axis in inside)
    return np.ascontiguousarray(grid.transpose(outside + inside).reshape(-1, devices))


@functools.lru_cache(maxsize=1024)
def tiles(mesh: Mesh, axes: tuple[str, ...]) -> Ints:
    """``[devices]`` the tile of a dimension that ``axes`` shard, major to minor."""
    number = np.zeros(mesh.devices, dtype=np.int64)
    coordinates = np.unravel_index(np.arange(mesh.devices), mesh.sizes)
    for axis in axes:
        place = mesh.names.index(axis)
        number = number * mesh.sizes[place] + coordinates[place]
    return number


def moves(mesh: Mesh, before: Sequence[tuple[str, ...]], after: Sequence[tuple[str, ...]]) -> Ints:
    """``[devices, 2]`` the source and the target of each shard, if axes change places.

    ``before`` and ``after`` have the axes of each dimension: the same ones in another order, or
    others of the same sizes.
    """
    free = sorted({*mesh.names} - {axis for axes in before for axis in axes})
    # Where an axis was free that has a dimension afterwards, the axis that it replaces is free.
    replaced = {
        new: old
        for axes, others in zip(before, after, strict=True)
        for old, new in zip(axes, others, strict=True)
        if new in free
    }
    source = {tile: device for device, tile in enumerate(_all_tiles(mesh, before, free))}
    left = [replaced.get(axis, axis) for axis in free]
    pairs = [(source[tile], device) for device, tile in enumerate(_all_tiles(mesh, after, left))]
    return np.array(sorted(pairs), dtype=np.int64)


def _all_tiles(
    mesh: Mesh, spec: Sequence[tuple[str, ...]], others: Sequence[str]
) -> list[tuple[int, ...]]:
    """The tile of each dimension on each device, and its place along the other axes."""
    real = [tuple(axis for axis in axes if axis in mesh.names) for axes in spec]
    columns = [tiles(mesh, axes) for axes in (*real, *((axis,) for axis in others))]
    return [tuple(map(int, row)) for row in np.stack(columns, axis=1)] if columns else []
