"""The shardings of values in batches of states, and the bytes of each on a device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from toast.cost.axis_sets import GATHER, SCATTER, Axes, axes_of, single_axis
from toast.cost.entities import Bools, Dims, Floats, Ints
from toast.cost.liveness import SUBLANES
from toast.cost.loops import ADDED, UNFUSED, LoopCandidates, Loops, faster_loops
from toast.cost.machine import Machine
from toast.cost.reshard_routes import Routes, routes, trading
from toast.cost.tables import Tables
from toast.distinct import distinct_rows
from toast.hardware import COLLECTIVES
from toast.space import NONE, States

#: ``[S, K, A]`` the factor of an op class that holds an axis; F for none.
Held = npt.NDArray[np.intp]

#: Devices up to which XLA unrolls the loop of a product that is summed in parts.
UNROLLED = 4

#: Devices up to which XLA makes a loop of such a product; over more, it has one kernel.
_MOST_PARTS = 32

#: Devices up to which XLA scatters the sums of gathers, scatters and grouped products.
_FEW = 8

#: A product is not computed in a loop of its parts if it takes less than this share of the transfer
#: of its sums, by XLA's estimate.  Fitted: compiled programs have loops from shares of 0.37 on, and
#: none up to 0.33.
_SHORT = 0.35

#: Tiles along the lanes, and rows, of which XLA makes parts of a sum that it scatters along them.
#: Fitted to compiled programs for v4, v5e and v6e.
_TILES_OF_PARTS, _ROWS_OF_PARTS = 2, 5

#: The bytes of attention's scores over those of their exponentials, which have wider elements
#: (:func:`toast.cost.liveness.narrower_scores`).
_SCORES = 0.5


@dataclasses.dataclass(frozen=True)
class LocalLayout:
    """What the sharding of each op class alone determines in ``S`` states.

    Bytes are the least that a device can have, whatever the neighbours of the op class do.
    """

    tables: Tables
    machine: Machine
    held: Held  # [S, K, A] factor that holds each axis; F for none

    @property
    def devices(self) -> Floats:
        """``[2 ** A]`` devices on each set of axes."""
        return self.machine.devices

    @functools.cached_property
    def defined(self) -> Dims:
        """``[S, C, A]`` dimension of a value that each axis shards as its op computes it, or -1."""
        return slot_dims(self.tables, self.held, self.tables.values.slot)

    @functools.cached_property
    def used(self) -> Dims:
        """``[S, U, A]`` dimension of a value that each axis shards as a use requires it, or -1."""
        return slot_dims(self.tables, self.held, self.tables.uses.slot)

    @functools.cached_property
    def summed(self) -> Bools:
        """``[S, C, A]`` whether the op reduces over the factor that each axis shards."""
        t = self.tables
        factors = t.values.reduces.shape[1]
        held = np.take(self.held, t.slots.op_class[t.values.slot], axis=1)
        places = np.arange(len(t.values))[:, None] * factors + held
        return np.asarray(np.take(t.values.reduces, places))

    @functools.cached_property
    def partial(self) -> Axes:
        """``[S, C]`` axes over which an op's result is a partial sum."""
        return axes_of(self.summed)

    @functools.cached_property
    def defined_axes(self) -> Axes:
        """``[S, C]`` axes that shard a value as its op computes it."""
        return axes_of(self.defined >= 0)

    @functools.cached_property
    def used_axes(self) -> Axes:
        """``[S, U]`` axes that shard a value as a use requires it."""
        return axes_of(self.used >= 0)

    @functools.cached_property
    def value_bytes(self) -> Floats:
        """``[S, C]`` bytes of a value on a device, if its partial sums stay scattered."""
        shards = self.devices[self.defined_axes | self.partial]
        return np.asarray(self.tables.values.bytes / shards)

    @functools.cached_property
    def stored(self) -> Floats:
        """``[S, C]`` the share of a value's bytes in memory: products may round it before.

        XLA rounds after a collective that sums.  Products repeat the only head of a device as they
        read it.
        """
        values = self.tables.values
        share = np.where((values.stored < 1) & (self.partial > 0), 1.0, values.stored)
        if (values.repeated >= 0).any():
            share = np.where((values.repeated >= 0) & (self._heads <= 1), 0.0, share)
        return np.minimum(share, self.narrowed) if values.scores.any() else share

    @functools.cached_property
    def narrowed(self) -> Floats:
        """``[S, C]`` the share of exponentials in place of which scores are stored, 1 of others."""
        values, share = self.tables.values, np.ones(self.defined.shape[:2])
        scores = np.flatnonzero(values.scores)
        for dim in range(values.sizes.shape[1] if len(scores) else 0):
            shards = self.devices[axes_of(self.defined[:, scores] == dim)]
            one = (values.sizes[scores, dim] <= shards) & (dim < values.rank[scores] - 2)
            share[:, scores] = np.where(one, _SCORES, share[:, scores])
        return share

    def _narrowed_uses(self, share: Floats) -> Floats:
        """The shares of values at uses, ``[U]`` or ``[S, U]``, with those of stored scores."""
        values, uses = self.tables.values, self.tables.uses
        return np.minimum(share, self.narrowed[:, uses.value]) if values.scores.any() else share

    @functools.cached_property
    def moved_share(self) -> Floats | float:
        """``[S, C]`` moves within tiles over those of whole tiles.

        If a device has fewer heads than a tile has rows, with their copies, XLA repeats them in
        another layout, in one move of each element.
        """
        values = self.tables.values
        place = np.maximum(values.repeated, 0)[:, None]
        if not (values.repeated >= 0).any():
            return 1.0
        copies, row = (
            np.take_along_axis(values.sizes, dim, axis=1)[:, 0]
            for dim in (place + 1, values.rank[:, None] - 1)
        )
        rows = (values.repeated >= 0) & (row % self.machine.hardware.lanes == 0)
        few = self._heads * copies < SUBLANES
        return np.where(rows & few, np.minimum(copies / SUBLANES, 1.0), 1.0)

    @functools.cached_property
    def _heads(self) -> Floats:
        """``[S, C]`` the heads of a device that a value repeats, if it repeats some."""
        values = self.tables.values
        place = np.maximum(values.repeated, 0)[:, None]
        shards = self.devices[axes_of(self.defined == values.repeated[:, None])]
        return np.asarray(np.take_along_axis(values.sizes, place, axis=1)[:, 0] / shards)

    @functools.cached_property
    def use_bytes(self) -> Floats:
        """``[S, U]`` bytes on a device of a value at a use, which may round it."""
        uses, values = self.tables.uses, self.tables.values
        share = self._narrowed_uses(np.minimum(uses.share, values.stored[uses.value]))
        size = values.bytes[uses.value] * share
        return np.asarray(size / self.devices[self.used_axes])

    @functools.cached_property
    def written_bytes(self) -> Floats:
        """``[S, C]`` bytes that a kernel writes of a value: in tiles, and rounded for products.

        Partial sums may be scattered along any dimension, so their tiles are unknown.
        """
        size = self._rounded(self.value_bytes)
        padded = self._tiled(size, self.defined, np.arange(len(self.tables.values)))
        return np.where(self.partial > 0, size, padded)

    @functools.cached_property
    def read_bytes(self) -> Floats:
        """``[S, U]`` bytes that a kernel reads of a value at a use, in tiles."""
        return self._tiled(self.use_bytes, self.used, self.tables.uses.value)

    def _rounded(self, size: Floats) -> Floats:
        """``size`` (``[S, C]``) of values in memory, some of which products round."""
        values = self.tables.values
        some = (values.stored < 1) | (values.repeated >= 0) | values.scores
        return size * self.stored if some.any() else size

    def _tiled(self, size: Floats, dims: Dims, values: Ints) -> Floats:
        """``size`` with the padding of tiles; ``values`` are the value classes of its columns."""
        padded = np.flatnonzero(self.tables.values.may_pad[values])
        if not len(padded):
            return size
        size, classes, padded_values = size.copy(), self.tables.values, values[padded]
        size[:, padded] *= self.machine.lane_padding(
            classes.sizes[padded_values], classes.tiled[padded_values],
            classes.element[padded_values], dims[:, padded], classes.headed[padded_values],
        )  # fmt: skip
        return size


