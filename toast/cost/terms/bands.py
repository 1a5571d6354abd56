"""Images in bands: XLA for TPUs cuts the rows of few images, and counts each part as an image.

Kernels around convolutions are then fused no more, because each slices, pads and copies the edges
of the bands.
"""

from __future__ import annotations

import numpy as np

from toast.cost.entities import Entity, Floats
from toast.cost.layout import Layout
from toast.cost.liveness import Lifetimes, LiveRanges
from toast.cost.terms.term import Term

#: Accesses of the memory for each value of the program in bands, besides those of fused kernels.
#: Fitted to 18 programs with up to 7 images on a device: 1.0 to 1.7 in most.
_ACCESSES = 1.35

#: The share of these values that are in memory: some of their kernels are fused.  Fitted to the
#: peaks of the same programs.
_KEPT = 0.85


class ImagesInBands(Term):
    """Images in bands, each in memory from its op to the last that uses it."""

    name, scope, label = "images in bands", Entity.VALUE_CLASS, "value"
    has_gaps = False

    def seconds(self, layout: Layout) -> Floats:
        written = layout.value_bytes * layout.band_padding * layout.tables.values.count
        return np.asarray(_ACCESSES * written / layout.machine.hardware.memory_bytes_per_s)

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes | None:
        large = (ranges.size > ranges.floor) & ~ranges.host
        values = ranges.banded[large[ranges.banded]]
        if not len(values):
            return None
        start, last = ranges.maker.copy(), ranges.maker.copy()
        np.maximum.at(last, ranges.use_value, ranges.use_op)
        live, stored = ranges.live, ranges.stored
        start[stored], last[stored] = live.start[stored], live.end[stored]
        return Lifetimes(ranges.value_class[values], start[values], last[values] + 1, values)

    def bytes(self, layout: Layout) -> Floats:
        values, padding = layout.tables.values, layout.band_padding
        whole = layout.value_bytes * padding / layout.machine.hardware.allocator_efficiency
        counted = layout.value_memory * ~(values.fused | values.merged)
        return np.where(padding > 0, np.maximum(_KEPT * whole - counted, 0.0), 0.0)


__all__ = ["ImagesInBands"]
