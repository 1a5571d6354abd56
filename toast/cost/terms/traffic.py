"""Terms of collectives: sums, reshards, halos, and shards that change places."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from toast.cost.axis_sets import ALL_TO_ALL, GATHER, PERMUTE, REDUCE, SCATTER, Axes, axes_of
from toast.cost.entities import Bools, Dims, Entity, Floats, Ints
from toast.cost.layout import UNROLLED, Layout, changes_places
from toast.cost.reshard_routes import Routes
from toast.cost.terms.term import OrderedTerm, Term, Traffic
from toast.space import NONE

#: The share of a sum that waits for almost nothing.
_LEAST_SHARE = 1e-12

#: Rows of a full tile, and the rate of kernels that transpose full tiles over that of others.
_FULL_ROWS, _TRANSPOSING = 8, 0.5


class Sums(Term):
    """Partial sums over devices: all-reduces, or reduce-scatters if uses want parts.

    If no collective has the combiner, they are all-gathers.
    """

    name, scope, label = "sums", Entity.VALUE_CLASS, "sum"

    def traffic(self, layout: Layout) -> Iterator[Traffic]:
        return self._traffic(layout, layout.summed_at_once, layout.tables.values.sums)

    def stated(self, layout: Layout) -> Iterator[Traffic]:
        values = layout.tables.values
        return self._traffic(layout, np.zeros(layout.partial.shape, dtype=bool), values.count)

    def _traffic(self, layout: Layout, once: Bools, sums: Ints | Floats) -> Iterator[Traffic]:
        """The sums, those of ``once`` (``[S, C]``) over all axes at once.

        ``sums`` (``[C]``) says how often others than reduce-scatters run.
        """
        size, times = layout.value_bytes, layout.tables.values.count.astype(np.float64)
        scattered, reduced = layout.scattered, layout.partial & ~layout.settled_axes
        if layout.looped_sums.some:
            scattered = scattered & ~layout.looped_sums.axes
        gathered = layout.tables.values.gathered
        if gathered.any():
            axes = gathered * reduced
            every = size * layout.devices[axes]
            yield from _as_run(Traffic(self, layout, GATHER, axes, every, every, times))
            reduced = ~gathered * reduced
        if scattered.any():
            joint = joint_share(layout, scattered, scattered=True)
            parts = size * layout.devices[scattered]
            often = times * ~layout.whole
            # XLA scatters the sum of a product by permutes, in a loop of its parts.
            of_products = layout.tables.values.product_size[:, 2] > 1
            looped = often * (layout.permuted & of_products)
            yield Traffic(self, layout, SCATTER, scattered, parts, size, often - looped, joint)
            if looped.any():
                yield Traffic(
                    self, layout, SCATTER, scattered, parts, size, looped, joint, in_loops=True
                )
            if layout.whole.any():
                often = times * layout.whole
                axes = np.where(once, layout.partial, scattered)
                yield Traffic(
                    self, layout, REDUCE, axes, parts, parts, often, joint, stated=SCATTER
                )
                reduced = ~once * reduced
        if reduced.any():
            joint = joint_share(layout, reduced)
            times = np.asarray(sums, dtype=np.float64)
            yield Traffic(self, layout, REDUCE, reduced, size, size, times, joint)

    def most_spared(self, traffic: Traffic) -> Floats:
        """``[C]`` the share if every sum that may wait for a common one does."""
        t = traffic.layout.tables
        share = np.bincount(t.joint_sums.value, t.joint_sums.share, minlength=len(t.values))
        return np.minimum(share, 1.0)

    def sent_share(self, traffic: Traffic) -> Floats | float:
        return _sent_in_parts(traffic.layout) if traffic.kind == SCATTER else 1.0


class ExplicitSums(Sums):
    """:class:`Sums` of a device-local program.

    XLA for TPUs makes an all-reduce of a reduce-scatter over all devices of some slices.
    """

    def _traffic(self, layout: Layout, once: Bools, sums: Ints | Floats) -> Iterator[Traffic]:
        for traffic in super()._traffic(layout, np.zeros_like(once), sums):
            if traffic.stated is not None or traffic.in_loops:
                continue
            if traffic.kind == SCATTER:
                times = layout.tables.values.count.astype(np.float64)
                yield from _as_run(dataclasses.replace(traffic, times=times))
            elif traffic.kind == REDUCE and layout.tables.joint_sums.smaller.any():
                share, merged = _later_sums(layout)
                yield dataclasses.replace(
                    traffic, size=traffic.size * share, result=traffic.result * share,
                    spared=np.minimum(traffic.spared + merged, 1.0), rounded=share,
                )  # fmt: skip
            else:
                yield traffic

    def sent_share(self, traffic: Traffic) -> Floats | float:
        return 1.0


def joint_share(layout: Layout, axes: Axes, *, scattered: bool = False) -> Floats:
    """``[S, C]`` the share of each value class whose sums over ``axes`` wait for a common one."""
    sums, whole = layout.tables.joint_sums, layout.tables.values.summed_whole
    share = np.zeros(axes.shape)
    if len(sums):
        alike = (axes[:, sums.value] == axes[:, sums.other]) & ~(sums.smaller | sums.passed)
        if scattered:
            alike &= whole[sums.value] == whole[sums.other]
        first = np.flatnonzero(np.diff(sums.value, prepend=-1))
        share[:, sums.value[first]] = np.add.reduceat(alike * sums.share, first, axis=1)
    return share


def _later_sums(layout: Layout) -> tuple[Floats, Floats]:
    """Sums that wait for a smaller value, if the ops in between have the sharding that they leave.

    ``[S, C]`` their bytes over those of the values themselves; and the share of them that this
    value's own sum over other axes contains.
    """
    t, partial = layout.tables, layout.partial
    sums = t.joint_sums
    later = sums.take(np.flatnonzero(sums.smaller))
    passed = sums.take(np.flatnonzero(sums.passed))
    held = layout.defined_axes | partial
    moved = axes_of(layout.settled != layout.defined) > 0  # scattered
    if len(t.uses):
        differs = np.maximum.reduceat(layout.differs, t.uses.first, axis=1)
        moved[:, t.uses.value[t.uses.first]] |= differs > 0
    waits = ~moved & (partial > 0)
    ends = moved[:, passed.other] | (partial[:, passed.value] & held[:, passed.other] > 0)
    np.logical_and.at(waits.T, passed.value, ~ends.T)
    waits = waits[:, later.value] & (partial[:, later.value] & held[:, later.other] == 0)
    size, share, merged = layout.value_bytes, np.ones(partial.shape), np.zeros(partial.shape)
    least = np.minimum(size[:, later.other] / np.maximum(size[:, later.value], 1e-9), 1.0)
    np.subtract.at(share.T, later.value, (waits * later.share * (1.0 - least)).T)
    reduced = partial & ~layout.settled_axes  # what is scattered has a collective of its own
    own = waits * later.share * (reduced[:, later.other] > 0)
    np.add.at(merged.T, later.value, own.T)
    return np.maximum(share, _LEAST_SHARE), merged


def _sent_in_parts(layout: Layout) -> Floats:
    """``[S, C]`` bytes that a device sends for sums in parts, over those of a ring.

    Short loops of products are unrolled, with two sums under way: over four devices there are five
    messages instead of three.  If an axis of the same size is idle, a product is computed in parts
    along it; these are summed whole, and change places.
    """
    t, axes, devices = layout.tables, layout.scattered, layout.devices
    op_class = t.slots.op_class[t.values.slot]
    product = t.ops.product[op_class]
    share = np.where(product & (devices[axes] == UNROLLED), 5 / 3, 1.0)
    free = (layout.held == t.slots.dim.shape[1] - 1)[:, op_class]
    sizes = layout.machine.axis_sizes
    for axis, size in enumerate(sizes.tolist()):
        alike = np.flatnonzero(sizes == size)
        if size > UNROLLED or len(alike) < 2:
            continue
        idle = (axes == 1 << axis) & free[..., alike].any(axis=2) & product
        share = np.where(idle, (2 * (size - 1) / size + 1) / max(size - 1, 1), share)
    return share


def _as_run(traffic: Traffic) -> Iterator[Traffic]:
    """Collectives that a program states, as XLA runs them: on some groups, as all-reduces."""
    here = traffic.layout.machine.run_as_sums(traffic.kind)[traffic.axes]
    if not here.any():
        yield traffic
        return
    yield dataclasses.replace(traffic, axes=np.where(here, np.uint8(0), traffic.axes))
    yield dataclasses.replace(
        traffic, axes=np.where(here, traffic.axes, np.uint8(0)), kind=REDUCE, stated=traffic.kind
    )


class Reshards(Term):
    """Uses with another sharding than the definition: all-to-alls and all-gathers."""

    name, scope, label = "reshards", Entity.USE_CLASS, "reshard"

    def traffic(self, layout: Layout) -> Iterator[Traffic]:
        was, now = layout.before_axes, layout.used_axes
        gather, exchange = was & ~now, was & now & layout.differs
        gather[layout.traded] = exchange[layout.traded] = 0
        gather &= ~layout.looped_gathers.axes
        local = _moved(layout)
        if exchange.any():
            yield _resharding(self, layout, ALL_TO_ALL, exchange, local, layout.use_bytes)
        if gather.any():
            size = local * layout.devices[gather]
            yield from _as_run(_resharding(self, layout, GATHER, gather, size, layout.use_bytes))
        if len(layout.traded[0]):
            values = layout.tables.uses.value
            way = layout.routes(layout.before, layout.used, layout.traded, values, ordered=False)
            for kind in (ALL_TO_ALL, GATHER):
                for axes, size in _steps(layout, way, kind, layout.traded, values):
                    size = size * layout.tables.uses.share
                    yield from _as_run(
                        _resharding(self, layout, kind, axes, size, layout.use_bytes)
                    )


class GatherCopies(Term):
    """Copies of values that are gathered along several dimensions, and of tables.

    XLA gathers all of these dimensions at once.  The shards are next to one another in the result,
    and a kernel puts them into their places.  It moves rows of tiles, as many as there are shards
    of a dimension; tiles of fewer than eight are not full.

    If the last dimension is gathered, and shards are not whole tiles, that dimension leads in the
    result.  Products read either layout, but lookups need rows, so that the table is transposed.
    In fast memory, this takes no time.  In loops, two kernels bring what is computed there into the
    layout of the gather, and back: their latencies count.

    A gather that is a sum of shards begins with one that is filled with zeros.
    """

    name, scope = "copies of gathers", Entity.USE_CLASS

    def seconds(self, layout: Layout) -> Floats | None:
        uses, hardware = layout.tables.uses, layout.machine.hardware
        if hardware.lanes == 1:
            return None
        gather = layout.before_axes & ~layout.used_axes & ~layout.looped_gathers.axes
        gather[layout.traded] = 0
        state, use = np.nonzero((gather > 0) & ~layout.shared)
        if not len(state):
            return None
        axes = np.arange(layout.before.shape[-1])
        gathered = (gather[state, use, None] >> axes & 1) > 0
        dims = np.where(gathered, layout.before[state, use], NONE)
        shards = np.stack([
            layout.devices[axes_of((dims == dims[:, [axis]]) & gathered)] for axis in axes
        ], axis=1)  # fmt: skip
        fewest = np.where(gathered, shards, np.inf).min(axis=1)
        several = fewest < layout.devices[gather[state, use]]
        full = np.minimum(fewest, _FULL_ROWS) / _FULL_ROWS
        moved = 2 * layout.use_bytes[state, use] * uses.count[use]
        rate = hardware.memory_bytes_per_s * _TRANSPOSING * full
        seconds = np.zeros(gather.shape)
        seconds[state, use] = several * moved / rate
        values = layout.tables.values
        last = values.rank[uses.value[use]] - 1
        here = (dims == last[:, None]) & gathered
        wide = (
            values.sizes[uses.value[use], last]
            / layout.devices[axes_of(layout.before[state, use] == last[:, None])]
        )
        apart = here.any(axis=1) & (wide % hardware.lanes != 0)
        elements = (
            values.sizes[uses.value[use]].prod(axis=1)
            / layout.devices[layout.used_axes[state, use]]
        )
        # Kernels bring what a loop gathers into the layout of the gather, and back.
        in_loops = (uses.count > uses.number)[use] & ~values.outer[uses.value[use]]
        turned = apart * in_loops * (2 * hardware.kernel_latency_s)
        seconds[state, use] += turned * uses.count[use]
        apart &= 2 * layout.use_bytes[state, use] > hardware.products.fast_bytes
        transposed = elements * hardware.relayout_bytes / hardware.memory_bytes_per_s
        seconds[state, use] += apart * uses.lookup[use] * uses.count[use] * transposed
        summed = layout.machine.run_as_sums(GATHER)[gather[state, use]]
        filled = layout.use_bytes[state, use] * uses.count[use] * summed
        rate = hardware.fill_bytes_per_s(values.element[uses.value[use]])
        seconds[state, use] += filled / rate
        return seconds


class ExplicitReshards(Reshards):
    """:class:`Reshards` of a device-local program."""

    def traffic(self, layout: Layout) -> Iterator[Traffic]:
        return _explicit(layout, super().traffic(layout))


def _explicit(layout: Layout, traffics: Iterable[Traffic]) -> Iterator[Traffic]:
    """The collectives of uses that a device-local program has: it computes some constants anew."""
    moved = ~layout.tables.values.remade[layout.tables.uses.value]
    for traffic in traffics:
        yield dataclasses.replace(traffic, times=traffic.times * moved, spared=0.0)


def _steps(
    layout: Layout, way: Routes, kind: int, where: tuple[Ints, Ints], values: Ints
) -> Iterator[tuple[Axes, Floats]]:
    """The axes and the bytes (``[S, X]``) of each step of one kind at ``where``."""
    whole = layout.tables.values.bytes[values]
    for some, shards in way.of_kind(kind):
        axes = np.zeros((len(layout.held), len(values)), dtype=np.uint8)
        axes[where] = some
        size = np.zeros(axes.shape)
        size[where] = whole[where[1]] / layout.devices[shards]
        yield axes, size


def _moved(layout: Layout) -> Floats:
    """``[S, U]`` bytes of a value on a device after slicing along the axes of a use."""
    uses = layout.tables.uses
    cut = layout.used_axes & ~layout.before_axes
    size = np.take(layout.value_bytes, uses.value, axis=1)
    return np.asarray(size / layout.devices[cut] * uses.share)


def _resharding(
    term: Term, layout: Layout, kind: int, axes: Axes, size: Floats, result: Floats
) -> Traffic:
    uses = layout.tables.uses
    times = uses.count * ((layout.differs > 0) & ~layout.shared)
    spared = layout.tables.values.constant[uses.value].astype(np.float64)
    return Traffic(term, layout, kind, axes, size, result, times, spared, rounded=uses.share)


class Halos(Term):
    """Operands of which shards need the edges of their neighbours, or whole other shards.

    Dimensions are exchanged one after the other, as the lowering does.
    """

    name, scope, label = "halos", Entity.USE_CLASS, "edges"

    def traffic(self, layout: Layout) -> Iterator[Traffic]:
        t = layout.tables
        halos = t.slots.halo[t.uses.slot]
        if not halos.any():
            return
        held = np.take(layout.held, t.slots.op_class[t.uses.slot], axis=1)
        part = np.take(halos, np.arange(len(t.uses))[:, None] * halos.shape[1] + held)
        dims, axes = np.where(part > 0, layout.used, NONE), range(held.shape[-1])
        together = [axes_of((dims == dims[..., [a]]) & (part > 0)) for a in axes]
        # A halo is never more than all other shards; the first axis of a dimension counts.
        shifted = []
        for a in axes:
            shards, first = layout.devices[together[a]], together[a] % 2**a == 0
            furthest = np.where(np.isinf(part[..., a]), 1.0, part[..., a] * shards)
            shifted.append(np.where(first, np.minimum(furthest, shards), 0.0))
        for a in axes:
            size = shifted[a] * layout.use_bytes
            for other in axes:  # the edges along earlier dimensions are there already
                earlier = (dims[..., other] < dims[..., a]) & (dims[..., other] >= 0)
                size *= np.where(earlier & np.isfinite(part[..., other]), 1.0 + shifted[other], 1.0)
            group = np.where(shifted[a] > 0, together[a], np.uint8(0))
            if group.any():
                yield Traffic(self, layout, PERMUTE, group, size, size, t.uses.count)


class Rings(Term):
    """Operands whose shards go around the devices, one collective-permute after the other."""

    name, scope, label, beside_op = "rings", Entity.USE_CLASS, "ring", True

    def traffic(self, layout: Layout) -> Iterator[Traffic]:
        t = layout.tables
        if t.slots.ring[t.uses.slot].any():
            axes, passes = _around(layout, t.uses.slot)
            size = layout.use_bytes
            yield Traffic(self, layout, PERMUTE, axes, size, size, t.uses.runs * passes)


class RingSums(Term):
    """Results whose shards go around the devices, which add their parts."""

    name, scope, label, beside_op = "ring sums", Entity.VALUE_CLASS, "ring", True

    def traffic(self, layout: Layout) -> Iterator[Traffic]:
        t = layout.tables
        if t.slots.ring[t.values.slot].any():
            axes, passes = _around(layout, t.values.slot)
            size = t.values.bytes / layout.devices[layout.defined_axes]
            yield Traffic(self, layout, PERMUTE, axes, size, size, t.values.count * passes)


def _around(layout: Layout, slot: Ints) -> tuple[Axes, Floats]:
    """``[S, X]`` the axes around which shards of slots go, and how often each is passed on."""
    slots = layout.tables.slots
    held = np.take(layout.held, slots.op_class[slot], axis=1)
    reach = np.take(slots.ring, slot[:, None] * slots.ring.shape[1] + held)
    axes = axes_of(reach > 0)
    shards = layout.devices[axes]
    # The number of shards before a device's own one that it needs; products are not exact.
    passes = np.minimum(np.ceil(reach.max(axis=2) * shards - 1e-9), shards - 1)
    return axes, np.asarray(passes)


class LoopedGathers(Term):
    """Operands of which products use one shard after the other (:mod:`toast.cost.loops`)."""

    name, scope, label, beside_op = "looped gathers", Entity.USE_CLASS, "loop", True

    def seconds(self, layout: Layout) -> Floats | None:
        loops = layout.looped_gathers
        return loops.longer * layout.tables.uses.count if loops.some else None

    def traffic(self, layout: Layout) -> Iterator[Traffic]:
        uses, loops = layout.tables.uses, layout.looped_gathers
        if loops.some:
            size = np.take(layout.value_bytes, uses.value, axis=1) * uses.share
            yield Traffic(
                self, layout, PERMUTE, loops.axes, size, size, loops.passes * uses.count,
                rounded=uses.share, behind=loops.both_ways,
            )  # fmt: skip


class LoopedSums(Term):
    """Partial sums of products that go around the devices (:mod:`toast.cost.loops`)."""

    name, scope, label, beside_op = "looped sums", Entity.VALUE_CLASS, "loop", True

    def seconds(self, layout: Layout) -> Floats | None:
        loops = layout.looped_sums
        return loops.longer * layout.tables.values.count if loops.some else None

    def traffic(self, layout: Layout) -> Iterator[Traffic]:
        values, loops = layout.tables.values, layout.looped_sums
        if loops.some:
            size, times = layout.value_bytes, loops.passes * values.count
            yield Traffic(
                self, layout, PERMUTE, loops.axes, size, size, times, behind=loops.both_ways
            )


class RegionCollectives(Term):
    """Collectives that the program states in manual regions, at the sizes that devices have.

    At the boundary of a region whose axes are in another order than the plan's, shards change
    places.
    """

    name, scope, label = "collectives of regions", Entity.VALUE_CLASS, "manual"

    def traffic(self, layout: Layout) -> Iterator[Traffic]:
        values, shape = layout.tables.values, layout.value_bytes.shape
        for kind in np.unique(values.collective[values.collective >= 0]).tolist():
            group = np.where(values.collective == kind, values.group, 0).astype(np.uint8)
            axes = np.broadcast_to(group, shape)
            size = layout.value_bytes
            if kind == SCATTER:  # priced by its operand
                size = size * layout.devices[axes]
            times = values.count.astype(np.float64)
            yield from _as_run(Traffic(self, layout, kind, axes, size, layout.value_bytes, times))


class ConditionGathers(Term):
    """Arrays that conditions of loops read: in a device-local program, every device reads all.

    So all devices run equally many iterations.
    """

    name, scope, label = "condition gathers", Entity.VALUE_CLASS, "condition"

    def traffic(self, layout: Layout) -> Iterator[Traffic]:
        reads = layout.tables.values.condition_reads
        if reads.any():
            axes = np.where(reads > 0, layout.settled_axes, np.uint8(0))
            size = np.broadcast_to(layout.tables.values.bytes, axes.shape)
            yield from _as_run(Traffic(self, layout, GATHER, axes, size, size, reads))


class SumPlaces(OrderedTerm):
    """Scattered sums whose shards change places because of the order of the axes."""

    name, scope, label = "places of sums", Entity.VALUE_CLASS, "order"

    def ends(self, layout: Layout) -> tuple[Dims, Dims]:
        return layout.defined, layout.settled

    def traffic(self, layout: Layout) -> Iterator[Traffic]:
        if layout.scattered.any():
            times = layout.tables.values.count.astype(np.float64)
            values = np.arange(len(layout.tables.values))
            for axes, size in _places(self, layout, values):
                yield Traffic(self, layout, PERMUTE, axes, size, size, times)


class UsePlaces(OrderedTerm):
    """Resharded uses whose shards change places because of the order of the axes."""

    name, scope, label = "places of uses", Entity.USE_CLASS, "order"

    def ends(self, layout: Layout) -> tuple[Dims, Dims]:
        return layout.before, layout.used

    def traffic(self, layout: Layout) -> Iterator[Traffic]:
        uses = layout.tables.uses
        for axes, size in _places(self, layout, uses.value):
            moved = size * uses.share
            yield _resharding(self, layout, PERMUTE, axes, moved, moved)


class ExplicitPlaces(UsePlaces):
    """:class:`UsePlaces` of a device-local program."""

    def traffic(self, layout: Layout) -> Iterator[Traffic]:
        return _explicit(layout, super().traffic(layout))


def _places(term: OrderedTerm, layout: Layout, values: Ints) -> Iterator[tuple[Axes, Floats]]:
    """The axes and the bytes (``[S, X]``) of each time that shards change places."""
    before, after = term.ends(layout)
    state, entity = np.nonzero(changes_places(layout, before, after))
    where = state, entity
    if len(state):
        way = layout.routes(before, after, where, values, ordered=True)
        yield from _steps(layout, way, PERMUTE, where, values)
