"""Hardware and a mesh, and what both do to the sizes of arrays."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from toast.cost.axis_sets import GATHER, REDUCE, SCATTER, Axes
from toast.cost.entities import Bools, Dims, Floats, Ints
from toast.cost.image_tiles import LEAST_IN_BANDS, MOST_IN_BANDS
from toast.cost.tables import Tables
from toast.hardware import Collectives, Hardware
from toast.hardware.description import LANE_BYTES

#: Rows of the tiles in which devices with lanes keep arrays.
_ROWS = 8

#: Values smaller than this fraction of all memory do not affect the peak.
NEGLIGIBLE = 1e-6

#: XLA keeps small temporaries in fast memory: about half of it, and of few, almost all.  Fitted to
#: the peaks of programs that XLA compiled.
_FAST_ROOM, _FAST_SHARE = 0.56, 0.9

#: The bands of a row of positions, and how many of the next ones a window of three needs.
_BANDS, _EDGES = 8, 2

#: Maximum number of shardings of a value that are enumerated.
_SPLITS = 2048


@dataclasses.dataclass(frozen=True)
class Machine:
    """Hardware and a mesh."""

    hardware: Hardware
    collectives: Collectives
    #: The same by XLA's estimates, by which it decides how to compute sums
    #: (:attr:`toast.hardware.Hardware.as_compiled_for`).
    estimated: Collectives
    axis_sizes: Floats  # [A] devices along each axis
    background: frozenset[str]  # collectives beside which products run
    parts_products: bool = True  # XLA for TPUs makes loops of products whose sums are scattered
    #: The part of the memory beside arguments that has results: they are not in fast memory.
    part_of_results: float = 0.0
    #: :attr:`toast.hardware.Hardware.early_gathers`, or all if flags make the compiler start them.
    early_gathers: tuple[float, float] = (1.0, 1.0)

    @functools.cached_property
    def devices(self) -> Floats:
        """``[2 ** A]`` devices on each set of axes."""
        return self.collectives.devices.astype(np.float64)

    def run_seconds(self, kind: int, size: Floats, group: Axes | Ints) -> Floats:
        """Seconds of collectives that a program states, as XLA runs them.

        The arguments are those of :meth:`toast.hardware.Collectives.seconds`.
        """
        seconds = self.collectives.seconds(kind, size, group)
        summed = self.run_as_sums(kind)[group]
        if not summed.any():
            return seconds
        return np.where(summed, self.collectives.seconds(REDUCE, size, group), seconds)

    def run_as_sums(self, kind: int) -> Bools:
        """``[2 ** A]`` the groups on which XLA runs an all-reduce in place of a collective."""
        if kind == GATHER:
            return self.collectives.gathers_by_sums
        if kind == SCATTER:
            return self.collectives.scatters_by_sums
        return np.zeros(len(self.devices), dtype=bool)

    def lane_padding(
        self, sizes: Ints, tiled: Bools, element: Floats, dims: Dims, headed: Ints | int = -1
    ) -> Floats:
        """Padded bytes over bytes of tensors sharded along ``dims``: ``[...]``.

        Arrays are in tiles of 8 rows with the hardware's lanes: one dimension is padded to a
        multiple of the lanes, and another to one of 8, or to a power of two below.  These are the
        two with the least padding.  Small elements share a lane, those of as many rows as make a
        word of 4 bytes.  An array with one dimension is in tiles of 8 rows, or of a power of two
        below; a scalar takes one row.

        ``dims`` is ``[..., A]``; ``sizes`` (elements, unsharded) and ``tiled`` (the dimensions that
        may be in tiles; the first one is that of the images) are ``[R]`` or ``[X, R]``; ``element``
        (the bytes of one) and ``headed`` are numbers or ``[X]``.  ``headed`` is the dimension of
        heads in scores of a cache (:mod:`toast.cost.attention_scores`), -1 for none: the heads of a
        device are in the lanes if they are several and fill the rows of the cache's tiles.
        """
        lanes = self.hardware.lanes
        if lanes == 1:
            return np.ones(dims.shape[:-1])
        local = self._local(sizes, dims)
        packed = np.maximum(LANE_BYTES / np.asarray(element), 1.0)
        only = local[..., 0] if sizes.shape[-1] else np.ones(dims.shape[:-1])
        tile = np.clip(2.0 ** np.ceil(np.log2(only)), lanes * packed, lanes * _ROWS)
        in_tiles = self._in_tiles(local, sizes, tiled)
        rank = in_tiles.sum(axis=-1)
        alone = np.where(np.equal(rank, 1), np.ceil(only / tile) * tile / only, lanes * packed)
        paddings = self._paddings(local, in_tiles, packed)
        padded = paddings.min(axis=-1, initial=np.inf)
        if np.any(np.greater_equal(headed, 0)):
            place = np.broadcast_to(np.maximum(headed, 0), local.shape[:-1])[..., None]
            heads, lane = (np.take_along_axis(x, place, -1)[..., 0] for x in (local, paddings))
            whole = heads % np.minimum(2.0 ** np.ceil(np.log2(heads)), _ROWS) == 0
            padded = np.where((np.asarray(headed) >= 0) & (heads > 1) & whole, lane, padded)
        return np.asarray(np.where(np.greater(rank, 1), padded, alone))

    def in_lanes(self, sizes: Ints, tiled: Bools, element: Floats, dims: Dims) -> Ints:
        """The dimension in the lanes of a tile: ``[...]``, the last one with the least padding.

        The arguments are those of :meth:`lane_padding`, of arrays with two dimensions or more.
        """
        packed = np.maximum(LANE_BYTES / np.asarray(element), 1.0)
        local = self._local(sizes, dims)
        padded = self._paddings(local, self._in_tiles(local, sizes, tiled), packed)
        return np.asarray(sizes.shape[-1] - 1 - padded[..., ::-1].argmin(axis=-1))

    def padding_of_images(self, sizes: Ints, tiled: Bools, element: Floats, dims: Dims) -> Floats:
        """The bytes of images with the images in the lanes, over those in their own layout.

        The arguments are those of :meth:`lane_padding`.  Fewer images than a tile has rows have
        another layout, which loops do not turn: 0.0.
        """
        packed = np.maximum(LANE_BYTES / np.asarray(element), 1.0)
        local = self._local(sizes, dims)
        first = np.broadcast_to(np.argmax(tiled, axis=-1)[..., None], (*local.shape[:-1], 1))
        padded = self._paddings(local, np.broadcast_to(tiled, local.shape), packed)
        padding = np.take_along_axis(padded, first, axis=-1)[..., 0] / padded.min(axis=-1)
        enough = np.take_along_axis(local, first, axis=-1)[..., 0] >= _ROWS
        return np.asarray(np.where(enough, padding, 0.0))

    def padding_in_bands(self, sizes: Ints, rank: Ints, tiled: Bools, dims: Dims) -> Floats:
        """The bytes of images in bands, with their overlap, over those without: ``[S, X]``.

        XLA cuts the rows of few images into bands and counts each as an image
        (:data:`toast.cost.image_tiles.MOST_IN_BANDS`).  It is 0 where images are not in bands.
        ``sizes`` and ``tiled`` are ``[X, R]``, of images with ``rank`` dimensions (``[X]``).
        """
        local, every = self._local(sizes, dims), np.arange(sizes.shape[-1])
        places = ~tiled & (every < rank[:, None])
        first = [each.argmax(axis=1) for each in (tiled, places)]
        last = [len(every) - 1 - each[:, ::-1].argmax(axis=1) for each in (tiled, places)]
        each = np.arange(len(sizes))
        images, height, features, width = (local[:, each, dim] for dim in (*first, *last))
        padding = np.minimum(*(
            np.ceil(size / self.hardware.lanes) * self.hardware.lanes / size
            for size in (height, features)
        ))  # fmt: skip
        overlapping = _BANDS * np.ceil((width + _EDGES) / _BANDS) / width
        banded = (images <= MOST_IN_BANDS) & (width >= LEAST_IN_BANDS)
        return np.asarray(np.where(banded, padding * overlapping, 0.0))

    def _local(self, sizes: Ints, dims: Dims) -> Floats:
        """``[..., R]`` elements of a device's part of tensors along each dimension."""
        local = np.broadcast_to(sizes, (*dims.shape[:-1], sizes.shape[-1])).astype(np.float64)
        for axis, devices in enumerate(self.axis_sizes.tolist()):
            here = dims[..., axis, None] == np.arange(sizes.shape[-1])
            local = np.where(here, local / devices, local)
        return np.maximum(local, 1.0)

    def _in_tiles(self, local: Floats, sizes: Ints, tiled: Bools) -> Bools:
        """``[..., R]`` the dimensions that may be in tiles: all, if a device has few images.

        After a transpose that puts features before images, it takes the features for the images.
        """
        if not sizes.shape[-1]:
            return tiled
        first = np.broadcast_to(np.argmax(tiled, axis=-1)[..., None], (*local.shape[:-1], 1))
        few = np.take_along_axis(local, first, axis=-1) < _ROWS
        return np.asarray(tiled | (few & (np.asarray(sizes) > 1)))

    def _paddings(self, local: Floats, tiled: Bools, packed: Floats) -> Floats:
        """``[..., R]`` padded bytes over bytes of tensors if a dimension is in the lanes."""
        lanes = self.hardware.lanes
        wide = np.ceil(local / lanes) * lanes / local
        rows = np.minimum(2.0 ** np.ceil(np.log2(local)), _ROWS)
        rows = np.maximum(rows, np.minimum(packed, _ROWS)[..., None])
        tall = np.ceil(local / rows) * rows / local
        wide, tall = (np.where(tiled, padding, np.inf) for padding in (wide, tall))
        every = np.arange(local.shape[-1])
        padded = [
            wide[..., d] * tall[..., every != d].min(axis=-1, initial=np.inf)
            for d in every.tolist()
        ]
        return np.stack(padded, axis=-1) if padded else np.ones((*local.shape[:-1], 0))

    def tables(self, tables: Tables, collective: Ints, group: Ints) -> Tables:
        """``tables`` with the columns that depend on hardware and mesh.

        ``collective`` and ``group`` are columns of value classes.
        """
        peaks = np.array([self.hardware.peak(dtype) for dtype in tables.dtypes])
        devices = float(self.devices[-1])
        gaps, may_pad = self.hardware.heap_gaps, self._may_pad(tables)
        return tables.on_hardware(peaks, devices, gaps, may_pad, collective, group)

    @property
    def fast_memory(self) -> tuple[float, float]:
        """The share of temporaries that are in fast memory instead, and their most bytes."""
        room = _FAST_ROOM * self.hardware.products.fast_bytes
        return (_FAST_SHARE * (1.0 - self.part_of_results), room) if room else (0.0, 0.0)

    def in_memory(self, temporaries: Floats) -> Floats:
        """The bytes of ``temporaries``, those at one moment, that are not in fast memory."""
        share, room = self.fast_memory
        return temporaries - np.minimum(room, share * temporaries)

    def most_temporaries(self, memory_bytes: float) -> float:
        """The most bytes of temporaries of which ``memory_bytes`` are not in fast memory."""
        share, room = self.fast_memory
        return min(memory_bytes + room, memory_bytes / (1.0 - share))

    def _may_pad(self, tables: Tables) -> Bools:
        """``[C]`` whether some sharding pads a value class.

        Small classes are not padded, unless they have arguments.
        """
        values = tables.values
        padded = np.zeros(len(values), dtype=bool)
        matters = values.bytes > NEGLIGIBLE * (values.bytes * values.count).sum()
        large = np.flatnonzero((matters | (values.arguments > 0)) & (values.bytes > 0))
        if self.hardware.lanes == 1 or not len(large):
            return padded
        sizes, axes = values.sizes[large], len(self.axis_sizes)
        tiled, element, headed = values.tiled[large], values.element[large], values.headed[large]
        if (sizes.shape[1] + 1) ** axes > _SPLITS:
            padded[large] = True  # too many to check
            return padded
        for split in itertools.product(range(-1, sizes.shape[1]), repeat=axes):
            dims = np.broadcast_to(np.array(split, dtype=np.int8), (1, len(large), axes))
            padded[large] |= (self.lane_padding(sizes, tiled, element, dims, headed) > 1)[0]
        return padded
