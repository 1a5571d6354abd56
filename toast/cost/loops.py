"""Products that are computed shard by shard, beside collective-permutes (GShard, 3.3.2).

If an operand of a product would be gathered along a dimension that the result has, too, each device
multiplies its own shard while those of its neighbours are on their way: half of them go around in
each direction.  If a result would be scattered, the parts of the sums go around in the same way.
The permutes run beside the product, as other collectives may.

A product becomes a loop if that is clearly faster: its permutes that are not hidden, and its
kernels, which are smaller, must take at most half the time of a collective that other products hide
as far as they can.  A loop that gains less can lose: its permutes keep links and a product busy
that other collectives need, too.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from toast.cost.axis_sets import PERMUTE, Axes
from toast.cost.entities import Floats, Ints
from toast.cost.machine import Machine

#: Devices up to which a loop is written; it has one product per device.
_MOST = 16

#: Time of a loop over that of its collective, at most.
_LARGEST_SHARE = 0.5

#: Accesses of a result in memory that a loop adds.  Its parts are no longer fused with the op that
#: uses the result, which is written and read.  Of a sum, each addition reads two and writes one.
UNFUSED, ADDED = 2, 3


@dataclasses.dataclass(frozen=True)
class Loops:
    """Loops of products, for ``X`` value or use classes in ``S`` states."""

    #: ``[S, X]`` the axis around which shards go; none if there is no loop.
    axes: Axes
    #: ``[S, X]`` how many shards each device receives.
    passes: Floats
    #: ``[S, X]`` seconds of a permute that run beside one in the other direction.
    both_ways: Floats
    #: ``[S, X]`` seconds that the parts of a product take longer than all of it at once.
    longer: Floats

    @staticmethod
    def none(shape: tuple[int, ...]) -> Loops:
        """No loops."""
        return Loops(np.zeros(shape, dtype=np.uint8), *np.zeros((3, *shape)))

    @property
    def some(self) -> bool:
        """Whether there is a loop."""
        return bool(self.axes.any())


@dataclasses.dataclass(frozen=True)
class LoopCandidates:
    """``[M]`` collectives along one axis each that may become loops."""

    state: Ints
    entity: Ints
    axis: Axes  # the set of the one axis
    size: Floats  # bytes of a shard
    seconds: Floats  # of the collective
    product: Floats  # seconds of the product on a device
    independent: Floats  # seconds of other products that may run beside the collective
    accessed: Floats  # bytes that the loop writes and reads besides those of the product


def faster_loops(shape: tuple[int, int], machine: Machine, candidates: LoopCandidates) -> Loops:
    """The loops (``shape`` is ``[S, X]``) that are faster than their collectives."""
    hardware, devices = machine.hardware, machine.devices[candidates.axis]
    part = candidates.product / devices
    once = machine.collectives.seconds(PERMUTE, candidates.size, candidates.axis)
    # In each round, a shard arrives from either side; a device computes its own part in the first.
    waiting = np.maximum(once - part, 0) + (devices // 2 - 1) * np.maximum(once - 2 * part, 0)
    passes = devices - 1
    accessing = candidates.accessed / hardware.memory_bytes_per_s
    longer = passes * hardware.product_latency_s + accessing
    beside = np.minimum(candidates.seconds, candidates.independent)
    exposed = candidates.seconds - hardware.overlap_efficiency * beside
    faster = (waiting + longer < _LARGEST_SHARE * exposed) & (devices <= _MOST)
    loops = Loops.none(shape)
    where = candidates.state[faster], candidates.entity[faster]
    loops.axes[where] = candidates.axis[faster]
    loops.passes[where] = passes[faster]
    loops.both_ways[where] = (once * (1 - devices // 2 / passes))[faster]
    loops.longer[where] = longer[faster]
    return loops
