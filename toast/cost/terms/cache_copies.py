"""Copies of stacked caches in loops (:mod:`toast.cost.stacked_caches`)."""

from __future__ import annotations

import numpy as np

from toast.cost.axis_sets import axes_of
from toast.cost.entities import Entity, Floats
from toast.cost.layout import Layout, LocalLayout
from toast.cost.liveness import Lifetimes, LiveRanges
from toast.cost.terms.kernels import share_away, share_of_rows
from toast.cost.terms.term import LocalTerm

#: Memory accesses of a copy: a read and a write.
_ACCESSES = 2

#: The time of a copy over that of a kernel that computes as it moves as many bytes: 2.0 in programs
#: that XLA compiled for v4, 2.0 for v5e and 2.1 for v6e.
_COPYING = 2.0

#: The share of the time of a whole tile that a tile takes, however few its rows: 0.7 and 0.77 of it
#: for 2 and 4 of 8 rows in programs compiled for v6e and v5e.
_PER_TILE = 0.65

#: The time of a byte of elements of one byte over that of wider ones: a tile of them takes 0.77 of
#: the time of one in bfloat16, in a program compiled for v5e.
_OF_BYTES = 1.55


class CacheCopies(LocalTerm):
    """Copies of caches that loops slice from stacks, update and stack again.

    A cache ``[batch, keys, heads, size]`` of two heads is in tiles of two rows: a copy of such a
    tile takes almost as long as one of a whole tile.
    """

    name, scope, label = "cache copies", Entity.USE_CLASS, "copy"

    def seconds(self, layout: LocalLayout) -> Floats:
        uses, hardware = layout.tables.uses, layout.machine.hardware
        seconds = np.zeros(layout.used.shape[:2])
        some = np.flatnonzero(uses.cache_copies)
        if not len(some):
            return seconds
        moved = layout.read_bytes[:, some] * uses.cache_copies[some]
        spent = _ACCESSES * _COPYING * moved / hardware.memory_bytes_per_s
        values, used = layout.tables.values, layout.used[:, some]
        of = uses.value[some]
        row = np.maximum(values.rank[of] - 2, 0)
        sizes = np.take_along_axis(values.sizes[of], row[:, None], axis=1)[:, 0]
        rows = sizes / layout.devices[axes_of(used == row[:, None])]
        # Results of loops that are small stay in fast memory until the copy.
        size = layout.read_bytes[:, some]
        away = np.where(uses.update[some], 1.0, share_away(hardware, size))
        packed = np.where(values.element[of] <= 1, _OF_BYTES, 1.0)
        seconds[:, some] = spent * away * packed * share_of_rows(rows, _PER_TILE)
        return seconds

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes | None:
        return ranges.caches if len(ranges.caches) else None

    def bytes(self, layout: Layout) -> Floats:
        return layout.read_bytes


__all__ = ["CacheCopies"]