@dataclasses.dataclass(frozen=True)
class Layout(LocalLayout):
    """The sharding of every value in ``S`` states, and its bytes on a device."""

    #: ``[A]`` priority of each axis as the major one if several shard one dimension; ``None`` for
    #: the best order of each state.
    order: Ints | None = None
    #: Given values of :attr:`settled` and :attr:`used`.
    fixed_settled: Dims | None = None
    fixed_used: Dims | None = None

    @functools.cached_property
    def used(self) -> Dims:
        """``[S, U, A]`` dimension of a value that each axis shards as a use requires it, or -1."""
        return super().used if self.fixed_used is None else self.fixed_used

    @functools.cached_property
    def settled(self) -> Dims:
        """``[S, C, A]`` as :attr:`defined`, but sums are scattered where all uses want them so."""
        if self.fixed_settled is not None:
            return self.fixed_settled
        if not self.summed.any():
            return self.defined
        uses = self.tables.uses
        wanted = np.full(self.defined.shape, NONE, dtype=np.int8)
        if len(uses):
            low = np.minimum.reduceat(self.used, uses.first, axis=1)
            high = np.maximum.reduceat(self.used, uses.first, axis=1)
            wanted[:, uses.value[uses.first]] = np.where(low == high, low, NONE)
        # Results that are combined without a collective are combined together, as wholes.
        some = self.summed & ~self.tables.values.gathered[:, None]
        return self._scattered_to(np.where(some, wanted, NONE))

    def _scattered_to(self, wanted: Dims) -> Dims:
        """:attr:`defined` with sums scattered as ``wanted``, if the axes divide the dimension."""
        settled = np.where(wanted >= 0, wanted, self.defined)
        sizes, rank = self.tables.values.sizes.ravel(), self.tables.values.sizes.shape[1]
        row = np.arange(len(self.tables.values)) * rank
        for axis in range(wanted.shape[-1]):
            asked = wanted[:, :, axis] >= 0
            if not asked.any():
                continue
            here = settled[:, :, axis]
            shards = self.devices[axes_of(settled == here[:, :, None])]
            full = asked & (sizes[row + np.maximum(here, 0)] % shards != 0)
            settled[:, :, axis] = np.where(full, self.defined[:, :, axis], here)
        return settled

    @functools.cached_property
    def before(self) -> Dims:
        """``[S, U, A]`` the sharding of a value before each use."""
        return np.take(self.settled, self.tables.uses.value, axis=1)

    @functools.cached_property
    def before_axes(self) -> Axes:
        """``[S, U]`` axes that shard a value before each use."""
        return axes_of(self.before >= 0)

    @functools.cached_property
    def settled_axes(self) -> Axes:
        """``[S, C]`` axes that shard a value."""
        return axes_of(self.settled >= 0)

    @functools.cached_property
    def scattered(self) -> Axes:
        """``[S, C]`` axes of partial sums that stay scattered."""
        return self.partial & self.settled_axes

    @functools.cached_property
    def differs(self) -> Axes:
        """``[S, U]`` axes on which the sharding of a use differs from the definition's."""
        return axes_of(self.before != self.used)

    @functools.cached_property
    def shared(self) -> Bools:
        """``[S, U]`` whether an earlier use class already made the same copy."""
        pairs, shared = self.tables.pairs, np.zeros(self.used.shape[:2], dtype=bool)
        for step in pairs.steps:
            later, earlier = pairs.later[step], pairs.earlier[step]
            shared[:, later] |= axes_of(self.used[:, later] != self.used[:, earlier]) == 0
        return shared

    @functools.cached_property
    def whole(self) -> Bools:
        """``[S, C]`` whether XLA computes a scattered sum whole and then slices it.

        It does so over all devices of some slices (``Collectives.scatters_by_sums``), but for
        products that run beside the transfer of their parts; for scatters, gathers and grouped
        products over many devices, or if their sum is over more axes than it is scattered along;
        for grouped products that are scattered over more than two devices along their last
        dimension; for sums scattered along several dimensions; and for products whose parts are no
        whole tiles.
        """
        t, axes = self.tables, self.scattered
        if not axes.any():
            return np.zeros(axes.shape, dtype=bool)
        parts = self.devices[axes]
        whole = self._splits_tiles & (~self._may_be_parted | (parts == 2))
        whole |= self.summed_over_slice & ~self._may_be_parted | self.summed_at_once
        whole |= t.values.summed_whole & ((parts > _FEW) | self.summed_over_slice)
        if t.values.grouped.any():
            last = axes_of(self.settled == t.values.rank[:, None] - 1)
            whole |= t.values.grouped & (axes & last > 0) & (parts > 2)
        for a, b in itertools.combinations(range(self.settled.shape[-1]), 2):
            both = (axes >> np.uint8(a)) & (axes >> np.uint8(b)) & 1
            whole |= (both > 0) & (self.settled[..., a] != self.settled[..., b])
        return np.asarray(whole)

    @functools.cached_property
    def _short(self) -> Bools:
        """``[S, C]`` whether a product is too short to run beside the transfer of its parts."""
        t, axes = self.tables, self.scattered
        shards = self.devices[axes_of(self.held < t.slots.dim.shape[1] - 1)]
        once = np.take(t.ops.peak_seconds / shards, t.slots.op_class[t.values.slot], axis=1)
        sums = self.value_bytes * self.devices[axes]
        return np.asarray(once < _SHORT * self.machine.estimated.seconds(SCATTER, sums, axes))

    @functools.cached_property
    def _splits_tiles(self) -> Bools:
        """``[S, C]`` whether a product's sum is scattered along lanes into parts of split tiles.

        XLA for TPUs scatters only parts of pairs of whole tiles, with several rows.
        """
        values, lanes = self.tables.values, self.machine.hardware.lanes
        product = self.tables.ops.product[self.tables.slots.op_class[values.slot]]
        odd = (self.scattered > 0) & product & (values.rank > 1)
        if lanes == 1 or not odd.any():
            return np.zeros(odd.shape, dtype=bool)
        state, value = np.nonzero(odd)
        dims, sizes = self.settled[state, value], values.sizes[value]
        lane = self.machine.in_lanes(sizes, values.tiled[value], values.element[value], dims)
        shards = np.stack([
            sizes[:, d] / self.devices[axes_of(dims == d)] for d in range(sizes.shape[1])
        ], axis=1)  # fmt: skip
        in_lanes = lane[:, None] == np.arange(sizes.shape[1])
        width, rows = shards[in_lanes], np.where(in_lanes, 1, shards).max(axis=1)
        along_lanes = (self.scattered[state, value] & axes_of(dims == lane[:, None])) > 0
        splits = (width % (_TILES_OF_PARTS * lanes) != 0) | (rows < _ROWS_OF_PARTS)
        odd[state, value] = along_lanes & splits
        return odd

    @functools.cached_property
    def summed_at_once(self) -> Bools:
        """``[S, C]`` whether XLA sums a value whole over all axes, and then slices it.

        It does so for scatters, gathers and grouped products whose sums are scattered along some of
        their axes; it scatters those of other products, and then sums over the other axes.
        """
        some = (self.scattered > 0) & (self.partial & ~self.settled_axes > 0)
        return np.asarray(some & self.tables.values.summed_whole)

    @functools.cached_property
    def summed_over_slice(self) -> Bools:
        """``[S, C]`` whether a scattered sum is over all devices of a slice that sums whole."""
        return np.asarray(self.machine.run_as_sums(SCATTER)[self.scattered])

    @functools.cached_property
    def _may_be_parted(self) -> Bools:
        """``[S, C]`` whether XLA for TPUs may compute a product in parts, for a scattered sum.

        It does not if other axes shard the dimension of the parts, too.  If the sum is over further
        axes, it seldom does: TOAST never prices such a loop.
        """
        parts = self.devices[self.scattered]
        scattered_alone = (parts > 1) & (parts <= _MOST_PARTS) & (self.partial == self.scattered)
        on_tpu = self.machine.hardware.platform == "tpu" and self.machine.parts_products
        return np.asarray(scattered_alone & ~self._short & ~self._shares_dimension & on_tpu)

    @functools.cached_property
    def _shares_dimension(self) -> Bools:
        """``[S, C]`` whether a sum is scattered along a dimension that other axes shard, too."""
        axes, shares = self.scattered, np.zeros(self.scattered.shape, dtype=bool)
        for a, b in itertools.permutations(range(self.settled.shape[-1]), 2):
            apart = (axes >> np.uint8(a)) & ~(axes >> np.uint8(b)) & 1
            shares |= (apart > 0) & (self.settled[..., a] == self.settled[..., b])
        return shares

    @functools.cached_property
    def parted(self) -> Bools:
        """``[S, C]`` whether XLA's TPU compiler makes a loop of products of parts for a sum.

        It makes loops of convolutions of images only if their sums are over all devices.
        """
        t, parts = self.tables, self.devices[self.scattered]
        here = (parts > UNROLLED) & (~t.values.of_images | (parts == self.devices[-1]))
        return np.asarray(self._may_be_parted & here & ~self.whole & ~t.values.grouped)

    @functools.cached_property
    def permuted(self) -> Bools:
        """``[S, C]`` whether permutes scatter a sum, those of a loop or of few parts."""
        return self.parted | (self.unrolled & (self.devices[self.scattered] > 2))

    @functools.cached_property
    def unrolled(self) -> Bools:
        """``[S, C]`` the same of few parts, whose loop XLA unrolls.

        Two parts are one reduce-scatter or all-reduce, whose operands wait as those of a loop do.
        """
        parts = self.devices[self.scattered]
        return np.asarray(self._may_be_parted & (parts <= UNROLLED) & (~self.whole | (parts == 2)))

    def slices(self, rows: Ints) -> Iterator[tuple[Dims, Bools]]:
        """By axis: the dimension of a product's result that it shards; whether operands are sliced.

        Both are ``[S, rows]``.  Loops slice the operands that have a dimension along which the sum
        is scattered; ``rows`` are those of the table of operands.
        """
        operands = self.tables.operands
        result = operands.result[rows]
        for axis in range(self.held.shape[-1] if len(rows) else 0):
            dim = self.settled[:, result, axis]
            scattered = (self.scattered[:, result] >> np.uint8(axis)) & 1 > 0
            yield dim, scattered & operands.along[rows, dim]

    @functools.cached_property
    def sliced(self) -> Bools:
        """``[S, rows]`` whether a product needs slices of an operand, for the parts of a sum."""
        operands = self.tables.operands
        sliced = np.zeros((len(self.held), len(operands)), dtype=bool)
        for _, here in self.slices(np.arange(len(operands))):
            sliced |= here
        return sliced

    @functools.cached_property
    def looped_gathers(self) -> Loops:
        """``[S, U]`` all-gathers in place of which products become loops."""
        t, shape = self.tables, self.used.shape[:2]
        may = t.uses.looped.any(axis=1)
        if not may.any():
            return Loops.none(shape)
        gather = self.before_axes & ~self.used_axes
        axis = single_axis(gather)
        state, use = np.nonzero((axis >= 0) & (self.differs == gather) & ~self.shared & may)
        dimension = self.before[state, use, axis[state, use]]
        op_class = t.slots.op_class[t.uses.slot[use]]
        # The sums of a product that is a partial sum may become a loop themselves.
        held = self.held[state, op_class]
        partial = np.take_along_axis(t.uses.sums[use], held, axis=1).any(axis=1)
        here = t.uses.looped[use, dimension] & ~partial
        state, use, op_class = state[here], use[here], op_class[here]
        group = gather[state, use]
        size = t.values.bytes[t.uses.value[use]] * t.uses.share[use]
        return faster_loops(shape, self.machine, LoopCandidates(
            state, use, group,
            size=size / self.devices[self.before_axes[state, use]],
            seconds=self.machine.run_seconds(
                GATHER, size / self.devices[self.used_axes[state, use]], group
            ),
            product=self._product_seconds(state, op_class),
            independent=self._beside(GATHER, t.uses.independent_s[use]),
            accessed=UNFUSED * t.uses.result_bytes[use] / self._shards(state, op_class),
        ))  # fmt: skip

    @functools.cached_property
    def looped_sums(self) -> Loops:
        """``[S, C]`` reduce-scatters in place of which products become loops."""
        t, shape = self.tables, self.settled.shape[:2]
        may = t.values.looped.any(axis=1)
        if not may.any():
            return Loops.none(shape)
        axis, moved = single_axis(self.scattered), axes_of(self.settled != self.defined)
        state, value = np.nonzero((axis >= 0) & (moved == self.scattered) & may)
        here = t.values.looped[value, self.settled[state, value, axis[state, value]]]
        state, value = state[here], value[here]
        group, size = self.scattered[state, value], self.value_bytes[state, value]
        devices = self.devices[group]
        return faster_loops(shape, self.machine, LoopCandidates(
            state, value, group, size,
            seconds=self.machine.run_seconds(SCATTER, size * devices, group),
            product=self._product_seconds(state, t.slots.op_class[t.values.slot[value]]),
            independent=self._beside(SCATTER, t.values.independent_s[value]),
            accessed=ADDED * (devices - 1) * size,
        ))  # fmt: skip

    def _beside(self, kind: int, independent: Floats) -> Floats:
        """``[M]`` the seconds of ``independent`` products that run beside a kind of collective."""
        background = COLLECTIVES[kind] in self.machine.background
        return independent if background else np.zeros_like(independent)

    def _shards(self, state: Ints, op_class: Ints) -> Floats:
        """``[M]`` the devices that share an op of each class in each state."""
        held = self.held[state, op_class]
        return self.devices[axes_of(held < self.tables.slots.dim.shape[1] - 1)]

    def _product_seconds(self, state: Ints, op_class: Ints) -> Floats:
        """``[M]`` seconds of a product of each class on a device.

        Shards that go around are rounded before, so that the product has the rate of their type.
        """
        ops, hardware = self.tables.ops, self.machine.hardware
        seconds = ops.peak_seconds[op_class]
        if hardware.product_operands:
            rounded = ops.flops[op_class] / hardware.peak(hardware.product_operands)
            seconds = np.minimum(seconds, rounded)
        return np.asarray(seconds / self._shards(state, op_class))

    @functools.cached_property
    def major(self) -> Ints:
        """``[S, A]`` how often each axis stays while another of its dimension is gathered.

        If several axes shard one dimension, their order determines the cost of a gather: axes that
        stay must be the major ones, or shards must change places first.  The whole program has one
        order; otherwise the parts of a sum are not in the order that its scattered shards need.
        """
        shape = len(self.used), self.used.shape[-1]
        if self.order is not None:
            return np.broadcast_to(self.order, shape)
        votes = np.zeros(shape, dtype=np.int64)
        for axis, here in self.staying():
            votes[:, axis] += here @ self.tables.uses.number
        return votes

    def staying(self) -> Iterator[tuple[int, Bools]]:
        """Axes, and the uses (``[S, U]``) at which each stays while one of its dimension goes."""
        before, used = self.before, self.used
        for a, b in itertools.combinations(range(used.shape[-1]), 2):
            together = (before[..., a] == before[..., b]) & (before[..., a] >= 0)
            if together.any():
                stays_a, stays_b = (before[..., x] == used[..., x] for x in (a, b))
                yield a, together & stays_a & ~stays_b
                yield b, together & stays_b & ~stays_a

    @functools.cached_property
    def traded(self) -> tuple[Ints, Ints]:
        """The states and the uses where a dimension both loses an axis and gets another one."""
        some = (self.differs & self.before_axes > 0) & (self.differs & self.used_axes > 0)
        state, use = np.nonzero(some)
        here = trading(self.before[state, use], self.used[state, use])
        return state[here], use[here]

    def routes(
        self, before: Dims, after: Dims, where: tuple[Ints, Ints], values: Ints, *, ordered: bool
    ) -> Routes:
        """The collectives of reshards at the states and entities ``where``.

        ``values`` are the value classes of the entities.  Without ``ordered``, collective-permutes
        are left out.
        """
        order = np.argsort(-self.major, axis=1, kind="stable")[where[0]] if ordered else None
        sizes = [*map(int, self.machine.axis_sizes)]
        shapes = self.tables.values.sizes[values[where[1]]]
        return routes(before[where], after[where], shapes, sizes, order)

    @functools.cached_property
    def value_bytes(self) -> Floats:
        """``[S, C]`` bytes of a value on a device."""
        return np.asarray(self.tables.values.bytes / self.devices[self.settled_axes])

    @functools.cached_property
    def use_bytes(self) -> Floats:
        """``[S, U]`` bytes on a device of a value at a use."""
        uses = self.tables.uses
        share = np.where(self.differs > 0, uses.share, self.tables.values.stored[uses.value])
        size = self.tables.values.bytes[uses.value] * self._narrowed_uses(share)
        return np.asarray(size / self.devices[self.used_axes])

    @functools.cached_property
    def written_bytes(self) -> Floats:
        """``[S, C]`` bytes that a kernel writes of a value: in tiles, and rounded for products."""
        size = self._rounded(self.value_bytes)
        return self._tiled(size, self.settled, np.arange(len(self.tables.values)))

    @functools.cached_property
    def value_memory(self) -> Floats:
        """``[S, C]`` bytes that a value takes in a device's memory, with padding and gaps."""
        return self._allocated(self.written_bytes)

    @functools.cached_property
    def band_padding(self) -> Floats:
        """``[S, C]`` the bytes of images in bands over those of the values, 0 for all others."""
        values, padding = self.tables.values, np.zeros(self.settled.shape[:2])
        images = np.flatnonzero(values.banded)
        if len(images):
            padding[:, images] = self.machine.padding_in_bands(
                values.sizes[images], values.rank[images], values.tiled[images],
                self.settled[:, images],
            )  # fmt: skip
        return padding

    @property
    def unrounded_memory(self) -> Floats:
        """``[S, C]`` the same if the value is in memory, and not rounded for products."""
        every = np.arange(len(self.tables.values))
        return self._allocated(self._tiled(self.value_bytes, self.settled, every))

    @functools.cached_property
    def use_memory(self) -> Floats:
        """``[S, U]`` bytes that a value takes at a use, with padding and gaps."""
        return self._allocated(self.read_bytes)

    @functools.cached_property
    def copies(self) -> Floats:
        """``[S, U]`` bytes of the resharded copy for a use; 0 if none is needed.

        What is not in memory before is not in memory after it is sliced.
        """
        moved = ((self.before != self.used) & (self.before >= 0)).any(axis=2)
        in_memory = moved | ~self.tables.values.fused[self.tables.uses.value]
        return np.asarray(self.use_memory * ((self.differs > 0) & in_memory))

    @functools.cached_property
    def early(self) -> Bools:
        """``[S, U]`` whether a copy is gathered from the start: its product is over too soon."""
        t = self.tables
        early = np.zeros(self.used.shape[:2], dtype=bool)
        may = np.flatnonzero(t.uses.early)
        if self.machine.hardware.gathers_ahead != "all" or not len(may):
            return early
        gather = self.before_axes[:, may] & ~self.used_axes[:, may]
        seconds = self.machine.collectives.seconds(GATHER, self.use_bytes[:, may], gather)
        op_class = t.slots.op_class[t.uses.slot[may]]
        shards = self.devices[axes_of(self.held[:, op_class] < t.slots.dim.shape[1] - 1)]
        early[:, may] = (gather > 0) & (seconds > t.ops.peak_seconds[op_class] / shards)
        return early

    def _allocated(self, size: Floats) -> Floats:
        used = self.machine.hardware.allocator_efficiency
        return size / used if used < 1 else size


