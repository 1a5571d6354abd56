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

    ``before`` and ``after`` have the axes of each dimension, which has as many shards in both.
    """
    ends = [{axis for axes in spec for axis in axes} for spec in (before, after)]
    both = [(axis,) for axis in mesh.names if axis not in ends[0] | ends[1]]
    # Copies along axes that shard the value later are those along the axes that did so before.
    apart = [tuple(a for a in mesh.names if a in ends[1 - n] - ends[n]) for n in range(2)]
    tiles_before = _all_tiles(mesh, (*before, apart[0], *both))
    source = {tile: device for device, tile in enumerate(tiles_before)}
    tiles_after = _all_tiles(mesh, (*after, apart[1], *both))
    pairs = [(source[tile], device) for device, tile in enumerate(tiles_after)]
    return np.array(sorted(pairs), dtype=np.int64)


def _all_tiles(mesh: Mesh, spec: Sequence[tuple[str, ...]]) -> list[tuple[int, ...]]:
    """The tile of each dimension on each device."""
    real = [tuple(axis for axis in axes if axis in mesh.names) for axes in spec]
    columns = [tiles(mesh, axes) for axes in real]
    return [tuple(map(int, row)) for row in np.stack(columns, axis=1)] if columns else []
