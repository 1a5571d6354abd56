"""The time of matrix products by size: tiles, waves of blocks, and the depth of their loops.

A device has a number of units (the matrix unit of a TPU core; the multiprocessors of a GPU), and
each computes one tile of a result at a time.  A product whose tiles do not fill the last wave of
units takes as long as one whose tiles do.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Bytes that one element of a partial result moves: it is written and read, in float32.
_PARTIAL_BYTES = 8

#: Bytes of an array over those of the fast memory: up to the first share, it is there; from the
#: second on, it is not.
_ROOM = (0.25, 0.75)

#: The same for an array that each kernel of a loop reads: one of 98 of 128 MiB was there.
_ROOM_OFTEN = (0.75, 1.0)

#: The same for the smaller one of two float32 operands, which kernels read again if it is not.
_RELOADED = (0.125, 0.25)

#: Time of a result that stays in the fast memory, over that of one that is moved.
_STORED_FAST = 0.25


@dataclasses.dataclass(frozen=True)
class ProductPrices:
    """How a kind of device computes matrix products; one unit with one tile by default."""

    #: Rows and columns of the tiles that kernels offer; the library picks the fastest.
    tiles: tuple[tuple[int, int], ...] = ((1, 1),)
    #: The depth of products is padded to a multiple of this number of elements.
    depth: int = 1
    #: Tiles that the device computes at once.
    units: int = 1
    #: Elements of depth that the start and the end of a tile take, besides its own depth.
    ramp: float = 0.0
    #: Numbers of parts that the depth of a product may be divided into, for more tiles at once.
    parts: tuple[int, ...] = (1,)
    #: The rate of products that are bound by memory, over the rate of other kernels.
    memory_share: float = 1.0
    #: Elements of results per second, padded to tiles: a product of little depth waits for them.
    results_per_s: float = math.inf
    #: Elements of its larger operand that a product in a loop loads into the matrix unit per
    #: second, if the operand is the same in each iteration.
    weights_per_s: float = math.inf
    #: Multiply-adds of depthwise convolutions per second, with the features padded to lanes; 0 if
    #: they are priced as products.
    depthwise_per_s: float = 0.0
    #: The same of the gradients of their kernels.
    depthwise_sums_per_s: float = 0.0
    #: Bytes that a kernel moves before it begins to compute, and after it ends.
    window_bytes: float = 0.0
    #: The share of its time that a product takes longer if it reads two large float32 operands:
    #: neither stays in fast memory, and the kernel reads parts of both again.
    reloading: float = 0.0
    #: Kernels compute, store results and move bytes at once, but not wholly: their time is the norm
    #: of this order of the three times.
    order: float = math.inf
    #: Bytes of the fast memory beside the units, where small operands and results stay; 0 if none.
    fast_bytes: float = 0.0

    def seconds(self, size: Floats, at_peak: Floats, memory_bytes_per_s: float) -> Floats:
        """Seconds of products without those that memory bounds: ``[...]``.

        ``size`` is ``[..., 4]``: rows, columns and depth of one product, and the number of products
        in a batch.  ``at_peak`` (``[...]``) are the seconds that their FLOPs take at the rate of
        endless products; ``memory_bytes_per_s`` is the rate of other kernels.
        """
        rows, columns, depth, batch = np.moveaxis(size, -1, 0)
        padded = np.ceil(depth / self.depth) * self.depth
        useful = rows * columns * depth * batch
        adding = _PARTIAL_BYTES * rows * columns * batch / self._memory_rate(memory_bytes_per_s)
        best = np.full(np.broadcast_shapes(rows.shape, at_peak.shape), np.inf)
        for tile_rows, tile_columns in self._shapes():
            blocks = batch * np.ceil(rows / tile_rows) * np.ceil(columns / tile_columns)
            area = tile_rows * tile_columns
            for parts in self.parts:
                waves = blocks * parts
                if self.units > 1:
                    waves = np.ceil(waves / self.units) * self.units
                seconds = at_peak * (waves * area * (padded / parts + self.ramp) / useful)
                if parts > 1:
                    seconds = seconds + parts * adding
                np.minimum(best, seconds, out=best)
        return np.asarray(best)

    def kernel_seconds(
        self,
        computing: Floats,
        stored: Floats,
        moved: Floats,
        count: Floats,
        memory_bytes_per_s: float,
    ) -> Floats:
        """Seconds of products, from those that they compute: ``[...]``.

        ``stored`` are elements of results of the matrix unit and ``moved`` bytes of operands and
        results, both of all products; ``count`` is the number of products.
        """
        moving = self.moving_seconds(moved, memory_bytes_per_s)
        if math.isinf(self.order):
            return np.maximum(computing, moving)
        storing = stored / self.results_per_s
        most = np.maximum(np.maximum(computing, storing), moving)
        some = np.maximum(most, np.finfo(np.float64).tiny)
        powers = sum((part / some) ** self.order for part in (computing, storing, moving))
        window = np.minimum(moved, count * self.window_bytes)
        filling = self.moving_seconds(window, memory_bytes_per_s)
        return np.asarray(most * powers ** (1 / self.order) + filling)

    def loading_seconds(self, size: Floats) -> Floats:
        """Seconds to load the larger operand of a product into the matrix unit: ``[...]``.

        ``size`` is that of :meth:`seconds`.
        """
        rows, columns, depth, batch = np.moveaxis(size, -1, 0)
        return np.asarray(depth * np.maximum(rows, columns) * batch / self.weights_per_s)

    def moving_seconds(self, moved_bytes: Floats, memory_bytes_per_s: float) -> Floats:
        """Seconds that products take to move their operands and results."""
        return moved_bytes / self._memory_rate(memory_bytes_per_s)

    def moved_bytes(self, size: Floats, *, often: bool = False) -> Floats:
        """Bytes that products move of operands or results of ``size`` bytes each: ``[...]``.

        The compiler keeps small arrays in fast memory between kernels, and brings those that are
        not there beside earlier kernels.  The larger an array, the less often there is room; those
        that kernels read ``often`` come first.
        """
        if not self.fast_bytes:
            return size
        least, most = (share * self.fast_bytes for share in (_ROOM_OFTEN if often else _ROOM))
        return np.asarray(size * np.clip((size - least) / (most - least), 0.0, 1.0))

    def reloading_share(self, smaller: Floats) -> Floats:
        """The share that a product of float32 operands takes longer: ``[...]``.

        ``smaller`` are the bytes of its smaller operand, for one product of a batch.
        """
        if not (self.fast_bytes and self.reloading):
            return np.zeros_like(smaller)
        least, most = (share * self.fast_bytes for share in _RELOADED)
        known = np.maximum(smaller, least)
        return np.asarray(
            self.reloading * np.minimum(np.log2(known / least) / np.log2(most / least), 1.0)
        )

    def moved_results(self, results: Floats, away: Floats) -> Floats:
        """Elements of results that take as long as ``results``, of which a share moves ``away``."""
        return np.asarray(results * (_STORED_FAST + (1 - _STORED_FAST) * away))

    def _memory_rate(self, memory_bytes_per_s: float) -> float:
        return self.memory_share * memory_bytes_per_s

    def _shapes(self) -> tuple[tuple[int, int], ...]:
        """The tiles; those of several units lie either way round."""
        if self.units == 1:
            return self.tiles
        return tuple(dict.fromkeys(
            shape for rows, columns in self.tiles for shape in ((rows, columns), (columns, rows))
        ))  # fmt: skip
