"""Hardware and a mesh, and what both do to the sizes of arrays."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from toast.cost.entities import Bools, Dims, Floats, Ints
from toast.cost.tables import Tables
from toast.hardware import Collectives, Hardware

#: Rows of the tiles in which devices with lanes keep arrays.
_ROWS = 8

#: Values smaller than this fraction of all memory do not affect the peak.
NEGLIGIBLE = 1e-6

#: Maximum number of shardings of a value that are enumerated.
_SPLITS = 2048


@dataclasses.dataclass(frozen=True)
class Machine:
    """Hardware and a mesh."""

    hardware: Hardware
    collectives: Collectives
    axis_sizes: Floats  # [A] devices along each axis

    @functools.cached_property
    def devices(self) -> Floats:
        """``[2 ** A]`` devices on each set of axes."""
        return self.collectives.devices.astype(np.float64)

    def lane_padding(self, sizes: Ints, dims: Dims) -> Floats:
        """Padded bytes over bytes of tensors sharded along ``dims``: ``[...]``.

        Arrays are in tiles of 8 rows with the hardware's lanes: one dimension is padded to a
        multiple of the lanes, and another to one of 8, or to a power of two below.  These are the
        two with the least padding.
        ``dims`` is ``[..., A]``, ``sizes`` (elements, unsharded) ``[R]`` or ``[X, R]``.
        """
        lanes = self.hardware.lanes
        if lanes == 1:
            return np.ones(dims.shape[:-1])
        local = np.broadcast_to(sizes, (*dims.shape[:-1], sizes.shape[-1])).astype(np.float64)
        for axis, devices in enumerate(self.axis_sizes.tolist()):
            here = dims[..., axis, None] == np.arange(sizes.shape[-1])
            local = np.where(here, local / devices, local)
        local = np.maximum(local, 1.0)
        wide = np.ceil(local / lanes) * lanes / local
        rows = np.minimum(2.0 ** np.ceil(np.log2(local)), _ROWS)
        tall = np.ceil(local / rows) * rows / local
        # Ones at the end are no dimensions, but tables have them.
        real = np.cumsum(sizes[..., ::-1] > 1, axis=-1)[..., ::-1] > 0
        tall = np.where(np.broadcast_to(real, tall.shape), tall, np.inf)
        every = np.arange(sizes.shape[-1])
        padded = [
            wide[..., d] * tall[..., every != d].min(axis=-1, initial=np.inf)
            for d in every.tolist()
        ]
        alone = real.sum(axis=-1) < 2
        return np.asarray(np.where(alone, wide.min(axis=-1), np.min(padded, axis=0)))

    def tables(self, tables: Tables, collective: Ints, group: Ints) -> Tables:
        """``tables`` with the columns that depend on hardware and mesh.

        ``collective`` and ``group`` are columns of value classes.
        """
        peaks = np.array([self.hardware.peak(dtype) for dtype in tables.dtypes])
        devices = float(self.devices[-1])
        return tables.on_hardware(peaks, devices, self._may_pad(tables), collective, group)

    def _may_pad(self, tables: Tables) -> Bools:
        """``[C]`` whether some sharding pads a value class; small classes are not padded."""
        values = tables.values
        padded = np.zeros(len(values), dtype=bool)
        large = np.flatnonzero(values.bytes > NEGLIGIBLE * (values.bytes * values.count).sum())
        if self.hardware.lanes == 1 or not len(large):
            return padded
        sizes, axes = values.sizes[large], len(self.axis_sizes)
        if (sizes.shape[1] + 1) ** axes > _SPLITS:
            padded[large] = True  # too many to check
            return padded
        for split in itertools.product(range(-1, sizes.shape[1]), repeat=axes):
            dims = np.broadcast_to(np.array(split, dtype=np.int8), (1, len(large), axes))
            padded[large] |= (self.lane_padding(sizes, dims) > 1)[0]
        return padded
