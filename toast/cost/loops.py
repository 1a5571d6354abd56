"""Products that are computed shard by shard, beside collective-permutes (GShard, 3.3.2).

If an operand of a product would be gathered along a dimension that the result has, too, each device
multiplies its own shard while those of its neighbours are on their way: half of them go around in
each direction.  If a result would be scattered, the parts of the sums go around in the same way.
The permutes then take time only as far as the product is shorter.

A product becomes a loop if that is faster: its permutes that are not hidden, and its kernels, which
are smaller, must take less time than a collective that other products hide as far as they can.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import numpy as np

from toast.cost.axis_sets import GATHER, PERMUTE, SCATTER, Axes, axes_of, single_axis
from toast.cost.entities import Bools, Dims, Floats, Ints
from toast.cost.tables import Tables

if TYPE_CHECKING:
    import numpy.typing as npt

    from toast.hardware import Collectives, Hardware

#: Devices up to which a loop is written; it has one product per device.
_MOST = 16

#: Accesses of a result in memory that a loop adds.  Its parts are no longer fused with the op that
#: uses the result, which is written and read.  Of a sum, each addition reads two and writes one.
_UNFUSED, _ADDED = 2, 3


class _Machine(Protocol):
    """The part of :class:`toast.cost.layout.Machine` that is needed here."""

    @property
    def hardware(self) -> Hardware: ...
    @property
    def collectives(self) -> Collectives: ...
    @property
    def axis_sizes(self) -> Floats: ...
    @property
    def devices(self) -> Floats: ...


class _Layout(Protocol):
    """The part of :class:`toast.cost.layout.Layout` that is needed here."""

    @property
    def tables(self) -> Tables: ...
    @property
    def machine(self) -> _Machine: ...
    @property
    def held(self) -> npt.NDArray[np.intp]: ...
    @property
    def devices(self) -> Floats: ...
    @property
    def used(self) -> Dims: ...
    @property
    def before(self) -> Dims: ...
    @property
    def defined(self) -> Dims: ...
    @property
    def settled(self) -> Dims: ...
    @property
    def before_axes(self) -> Axes: ...
    @property
    def used_axes(self) -> Axes: ...
    @property
    def differs(self) -> Axes: ...
    @property
    def scattered(self) -> Axes: ...
    @property
    def shared(self) -> Bools: ...
    @property
    def value_bytes(self) -> Floats: ...


@dataclasses.dataclass(frozen=True)
class Loops:
    """Loops of products, for ``X`` value or use classes in ``S`` states."""

    #: ``[S, X]`` the axis around which shards go; none if there is no loop.
    axes: Axes
    #: ``[S, X]`` how many shards each device receives.
    passes: Floats
    #: ``[S, X]`` seconds of a permute that the product hides.
    hidden: Floats
    #: ``[S, X]`` seconds that the parts of a product take longer than all of it at once.
    longer: Floats

    @property
    def some(self) -> bool:
        """Whether there is a loop."""
        return bool(self.axes.any())


@dataclasses.dataclass(frozen=True)
class _Candidates:
    """``[M]`` collectives that may become loops."""

    state: Ints
    entity: Ints
    axis: Ints
    #: The class of the product.
    op_class: Ints
    #: Bytes of a shard, and seconds of the collective.
    size: Floats
    seconds: Floats
    #: Seconds of other products that may run beside the collective.
    independent: Floats
    #: Bytes that the loop writes and reads besides those of the product.
    accessed: Floats

    def those(self, which: Ints) -> _Candidates:
        """Some of them."""
        return _Candidates(
            *(getattr(self, field.name)[which] for field in dataclasses.fields(self))
        )


def looped_gathers(layout: _Layout) -> Loops:
    """``[S, U]`` the loops in place of all-gathers."""
    t, shape = layout.tables, layout.used.shape[:2]
    may = t.uses.looped.any(axis=1)
    if not may.any():
        return _none(shape)
    gather = layout.before_axes & ~layout.used_axes
    axis = single_axis(gather)
    state, use = np.nonzero((axis >= 0) & (layout.differs == gather) & ~layout.shared & may)
    axis = axis[state, use]
    op_class = t.slots.op_class[t.uses.slot[use]]
    # The sums of a product that is a partial sum may become a loop themselves.
    held = layout.held[state, op_class]
    partial = np.take_along_axis(t.uses.sums[use], held, axis=1).any(axis=1)
    here = t.uses.looped[use, layout.before[state, use, axis]] & ~partial
    size = (np.take(layout.value_bytes, t.uses.value, axis=1) * t.uses.share)[state, use]
    devices, group = layout.machine.axis_sizes[axis], gather[state, use]
    seconds = layout.machine.collectives.seconds(GATHER, size * devices, group)
    shards = layout.devices[axes_of(held < t.slots.dim.shape[1] - 1)]
    accessed = _UNFUSED * t.uses.result_bytes[use] / shards
    found = _Candidates(
        state, use, axis, op_class, size, seconds, t.uses.independent_s[use], accessed
    ).those(np.flatnonzero(here))
    return _profitable(layout, found, shape)


def looped_sums(layout: _Layout) -> Loops:
    """``[S, C]`` the loops in place of reduce-scatters."""
    t, shape = layout.tables, layout.settled.shape[:2]
    may = t.values.looped.any(axis=1)
    if not may.any():
        return _none(shape)
    scattered = layout.scattered
    axis = single_axis(scattered)
    moved = axes_of(layout.settled != layout.defined)
    state, value = np.nonzero((axis >= 0) & (moved == scattered) & may)
    axis = axis[state, value]
    here = t.values.looped[value, layout.settled[state, value, axis]]
    size, devices = layout.value_bytes[state, value], layout.machine.axis_sizes[axis]
    group = scattered[state, value]
    seconds = layout.machine.collectives.seconds(SCATTER, size * devices, group)
    op_class = t.slots.op_class[t.values.slot[value]]
    accessed = _ADDED * (devices - 1) * size
    found = _Candidates(
        state, value, axis, op_class, size, seconds, t.values.independent_s[value], accessed
    ).those(np.flatnonzero(here))
    return _profitable(layout, found, shape)


def _profitable(layout: _Layout, found: _Candidates, shape: tuple[int, int]) -> Loops:
    """The loops among candidates that are faster than their collectives."""
    t, machine, hardware = layout.tables, layout.machine, layout.machine.hardware
    devices = machine.axis_sizes[found.axis]
    held = layout.held[found.state, found.op_class]
    shards = machine.devices[axes_of(held < t.slots.dim.shape[1] - 1)]
    part = t.ops.peak_seconds[found.op_class] / shards / devices
    group = (1 << found.axis).astype(np.uint8)
    once = machine.collectives.seconds(PERMUTE, found.size, group)
    # In each round, a shard arrives from either side; a device computes its own part in the first.
    rounds = devices // 2
    waiting = np.maximum(once - part, 0) + (rounds - 1) * np.maximum(once - 2 * part, 0)
    passes = devices - 1
    longer = passes * hardware.product_latency_s + found.accessed / hardware.memory_bytes_per_s
    beside = hardware.overlap_efficiency * np.minimum(found.seconds, found.independent)
    good = (waiting + longer < found.seconds - beside) & (devices <= _MOST)
    loops = _none(shape)
    where = found.state[good], found.entity[good]
    loops.axes[where] = group[good]
    loops.passes[where] = passes[good]
    loops.hidden[where] = (once - waiting / passes)[good]
    loops.longer[where] = longer[good]
    return loops


def _none(shape: tuple[int, ...]) -> Loops:
    return Loops(np.zeros(shape, dtype=np.uint8), *np.zeros((3, *shape)))
