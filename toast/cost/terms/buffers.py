"""Terms of memory: buffers and their lifetimes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from toast.cost.axis_sets import axes_of
from toast.cost.entities import Bools, Entity, Floats
from toast.cost.layout import Layout
from toast.cost.liveness import DELAY, Lifetimes, LiveRanges
from toast.cost.program_loops import loops_of
from toast.cost.terms.term import Term

#: Products that become loops if their sums are scattered.
_PARTED = frozenset({"dot_general", "convolution"})

#: Passes whose products run beside delayed ones.
_BACKWARD = ("backward", "recomputed")

#: Bytes of a rounded element over those of a float32.
ROUNDED = 0.5


class Arguments(Term):
    """Arguments of the program, which are in memory during the whole step."""

    name, scope, label, resident = "arguments", Entity.VALUE_CLASS, "argument", True

    def bytes(self, layout: Layout) -> Floats:
        return layout.value_memory * layout.tables.values.arguments


class Values(Term):
    """Values in memory, from the kernel that computes them to the last that reads them."""

    name, scope, label = "values", Entity.VALUE_CLASS, "value"

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        rows, live = ranges.stored, ranges.live
        return Lifetimes(ranges.value_class[rows], live.start[rows], live.end[rows] + 1, rows)

    def bytes(self, layout: Layout) -> Floats:
        return layout.value_memory


class Copies(Term):
    """Resharded copies, one for each value and use slot: from the first to the last use."""

    name, scope, label = "copies", Entity.USE_CLASS, "copy"

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        copies = ranges.copies
        returned = copies.end > len(ranges.program.ops) - len(ranges.program.results)
        return copies.take(~(ranges.live.aliased[copies.value] & returned))

    def bytes(self, layout: Layout) -> Floats:
        return layout.copies


class EarlyCopies(Term):
    """Gathered parameters that wait for the op that needs them.

    XLA starts the gathers of parameters early enough to hide them.  If a gather takes longer than
    the product that needs it, it starts with the program.  It starts a share of them early
    (:attr:`toast.hardware.Hardware.early_gathers`), so that this share of their bytes waits.
    """

    name, scope, label = "early copies", Entity.USE_CLASS, "copy"

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        copies = ranges.copies
        early = copies.take(ranges.early[copies.entity])
        return Lifetimes(early.entity, np.zeros_like(early.start), early.start, early.value)

    def bytes(self, layout: Layout) -> Floats:
        return layout.copies * layout.early * layout.machine.early_gathers[0]


#: Memory accesses of a copy: a read and a write.
_ACCESSES = 2


class ArgumentCopies(Term):
    """Copies of overwritten arguments whose new values are gathered along their last dimension.

    XLA gathers into a buffer of its own, in another layout, and copies this to the argument.  On
    devices with tiles it then copies the argument, too, before the program reads it; or the slice
    that the program reads, if that is no whole tiles.
    """

    name, scope, label = "argument copies", Entity.USE_CLASS, "copy"

    def seconds(self, layout: Layout) -> Floats:
        copied = self.bytes(layout) + layout.copies * _gathered_along_last(layout)
        copied = copied * layout.tables.uses.overwriting
        return np.asarray(_ACCESSES * copied / layout.machine.hardware.memory_bytes_per_s)

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        program = ranges.program
        arguments = np.array(program.argument_values, dtype=np.int64)
        overwritten = np.array(program.aliases, dtype=np.int64)
        first = len(program.ops) - len(program.results)
        uses = np.flatnonzero(ranges.use_op >= first)
        argument = overwritten[ranges.use_op[uses] - first]
        uses, argument = uses[argument >= 0], argument[argument >= 0]
        of = arguments[argument]
        end = np.zeros(len(ranges.size), dtype=np.int64)
        np.maximum.at(end, ranges.use_value, ranges.live.use_end)
        return Lifetimes(ranges.use_class[uses], np.zeros_like(uses), end[of] + 1, of)

    def bytes(self, layout: Layout) -> Floats:
        value = np.take(layout.value_memory, layout.tables.uses.value, axis=1)
        copied = np.where(_of_whole_tiles(layout), layout.copies, value)
        return np.asarray(copied * _gathered_along_last(layout))


class LookupCopies(Term):
    """Tables that are gathered along their last dimension, in rows for a lookup.

    That dimension leads in the result of the gather if shards are not whole tiles, and a kernel
    transposes it.  :class:`toast.cost.terms.traffic.GatherCopies` has its time.
    """

    name, scope, label = "lookup copies", Entity.USE_CLASS, "copy"

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        looks = np.array([kind == "gather" for kind in ranges.program.kinds], dtype=bool)
        large = (ranges.size > ranges.floor) & ~ranges.host
        uses = np.flatnonzero(looks[ranges.use_op] & large[ranges.use_value])
        start = ranges.use_op[uses]
        return Lifetimes(ranges.use_class[uses], start, start + 1, ranges.use_value[uses])

    def bytes(self, layout: Layout) -> Floats:
        apart = _gathered_along_last(layout) & ~_of_whole_tiles(layout)
        return np.asarray(layout.copies * (apart & layout.tables.uses.lookup))


def _of_whole_tiles(layout: Layout) -> Bools:
    """``[S, U]`` whether shards along the last dimension of a value are whole tiles."""
    value, lanes = layout.tables.uses.value, layout.machine.hardware.lanes
    sizes, last = layout.tables.values.sizes[value], layout.tables.values.rank[value] - 1
    shards = layout.devices[axes_of(layout.before == last[:, None])]
    return np.asarray(sizes[np.arange(len(value)), last] % (shards * lanes) == 0)


def _gathered_along_last(layout: Layout) -> Bools:
    """``[S, U]`` whether a copy is gathered along the last dimension of its value."""
    if layout.machine.hardware.lanes <= 1:
        return np.zeros(layout.used.shape[:2], dtype=bool)
    last = layout.tables.values.rank[layout.tables.uses.value] - 1
    gathered = (layout.before == last[:, None]) & (layout.used < 0)
    return np.asarray(gathered.any(axis=2) & (last >= 0))


class SharedCopies(Term):
    """Copies that stay in memory from one use to a later one that shares them.

    If the uses overlap, the copy counts once.
    """

    name, scope, label = "shared copies", Entity.COPY_PAIR, "copy"

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        copies, uses = ranges.copies, ranges.use_classes
        rows: list[Lifetimes] = []
        key = copies.value * uses + copies.entity  # in order
        for step in ranges.pairs.steps:
            pair, earlier = np.full((2, uses), -1, dtype=np.int64)
            pair[ranges.pairs.later[step]] = np.arange(step.start, step.stop)
            earlier[ranges.pairs.later[step]] = ranges.pairs.earlier[step]
            later = np.flatnonzero(earlier[copies.entity] >= 0)
            wanted = copies.value[later] * uses + earlier[copies.entity[later]]
            other = np.minimum(np.searchsorted(key, wanted), len(key) - 1)
            here = key[other] == wanted
            i, j = other[here], later[here]
            rows.append(Lifetimes(
                pair[copies.entity[j]], np.minimum(copies.end[i], copies.end[j]),
                np.maximum(copies.start[i], copies.start[j]), copies.value[i],
            ))  # fmt: skip
        return Lifetimes.joined(rows)

    def bytes(self, layout: Layout) -> Floats:
        pairs, copies, used = layout.tables.pairs, layout.copies, layout.used
        size = np.zeros((len(copies), len(pairs)))
        bridged = copies == 0  # or there is no copy
        for step in pairs.steps:
            later, earlier = pairs.later[step], pairs.earlier[step]
            same = axes_of(used[:, later] != used[:, earlier]) == 0
            same &= copies[:, later] == copies[:, earlier]  # of the same element type
            same &= ~bridged[:, later]
            bridged[:, later] |= same
            size[:, step] = np.where(same, copies[:, later], 0.0)
        return size


class WholeSums(Term):
    """The parts of a whole sum that a device does not keep.

    XLA computes some sums whole that could be computed in parts; the using kernel slices them.  A
    kernel of its own writes the operand of a grouped product's reduce-scatter, which is whole, too.
    """

    name, scope, label = "whole sums", Entity.VALUE_CLASS, "sum"

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        large = ranges.summed
        last = np.zeros(len(ranges.value_class), dtype=np.int64)
        np.maximum.at(last, ranges.use_value, ranges.live.late[ranges.use_op])
        return Lifetimes(ranges.value_class[large], ranges.maker[large], last[large] + 1, large)

    def bytes(self, layout: Layout) -> Floats:
        whole = layout.whole | layout.tables.values.grouped
        return layout.value_memory * ((layout.devices[layout.scattered] - 1) * whole)


class ScatteredSums(Term):
    """Operands of the reduce-scatters of a device-local program: whole sums, which are in memory.

    A sum that goes around the devices instead is never whole: two of its parts are under way.
    """

    name, scope, label = "scattered sums", Entity.VALUE_CLASS, "sum"

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        large = ranges.summed
        start = ranges.maker[large]
        return Lifetimes(ranges.value_class[large], start, start + 1, large)

    def bytes(self, layout: Layout) -> Floats:
        parts = layout.devices[layout.scattered] * (layout.scattered > 0)
        if layout.looped_sums.some:
            parts = np.where(layout.looped_sums.axes > 0, 2.0, parts)
        return np.asarray(layout.value_memory * parts)


class MergedSums(Term):
    """Results of products that are not fused with their consumer, because they are summed.

    A consumer whose result is as large overwrites the sum, so that it has no memory of its own.
    """

    name, scope, label = "merged sums", Entity.VALUE_CLASS, "sum"

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        merged = ranges.summed[~ranges.live.exists[ranges.summed]]
        last, written = np.zeros((2, len(ranges.value_class)), dtype=np.int64)
        np.maximum.at(last, ranges.use_value, ranges.use_op)
        size = np.zeros(len(ranges.program.ops))  # of the largest result of each op
        np.maximum.at(size, ranges.maker, ranges.size)
        of_kernel = size[ranges.live.late[ranges.use_op]]
        np.maximum.at(written, ranges.use_value, of_kernel.astype(np.int64))
        merged = merged[written[merged] < ranges.size[merged]]
        return Lifetimes(ranges.value_class[merged], ranges.maker[merged], last[merged] + 1, merged)

    def bytes(self, layout: Layout) -> Floats:
        return layout.value_memory * (layout.tables.values.merged & (layout.partial > 0))


class Workspaces(Term):
    """Memory that kernels need while they run."""

    name, scope, label = "workspaces", Entity.VALUE_CLASS, "workspace"

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        values = np.flatnonzero(ranges.scratch)
        start = ranges.maker[values]
        return Lifetimes(ranges.value_class[values], start, start + 1, values)

    def bytes(self, layout: Layout) -> Floats:
        t = layout.tables
        size = np.zeros(layout.value_bytes.shape)
        needing = np.flatnonzero(t.values.workspace.any(axis=1))
        held = np.take(layout.held, t.slots.op_class[t.values.slot[needing]], axis=1)
        rows = np.arange(len(needing))[:, None]
        for term in range(t.values.workspace.shape[1]):
            over = t.values.workspace_over[needing, term][rows, held]
            amount = t.values.workspace[needing, term]
            size[:, needing] += amount / layout.devices[axes_of(over)]
        return size / layout.machine.hardware.allocator_efficiency


class RingBuffers(Term):
    """Shards that go around: one that is in use, and one that is under way to the next device."""

    name, scope, label = "ring buffers", Entity.USE_CLASS, "ring"

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes | None:
        uses = np.flatnonzero(ranges.around)
        if not len(uses):
            return None
        start = ranges.use_op[uses]
        return Lifetimes(ranges.use_class[uses], start, start + 1, ranges.use_value[uses])

    def bytes(self, layout: Layout) -> Floats:
        t = layout.tables
        held = np.take(layout.held, t.slots.op_class[t.uses.slot], axis=1)
        rings = np.take(t.slots.ring, t.uses.slot[:, None] * t.slots.ring.shape[1] + held)
        return np.asarray(2 * layout.use_memory * (rings > 0).any(axis=2))


class RoundedStacks(Term):
    """Stacked float32 arguments in the element type of products, which loops read instead."""

    name, scope, label = "rounded stacks", Entity.VALUE_CLASS, "rounded"

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        return ranges.rounded

    def bytes(self, layout: Layout) -> Floats:
        return layout.value_memory * ROUNDED


class SecondBuffers(Term):
    """Operands of products that cannot overwrite their own operands, because the product is a loop.

    A product that is summed in parts is a loop: its operands are computed before it begins.  A
    short loop slices the operands that have the scattered dimension.
    """

    name, scope, label = "second buffers", Entity.VALUE_CLASS, "second"

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        taken = np.isin(ranges.value_class, ranges.operands)
        beside = ranges.stored[ranges.live.in_place[ranges.stored] & taken[ranges.stored]]
        start = ranges.live.start[beside]
        return Lifetimes(ranges.value_class[beside], start - 1, start, beside)

    def bytes(self, layout: Layout) -> Floats:
        return layout.value_memory * self._needed(layout)

    def _needed(self, layout: Layout) -> Bools:
        """``[S, C]`` whether a product needs a second buffer."""
        result = layout.tables.operands.result
        sliced = layout.sliced & ~layout.whole[:, result]
        return _of_operands(layout, layout.parted[:, result] | sliced)

    def least_bytes(self, layout: Layout) -> Floats:
        return np.zeros(layout.value_memory.shape)

    def most_bytes(self, layout: Layout) -> Floats:
        return layout.value_memory


class PartedOperands(SecondBuffers):
    """Operands of such loops that the kernels of other products compute again instead.

    The first kernel that computes an expensive one, such as a GELU, writes it for all products.  It
    also writes the values from which a gather picks single elements, and which wait beside it.
    """

    name, scope, label = "parted operands", Entity.VALUE_CLASS, "value"
    of_loops = True

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        products = ranges.of_products
        parted = np.array([kind in _PARTED for kind in ranges.program.kinds], dtype=bool)
        products = products[parted[ranges.use_op[products]]]
        products = products[~ranges.live.exists[ranges.use_value[products]]]
        count = len(ranges.value_class)
        start, end = np.full(count, len(ranges.program.ops)), np.zeros(count, dtype=np.int64)
        np.minimum.at(start, ranges.use_value[products], ranges.use_op[products])
        np.maximum.at(end, ranges.use_value[products], ranges.use_op[products] + 1)
        values = np.unique(ranges.use_value[products])
        values = values[(ranges.size > ranges.floor)[values] & ~ranges.host[values]]
        values = values[np.array([ranges.is_computed(v) for v in values.tolist()], dtype=bool)]
        start[values] = np.where(ranges.expensive[values], start[values], end[values] - 1)
        # Values that wait beside this one have its sharding: one of twice its bytes is two rows of
        # its class.  XLA computes the gradients of float32 products apart from them.
        beside = [
            value for value in values[ranges.expensive[values]].tolist()
            if ranges.program.values[value].type.dtype != "f32"
            for other in ranges.picked_beside(value)
            for _ in range(round(ranges.size[other] / ranges.size[value]))
        ]  # fmt: skip
        rows = np.array([*values.tolist(), *beside], dtype=np.int64)
        return Lifetimes(ranges.value_class[rows], start[rows], end[rows], rows)

    def bytes(self, layout: Layout) -> Floats:
        return super().bytes(layout) * layout.tables.values.as_operand

    def _needed(self, layout: Layout) -> Bools:
        needed = _of_loops(layout) & ~_with_halos(layout)
        result = layout.tables.operands.result
        short = layout.unrolled[:, result] & ~layout.whole[:, result]
        needed |= _of_operands(layout, short & layout.sliced)
        return np.asarray(needed & (layout.band_padding == 0))


class HaloOperands(Term):
    """Operands that the kernels of products compute again, if neighbours need their edges.

    Devices send edges from memory, so that a kernel writes such an operand, for all products if it
    is expensive.
    """

    name, scope, label = "operands with halos", Entity.VALUE_CLASS, "value"

    def seconds(self, layout: Layout) -> Floats:
        values = layout.tables.values
        written = self.bytes(layout) * (values.computed * values.count)
        return np.asarray(_ACCESSES * written / layout.machine.hardware.memory_bytes_per_s)

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        return PartedOperands().lifetimes(ranges)

    def bytes(self, layout: Layout) -> Floats:
        needed = _with_halos(layout) & (layout.band_padding == 0)
        return np.asarray(layout.value_memory * (needed * layout.tables.values.as_operand))


class LogitGradients(Term):
    """Kernels that write the gradient of logits for a loop; other products compute it again."""

    name, scope = "gradients of logits", Entity.VALUE_CLASS

    def seconds(self, layout: Layout) -> Floats:
        values = layout.tables.values
        # It reads the logits in float32.
        moved = layout.value_memory * (1.0 + 1.0 / ROUNDED) * (values.of_picked * values.count)
        return np.asarray(_of_loops(layout) * moved / layout.machine.hardware.memory_bytes_per_s)

    def least_seconds(self, layout: Layout) -> Floats:
        return np.zeros(layout.value_memory.shape)


class SlicedSelections(Term):
    """Results of scatters of which devices need a part, though they compute all of it.

    Kernels compute the gradients of picked logits as they read them
    (:func:`toast.cost.liveness.summed_selections`).  If one needs a part, the kernel that sums them
    writes all for it.
    """

    name, scope, label = "sliced selections", Entity.VALUE_CLASS, "value"

    def seconds(self, layout: Layout) -> Floats:
        written = self.bytes(layout) * layout.tables.values.count
        return np.asarray(written / layout.machine.hardware.memory_bytes_per_s)

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes | None:
        values = ranges.selected
        if not len(values):
            return None
        last = ranges.maker.copy()
        np.maximum.at(last, ranges.use_value, ranges.use_op)
        return Lifetimes(ranges.value_class[values], ranges.maker[values], last[values] + 1, values)

    def bytes(self, layout: Layout) -> Floats:
        values, uses = layout.tables.values, layout.tables.uses
        sliced = np.zeros(layout.value_memory.shape, dtype=bool)
        if values.selected.any():
            part = (layout.used_axes & ~layout.before_axes) > 0
            sliced[:, uses.value[uses.first]] = np.logical_or.reduceat(part, uses.first, axis=1)
        return np.asarray(layout.value_memory * (sliced & values.selected))


#: The least bytes of operands that wait, over those of fast memory: XLA keeps smaller ones there.
#: Fitted to open programs of ``benchmarks/strangers.py``.
_LEAST_DELAYED = 0.125


class DelayedOperands(PartedOperands):
    """Operands of such loops that only the optimizer needs, which run beside later products.

    XLA moves the shards of the sum meanwhile, and operands that are too large for fast memory wait:
    in a loop, until its iteration ends.
    """

    name, scope, label = "delayed operands", Entity.VALUE_CLASS, "value"

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        live, products = ranges.live, ranges.of_products
        uses = products[live.delayed[products] > 0]
        uses = uses[(ranges.size > ranges.floor)[ranges.use_value[uses]]]
        uses = uses[~ranges.host[ranges.use_value[uses]]]
        count = len(ranges.value_class)
        end, last = np.zeros((2, count), dtype=np.int64)
        np.maximum.at(end, ranges.use_value[uses], live.delayed[uses])
        np.maximum.at(last, ranges.use_value[products], ranges.use_op[products])
        # Arguments are in memory anyway.
        values = np.setdiff1d(ranges.use_value[uses], ranges.program.argument_values)
        computed = [live.exists[v] or ranges.is_computed(v) for v in values.tolist()]
        values = values[np.array(computed, dtype=bool)]
        start = np.where(live.exists[values], live.end[values], last[values]) + 1
        later = start <= end[values]
        values, start = values[later], start[later]
        return Lifetimes(ranges.value_class[values], start, end[values] + 1, values)

    def _needed(self, layout: Layout) -> Bools:
        least = _LEAST_DELAYED * layout.machine.hardware.products.fast_bytes
        return np.asarray(_of_loops(layout) & (layout.value_memory > least))


#: The time for a padded element that a copy turns into lanes, over that of one that changes its
#: place in tiles: 100 G elements/s in programs compiled for v5e.
_TURNED = 0.63


class ImagesInLanes(PartedOperands):
    """The padding of images that loops slice along their features, or rounded copies of images.

    The gradient of a kernel that is scattered along features is computed in a loop, which slices
    the images with these features.  If the slices are no whole rows of tiles, XLA keeps those
    images in another layout, from the kernel that writes them on: the images are in the lanes, and
    the features in the rows.  Of float32 images that other kernels read, this is a rounded copy.
    """

    name, scope, label = "images in lanes", Entity.VALUE_CLASS, "padding"
    of_loops = True

    def seconds(self, layout: Layout) -> Floats:
        values = layout.tables.values
        needed, hardware = self._needed(layout), layout.machine.hardware
        if not needed.any():
            return np.zeros(needed.shape)
        elements = self._copied(layout) / np.maximum(values.element, 1.0) * values.count
        seconds = _TURNED * hardware.relayout_bytes / hardware.memory_bytes_per_s
        return np.asarray(elements * needed * seconds)

    def least_seconds(self, layout: Layout) -> Floats:
        return np.zeros(layout.value_memory.shape)

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        live, computed = ranges.live, super().lifetimes(ranges)
        rows = ranges.stored[np.isin(ranges.value_class[ranges.stored], ranges.images)]
        stored = Lifetimes(ranges.value_class[rows], live.start[rows], live.end[rows] + 1, rows)
        computed = computed.take(np.isin(computed.entity, ranges.images))
        both = Lifetimes.joined([stored, computed])
        # The loops run beside later products.
        run = np.flatnonzero(np.isin(ranges.program.passes, _BACKWARD) & ranges.product)
        if not len(run):
            return both
        later = np.minimum(np.searchsorted(run, both.end - 1) + DELAY, len(run) - 1)
        return dataclasses.replace(both, end=np.maximum(both.end, run[later]))

    def bytes(self, layout: Layout) -> Floats:
        needed = self._needed(layout)
        if not needed.any():
            return np.zeros(needed.shape)
        return np.where(needed, self.most_bytes(layout), 0.0)

    def _needed(self, layout: Layout) -> Bools:
        operands, values = layout.tables.operands, layout.tables.values
        result, rows = operands.result, np.flatnonzero(operands.images)
        sliced = np.zeros((len(layout.held), len(operands)), dtype=bool)
        for dim, here in layout.slices(rows):
            shards = layout.devices[axes_of(layout.settled[:, result[rows]] == dim[..., None])]
            size = values.sizes[result[rows], np.maximum(dim, 0)] / shards
            sliced[:, rows] |= here & (size % layout.machine.hardware.lanes != 0)
        return _of_operands(layout, layout.parted[:, result] & sliced)

    def most_bytes(self, layout: Layout) -> Floats:
        values, copied = layout.tables.values, self._copied(layout)
        rounded = (values.element == 4) & (values.stored == 1)
        rounded &= (values.as_operand == 1) & bool(layout.machine.hardware.product_operands)
        padding = np.maximum(copied - layout.value_memory, 0.0)
        return np.where(rounded, ROUNDED * copied, padding)

    def _copied(self, layout: Layout) -> Floats:
        """``[S, C]`` bytes of images with the images in the lanes, 0 for all others."""
        operands, values = layout.tables.operands, layout.tables.values
        size = np.zeros(layout.value_memory.shape)
        some = np.unique(operands.value[operands.images])
        if len(some) and layout.machine.hardware.lanes > 1:
            size[:, some] = layout.value_memory[:, some] * layout.machine.padding_of_images(
                values.sizes[some], values.tiled[some], values.element[some],
                layout.settled[:, some],
            )  # fmt: skip
        return size


class WaitingOperands(Term):
    """Operands of short loops that end after the backward pass of a scan.

    XLA moves shards of the sum while other ops run: it begins such a loop of products, as that of
    the gradient of the head, before the scan, and ends it where its result is needed, after it.
    """

    name, scope, label = "waiting operands", Entity.VALUE_CLASS, "value"
    of_loops = True

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        program, live = ranges.program, ranges.live
        loops, arguments = loops_of(program), frozenset(program.argument_values)
        first = np.full(len(program.values), len(program.ops), dtype=np.int64)
        np.minimum.at(first, ranges.use_value, live.late[ranges.use_op])
        rows: list[tuple[int, int, int, int]] = []
        for use in ranges.of_products.tolist() if loops else ():
            op, value = int(ranges.use_op[use]), int(ranges.use_value[use])
            needed = first[program.ops[op].results[0]]
            end = max((n.end for n in loops if op < n.begin and n.end < needed), default=-1)
            begin = max(live.use_end[use], live.end[value]) + 1
            if begin <= end and ranges.size[value] > ranges.floor and value not in arguments:
                rows.append((int(ranges.value_class[value]), int(begin), end + 1, value))
        last = {row[3]: row for row in sorted(rows)}  # of an operand of several products
        return Lifetimes(*np.array([*last.values()], dtype=np.int64).reshape(-1, 4).T)

    def least_bytes(self, layout: Layout) -> Floats:
        return np.zeros(layout.value_memory.shape)

    def bytes(self, layout: Layout) -> Floats:
        waiting = _of_operands(layout, layout.unrolled[:, layout.tables.operands.result])
        return layout.value_memory * (waiting * layout.tables.values.as_operand)


class AddedOperands(Term):
    """Operands of a product whose kernel adds a scatter to its result, which is summed with it.

    The gradient of a tied table has the parts of a lookup and of a head.  If devices sum both at
    once, the kernel of the head's part runs after the scatter.  Its operands wait; its result, with
    which they are counted, is not in memory before.
    """

    name, scope, label = "added operands", Entity.VALUE_CLASS, "value"
    of_loops = True

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes | None:
        live, arguments = ranges.live, frozenset(ranges.program.argument_values)
        rows: list[tuple[int, int, int, int]] = []
        for product, scatter in ranges.added:
            for use in ranges.of_products[ranges.use_op[ranges.of_products] == product].tolist():
                value = int(ranges.use_value[use])
                start = max(int(live.use_end[use]), int(live.end[value])) + 1
                large = ranges.size[value] > ranges.floor and not ranges.host[value]
                if start <= scatter and large and value not in arguments:
                    rows.append((int(ranges.value_class[value]), start, scatter + 1, value))
        return Lifetimes(*np.array(rows, dtype=np.int64).T) if rows else None

    def least_bytes(self, layout: Layout) -> Floats:
        return np.zeros(layout.value_memory.shape)

    def bytes(self, layout: Layout) -> Floats:
        return self._largest(layout, lambda operand, result: np.maximum(operand - result, 0.0))

    @staticmethod
    def _largest(layout: Layout, of: Callable[[Floats, Floats], Floats]) -> Floats:
        """``[S, C]`` the most bytes of an operand's rows: ``of`` operands, and of results.

        Only where a sum is whole, as that of the scatter is, too.
        """
        operands, values = layout.tables.operands, layout.tables.values
        size = np.zeros(layout.value_memory.shape)
        waits = values.adds_scatter & (layout.partial > 0) & (layout.scattered == 0)
        if waits.any():
            sizes = (layout.value_memory[:, v] for v in (operands.value, operands.result))
            here = np.where(waits[:, operands.result], of(*sizes), 0.0)
            np.maximum.at(size.T, operands.value, here.T)
        return size


class AddedResults(AddedOperands):
    """The results of such products, beside the larger operand in their kernels."""

    name = "added results"

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes | None:
        rows = super().lifetimes(ranges)
        return None if rows is None else dataclasses.replace(rows, start=rows.end - 1)

    def bytes(self, layout: Layout) -> Floats:
        return self._largest(
            layout, lambda operand, result: np.where(operand > result, result, 0.0)
        )


def _of_loops(layout: Layout) -> Bools:
    """``[S, C]`` whether a value is an operand of a product that is a loop."""
    return _of_operands(layout, layout.parted[:, layout.tables.operands.result])


def _with_halos(layout: Layout) -> Bools:
    """``[S, C]`` whether a product of a TPU needs the edges of a value from neighbours."""
    uses, slots = layout.tables.uses, layout.tables.slots
    needed = np.zeros(layout.value_memory.shape, dtype=bool)
    of_products = layout.tables.ops.product[slots.op_class[uses.slot]]
    rows = np.flatnonzero(of_products & slots.halo[uses.slot].any(axis=1))
    if len(rows) and layout.machine.hardware.lanes > 1:
        held = np.take(layout.held, slots.op_class[uses.slot[rows]], axis=1)
        halo = np.take(slots.halo, uses.slot[rows][:, None] * slots.halo.shape[1] + held)
        sent = (halo > 0).any(axis=2)
        first = np.flatnonzero(np.diff(uses.value[rows], prepend=-1))
        needed[:, uses.value[rows][first]] = np.logical_or.reduceat(sent, first, axis=1)
    return needed


def _of_operands(layout: Layout, needed: Bools) -> Bools:
    """``[S, C]`` whether a value is an operand of a product for which ``[S, rows]`` holds."""
    operands = layout.tables.operands
    found = np.zeros(layout.value_memory.shape, dtype=bool)
    if len(operands):
        first = np.flatnonzero(np.diff(operands.value, prepend=-1))
        found[:, operands.value[first]] = np.logical_or.reduceat(needed, first, axis=1)
    return found