class ExactLayout(Layout):
    """A layout of one state in which all uses that need the same copy share it.

    A :class:`Layout` compares only uses that are near one another, in a fraction of the time.
    """

    @functools.cached_property
    def shared(self) -> Bools:
        """``[1, U]`` whether an earlier use class already made the same copy."""
        uses = self.tables.uses
        keys = np.column_stack([uses.value, uses.loop, self.used[0]])
        shared = np.ones((1, len(uses)), dtype=bool)
        shared[0, distinct_rows(keys).first] = False
        return shared


def held_by(tables: Tables, states: States) -> Held:
    """The factors that hold axes in ``states`` (``[S, K, A]``), as column indices of tables."""
    return np.where(states < 0, tables.slots.dim.shape[1] - 1, states).astype(np.intp)


def meeting(before: Dims, after: Dims) -> Iterator[tuple[int, int, Bools]]:
    """Pairs of axes, and where (``[S, X]``) the second comes or goes while the first stays."""
    for stay, move in itertools.permutations(range(after.shape[-1]), 2):
        dim = before[..., stay]
        stays = (dim == after[..., stay]) & (dim >= 0)
        yield stay, move, stays & ((before[..., move] == dim) != (after[..., move] == dim))


def reordering(before: Dims, after: Dims) -> Bools:
    """``[S, X]`` where shards may change places on the way, depending on the order of the axes."""
    places = trading(before, after)
    for _, _, here in meeting(before, after):
        places |= here
    return places


def changes_places(layout: Layout, before: Dims, after: Dims) -> Bools:
    """``[S, X]`` where shards change places on the way from ``before`` to ``after``.

    This is so where an axis that comes or goes is major to one that stays, and may be so where a
    dimension both loses an axis and gets another one.
    """
    places = trading(before, after)
    for stay, move, here in meeting(before, after):
        rank = layout.major[:, move] - layout.major[:, stay]
        outside = (rank > 0 if move > stay else rank >= 0)[:, None]
        places |= here & outside
    return places


def slot_dims(tables: Tables, held: Held, slots: Ints) -> Dims:
    """``[S, X, A]`` dimension of each slot that each axis shards, or -1."""
    dims = tables.slots.dim
    held = np.take(held, tables.slots.op_class[slots], axis=1)
    return np.asarray(np.take(dims, slots[:, None] * dims.shape[1] + held))
