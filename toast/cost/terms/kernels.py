"""Terms of kernels: products, custom calls, and kernels bound by memory or the vector unit."""

from __future__ import annotations

import math

import numpy as np

from toast.cost.axis_sets import axes_of
from toast.cost.entities import Bools, Dims, Entity, Floats, Ints
from toast.cost.layout import Layout, LocalLayout, slot_dims
from toast.cost.liveness import SUBLANES
from toast.cost.loops import ADDED
from toast.cost.step_rows import WRITTEN
from toast.cost.tables import ProductTensors, ValueClasses
from toast.cost.terms.buffers import ROUNDED
from toast.cost.terms.term import LocalTerm, StepPart, Term
from toast.cost.terms.traffic import joint_share
from toast.hardware import Hardware
from toast.program import QUANTITIES

#: A kernel with fewer FLOPs for each exponential is one of attention: four products of 512 values
#: for a score.  Kernels with a few exponentials beside their products are not.
_FLOPS_OF_SCORE = 4096.0

#: The time of a convolution of images over that of a product with as much work, for the same ones.
_OF_IMAGES = 0.93

#: The time for an element of an image that a convolution writes, or sums, over that of a result of
#: other products: for float32, and for elements of 2 bytes.  Fitted to 232 convolutions that XLA
#: compiled for v5e.
_STORED_IMAGE, _SUMMED_IMAGE = (0.58, 0.88), (0.7, 0.43)

#: Work of convolutions in bands of few images, over that of the images: 1.1 to 1.6 in kernels that
#: XLA compiled for v5e.
_BANDED = 1.5

#: The share of the time of a whole tile that a product of vectors takes for a tile, however few its
#: rows.  Fitted to kernels that XLA compiled: 11.2, 12.2 and 14.3 cycles for 2, 4 and 8 rows.
_PER_TILE = 0.72

#: The time for an element that a copy brings into tiles of so many rows, over that of one that
#: changes its place in tiles.  Fitted to a program that XLA compiled with so many sequences.
_IN_ROWS = {1: 7.4, 2: 5.7, 4: 3.6, SUBLANES: 0.6}

#: Dimensions of a matrix, and operands of a product.
_MATRIX = _OPERANDS = 2

#: Bytes of a float32 element.
_WIDE = 4

#: Shares of the fast memory: arrays of the first one are always in it between kernels, and those of
#: the second one never.  Fitted to kernels that XLA compiled.
_KEPT = (0.1, 0.4)

#: The time of a product of vectors whose larger operand is in fast memory, over that of one that
#: reads it from memory: 0.12 to 0.26 in kernels that XLA compiled for v5e.
_FETCHED = 0.18


#: The part of its latency that is left of a product all of whose operands and results are in fast
#: memory.
_WAITING = 0.1


#: The time of a result that is written in 32 bits over that of a packed one: 0.68 to 0.73 in
#: products compiled for v4, v5e, v5p and v6e.
_UNPACKED = 0.7


class ProductWork(LocalTerm):
    """Matrix products and convolutions: a roofline of FLOPs, results and bytes.

    It depends on the size of a device's part; see :class:`toast.hardware.ProductPrices`.
    If a product sums nothing, XLA does not use the matrix unit, so the product is bound by memory.
    Batches of products of a vector and a matrix (a token that attends to a cache) run on the vector
    unit, at its rate.  Every product takes some microseconds besides, so small ones reach a small
    part of the peak.
    """

    name, scope, part = "products", Entity.PRODUCT, StepPart.PRODUCTS

    def seconds(self, layout: LocalLayout) -> Floats:
        return self._seconds(layout, arguments_alike(layout))

    def least_seconds(self, layout: LocalLayout) -> Floats:
        return self._seconds(layout, None)

    def _seconds(self, layout: LocalLayout, alike: Bools | None) -> Floats:
        """The seconds; ``alike`` is :func:`arguments_alike`, ``None`` for what takes least time."""
        t, op_class = layout.tables, layout.tables.products.op_class
        if not len(t.products):
            return np.zeros((len(layout.held), 0))
        hardware = layout.machine.hardware
        held = np.take(layout.held, op_class, axis=1)
        shards = layout.devices[axes_of(held < t.slots.dim.shape[1] - 1)]
        summed = t.products.size[:, 2] > 1
        whole = np.where(summed, (t.ops.peak_seconds * t.ops.count)[op_class], 0.0)
        size, memory = self.local_size(layout, held), hardware.memory_bytes_per_s
        whole = whole * self.image_share(layout, held, size)
        if hardware.lanes > 1:
            whole = whole * np.where(t.products.of_images, _OF_IMAGES, 1.0)
        flops = hardware.products.seconds(size, whole / shards, memory)
        rate, vector = hardware.vector_products_per_s, np.zeros(flops.shape, dtype=bool)
        if rate < np.inf:
            vector = self.on_vector_unit(layout, size)
        if vector.any():
            sums = (t.ops.flops / 2 * t.ops.count)[op_class] / rate
            sums = sums / shards * self.tile_share(layout, held)
            flops = np.where(vector, sums, flops)
        if hardware.products.depthwise_per_s:
            flops = self._depthwise_seconds(layout, size, flops)
        dims = slot_dims(t, layout.held, t.tensors.slot)
        tensors = t.tensors.bytes / layout.devices[axes_of(dims >= 0)]
        tensors = tensors * self._image_padding(layout, dims)
        share = t.tensors.argument_bytes / np.maximum(t.tensors.bytes, 1.0)
        reads_rounded = (t.tensors.rounded >= 0) & (share < 1 if alike is None else alike)
        tensors = np.where(reads_rounded, tensors * share, tensors)
        # Arguments are in memory, whatever their size: a step reads them at least once.
        viewed = t.tensors.viewed if alike is None else memory_share(t.tensors, alike)
        moving = np.maximum(tensors * viewed, hardware.products.moved_bytes(tensors))
        fast = self.fetched_share(layout, tensors, alike)
        fetching, moving = moving * fast, moving * (1 - fast)
        first = np.flatnonzero(np.diff(t.tensors.product, prepend=-1))
        if vector.any():
            operands = tensors * ~t.tensors.result
            fetched = np.add.reduceat(operands * fast, first, axis=1)
            fetched = fetched / np.maximum(np.add.reduceat(operands, first, axis=1), 1.0)
            if alike is None:  # whatever the sizes of the others
                fetched = np.maximum.reduceat(fast, first, axis=1)
            # A single product waits for the unit, wherever its operands are.
            fetched = np.where(size[..., 3] > 1, fetched, 0.0)
            flops = np.where(vector, flops * (1 - (1 - _FETCHED) * fetched), flops)
        count = t.ops.count[op_class].astype(np.float64)
        moved: Floats = np.add.reduceat(moving, first, axis=1) * count
        results = np.add.reduceat(tensors * t.tensors.result, first, axis=1)
        away = np.add.reduceat(moving * t.tensors.result, first, axis=1) / np.maximum(results, 1.0)
        on_unit = summed & ~vector
        on_images, of_images = self._image_elements(layout, tensors, first)
        stored = size[..., 0] * size[..., 1] * size[..., 3] * (count * on_unit)
        of_groups = stored * self._group_padding(layout, held, size)
        stored = stored * t.products.padding * np.where(t.products.wide, _UNPACKED, 1.0)
        stored = hardware.products.moved_results(stored, away)
        stored = np.where(on_images, of_images * count, stored)
        stored = np.where(t.products.grouped, of_groups, stored)
        seconds = hardware.products.kernel_seconds(flops, stored, moved, count, memory)
        if hardware.products.reloading:
            wide = np.logical_and.reduceat(t.tensors.wide | t.tensors.result, first)
            wide = wide & on_unit & ~t.products.of_images
            operands = np.where(t.tensors.result, np.inf, tensors)
            smaller = np.minimum.reduceat(operands, first, axis=1) / size[..., 3]
            again = hardware.products.reloading_share(smaller)
            seconds = seconds + np.where(wide, flops * again, 0.0)
        if hardware.counts_fetches:
            fetched = np.add.reduceat(fetching, first, axis=1) * count
            seconds = np.maximum(seconds, (moved + fetched) / memory)
        latency = hardware.product_latency_s * count
        if math.isfinite(hardware.products.weights_per_s):
            whole = np.add.reduceat(tensors, first, axis=1) * count
            kept = t.products.keeps & on_unit
            loading = hardware.products.loading_seconds(size) * count
            seconds = np.where(kept, np.maximum(seconds, loading), seconds)
            share = np.minimum(moved / np.maximum(whole, 1.0), 0.0 if alike is None else 1.0)
            latency = np.where(kept, (_WAITING + (1 - _WAITING) * share) * latency, latency)
        return np.asarray(seconds + latency)

    @staticmethod
    def _depthwise_seconds(layout: LocalLayout, size: Floats, seconds: Floats) -> Floats:
        """``[S, P]`` the seconds to compute depthwise convolutions, and ``seconds`` of others.

        A convolution multiplies the features of one place of its window at once, whole rows of
        tiles of them; the gradient of a kernel adds up its products as it computes them.
        """
        t, hardware = layout.tables, layout.machine.hardware
        products, prices = t.products, hardware.products
        if not products.depthwise.any():
            return seconds
        of_class = (t.ops.flops / 2 * t.ops.count)[products.op_class]
        sums = of_class * size.prod(axis=-1) / np.maximum(products.size.prod(axis=-1), 1.0)
        rate = np.where(products.of_grouped, prices.depthwise_sums_per_s, prices.depthwise_per_s)
        padded = sums * _padding(size[..., 3], hardware.lanes) / rate
        return np.where(products.depthwise, padded, seconds)

    def _group_padding(self, layout: LocalLayout, held: Ints, size: Floats) -> Floats:
        """``[S, P]`` results of convolutions in groups, padded, over those without padding.

        Other products have 1.  Rows of tiles have the features of one group, all features if the
        convolution is depthwise, or the images.
        """
        products, lanes = layout.tables.products, layout.machine.hardware.lanes
        if lanes == 1 or not products.grouped.any():
            return np.ones(1)
        images = products.images / layout.devices[
            axes_of(held == products.image_factor[:, None])
        ]  # fmt: skip
        inside = np.where(products.depthwise, size[..., 3], size[..., 1])
        least = np.minimum(_padding(inside, lanes), _padding(np.maximum(images, 1.0), lanes))
        return np.where(products.grouped & ~products.of_grouped, least, 1.0)

    @staticmethod
    def _image_padding(layout: LocalLayout, dims: Dims) -> Floats:
        """``[S, T]`` bytes of tensors in tiles over those without, other than 1 for images."""
        tensors, padding = layout.tables.tensors, np.ones(dims.shape[:-1])
        rows = tensors.images
        if len(rows) and layout.machine.hardware.lanes > 1:
            sizes = tensors.sizes[rows]
            element = tensors.bytes[rows] / np.maximum(sizes.prod(axis=1), 1)
            padding[:, rows] = layout.machine.lane_padding(
                sizes, tensors.tiled[rows], element, dims[:, rows]
            )
        return padding

    @staticmethod
    def _image_elements(layout: LocalLayout, size: Floats, first: Ints) -> tuple[Bools, Floats]:
        """``[P]`` the convolutions of images, and ``[S, P]`` elements of results that take as long.

        A convolution handles each element of its tiles, whether it is in fast memory or not: those
        of its result, or, for the gradient of a kernel, those of the smaller images.  ``size``
        (``[S, T]``) are bytes, and ``first`` is the first tensor of each product.
        """
        products, tensors = layout.tables.products, layout.tables.tensors
        rows, result = tensors.images, tensors.result[tensors.images]
        wide = tensors.bytes[rows] >= _WIDE * tensors.sizes[rows].prod(axis=1)
        count = size[:, rows] / np.where(wide, _WIDE, _WIDE / 2)
        written, summed = np.zeros(size.shape), np.full(size.shape, np.inf)
        known = np.zeros(size.shape[1])
        known[rows] = ~result
        written[:, rows] = count * np.where(wide, *_STORED_IMAGE) * result
        summed[:, rows] = np.where(result, np.inf, count * np.where(wide, *_SUMMED_IMAGE))
        elements = np.where(
            products.sums_images,
            np.minimum.reduceat(summed, first, axis=1),
            np.add.reduceat(written, first, axis=1),
        )
        # Arguments have layouts of their own: nothing is known of gradients of such images.
        both = np.add.reduceat(known, first) == _OPERANDS
        here = products.of_images & np.where(products.sums_images, both, elements.all(axis=0))
        return here, np.where(here, elements, 0.0)

    @staticmethod
    def on_vector_unit(layout: LocalLayout, size: Floats) -> Bools:
        """``[S, P]`` products of a vector and a matrix on each device, or batches of them.

        ``size`` is that of :meth:`local_size`.  Batches that are none in the program have their
        rows sharded, such as the queries that share a head of a cache, so that a device has one of
        them.  One row is multiplied there, two are not: 40 and 4 us for 2048 x 2048 on v5e.
        """
        products = layout.tables.products
        rows, columns, depth, batch = np.moveaxis(size, -1, 0)
        split = products.size[:, :2].min(axis=1) > 1
        single = (np.minimum(rows, columns) <= 1) & (depth > 1) & (split | (batch <= 1))
        return np.asarray(products.vector | (single & (products.images == 0)))

    def fetched_share(self, layout: LocalLayout, size: Floats, alike: Bools | None) -> Floats:
        """``[S, T]`` the share of operands that are in fast memory before their products run.

        XLA copies arguments there (:mod:`toast.cost.fetched_arguments`) if there is room and
        nothing reshards them.  ``size`` are bytes on a device, and ``alike`` is that of
        :meth:`_seconds`.
        """
        t, hardware = layout.tables, layout.machine.hardware
        if not hardware.products.fast_bytes:
            return np.zeros_like(size)
        tensors = t.tensors
        share: Floats = tensors.fetched
        if alike is not None:
            share = share * (alike | ((tensors.rounded < 0) & (tensors.argument < 0)))
        return share * (1 - hardware.products.moved_bytes(size) / np.maximum(size, 1.0))

    def tile_share(self, layout: LocalLayout, held: Ints) -> Floats:
        """``[S, P]`` the time of a product of vectors over that of one with whole tiles.

        A cache ``[batch, keys, heads, size]`` of two heads is in tiles of two rows, although the
        unit works on eight.  XLA picks another layout if the last two dimensions would be padded.
        """
        products, lanes = layout.tables.products, layout.machine.hardware.lanes
        shares = [layout.devices[axes_of(held == f[:, None])] for f in products.tile_factor.T]
        rows, width = (products.tile / np.stack(shares, axis=2)).transpose(2, 0, 1)
        return np.where(width % lanes == 0, share_of_rows(rows, _PER_TILE), 1.0)

    def image_share(self, layout: LocalLayout, held: Ints, size: Floats) -> Floats:
        """``[S, P]`` the work of a convolution over that of a product of its size.

        With its features in the lanes of tiles, a convolution multiplies the features of one
        position of its window at once, and whole rows of tiles of images.  If the images fill lanes
        better, they are there: it multiplies the features of several positions at once, and does
        not pad those of its result.  Fewer images than a tile has rows are mostly in bands, whose
        borders overlap (:data:`toast.cost.image_tiles.MOST_IN_BANDS`).  ``size`` is that of
        :meth:`local_size`.
        """
        t, hardware = layout.tables, layout.machine.hardware
        products, lanes = t.products, hardware.lanes
        if lanes == 1 or not products.images.any():
            return np.ones(1)
        images, features = (
            np.maximum(count / layout.devices[axes_of(held == factor[:, None])], 1.0)
            for count, factor in (
                (products.images, products.image_factor),
                (products.features, products.feature_factor),
            )
        )
        columns, depth = size[..., 1], size[..., 2]
        most = np.maximum(features, columns)
        in_rows, in_lanes = _padding(images, SUBLANES), _padding(images, lanes)
        turned = in_lanes * _padding(most, SUBLANES) < in_rows * _padding(most, lanes)
        window = np.maximum(depth / features, 1.0)
        once = features * window * _padding(features, lanes)
        once = once / (depth * _padding(depth, hardware.products.depth))
        apart = in_rows * np.where(features > SUBLANES, np.maximum(once, 1.0), 1.0)
        unpadded = _padding(columns, SUBLANES) / _padding(columns, lanes)
        joined = in_lanes * np.where(products.reversed, 1.0, unpadded)
        share = np.where(turned, joined, apart)
        share = np.where(products.features > 0, share, in_rows)
        few = np.minimum(in_rows, _BANDED)
        share = np.where(images < SUBLANES, few, share)
        return np.where(products.images > 0, share, 1.0)

    def local_size(self, layout: LocalLayout, held: Ints) -> Floats:
        """``[S, P, 4]`` rows, columns and depth of a device's part of each product, and its batch.

        ``held`` (``[S, P, A]``) is the factor of each product that each axis shards.
        """
        products = layout.tables.products
        size = np.broadcast_to(products.size, (len(held), *products.size.shape)).copy()
        rows = np.arange(len(products))
        for axis, devices in enumerate(layout.machine.axis_sizes.tolist()):
            group = products.group[rows, held[..., axis]]
            for side in range(size.shape[-1]):
                size[..., side] /= np.where(group == side, devices, 1.0)
        return np.asarray(np.maximum(size, 1.0))  # for products without elements


def share_of_rows(rows: Floats, per_tile: float) -> Floats:
    """The time for elements in tiles of few ``rows`` over that for elements in whole tiles.

    Each tile takes the share ``per_tile`` of the time of a whole one, however few its rows.
    """
    few = (rows > 1) & (rows < SUBLANES) & (np.exp2(np.rint(np.log2(rows))) == rows)
    return np.where(few, per_tile * SUBLANES / rows + (1 - per_tile), 1.0)


def _padding(size: Floats, whole: Floats | Ints | int) -> Floats:
    """``size`` in ``whole`` tiles over ``size``."""
    return np.asarray(np.ceil(size / whole) * whole / size)


def arguments_alike(layout: LocalLayout) -> Bools:
    """``[S, T]`` whether a product needs an argument as it is, so that nothing reshards it before.

    If it rounds the argument, it does so as it reads it.
    """
    t = layout.tables
    alike = np.zeros((len(layout.held), len(t.tensors)), dtype=bool)
    own = np.maximum(t.tensors.argument, t.tensors.rounded)
    some = np.flatnonzero(own >= 0)
    if len(some):
        before = slot_dims(t, layout.held, own[some])
        used = slot_dims(t, layout.held, t.tensors.slot[some])
        same = (before == used).all(axis=2)
        # Other shapes have other dimensions.
        axes = axes_of(before >= 0) == axes_of(used >= 0)
        alike[:, some] = np.where(t.tensors.reshaped[some], axes, same)
    return alike


def memory_share(tensors: ProductTensors, alike: Bools) -> Floats:
    """``[S, T]`` the share of the runs that read an argument, or a part of one, from memory.

    Loops read an argument in each run if they need it as it is, rather than another part of it.
    ``alike`` is :func:`arguments_alike`.
    """
    whole = alike & (tensors.argument >= 0)
    return np.where(whole, np.ceil(tensors.viewed), tensors.viewed)


class RoundedReads(LocalTerm):
    """Kernels that round or slice arguments for products, before devices reshard them."""

    name, scope = "rounded reads", Entity.PRODUCT

    def seconds(self, layout: LocalLayout) -> Floats:
        t, rate = layout.tables, layout.machine.hardware.memory_bytes_per_s
        seconds = np.zeros((len(layout.held), len(t.products)))
        some = np.flatnonzero(t.tensors.rounding > 0)
        if not len(some):
            return seconds
        resharded = ~arguments_alike(layout)[:, some]
        dims = slot_dims(t, layout.held, t.tensors.rounded[some])
        spent = resharded * t.tensors.rounding[some] / layout.devices[axes_of(dims >= 0)] / rate
        product = t.tensors.product[some]
        np.add.at(seconds.T, product, spent.T)
        return seconds * t.ops.count[t.products.op_class]

    def least_seconds(self, layout: LocalLayout) -> Floats:
        return np.zeros((len(layout.held), len(layout.tables.products)))


class PartedProducts(Term):
    """Products that XLA computes in parts, because their sums are scattered over several devices.

    XLA makes a loop of such a product: each of its kernels computes the parts of two devices, and
    reads all of the operand that lacks the scattered dimension.  Another kernel adds the part of a
    device to what has arrived, and one more rounds that operand if products do.  This is what they
    take longer than the kernel of the whole product.
    """

    name, scope, part = "parted products", Entity.VALUE_CLASS, StepPart.PRODUCTS

    def seconds(self, layout: Layout) -> Floats | None:
        t, hardware = layout.tables, layout.machine.hardware
        parts = layout.devices[layout.scattered]
        state, value = np.nonzero(layout.parted & (t.values.product_size[:, 2] > 1))
        if not len(state):
            return None
        op_class = t.slots.op_class[t.values.slot[value]]
        held = layout.held[state, op_class]
        group = np.take_along_axis(t.values.product_group[value], held, axis=1)
        sides = [layout.devices[axes_of(group == side)] for side in range(4)]
        size = np.maximum(t.values.product_size[value] / np.stack(sides, axis=1), 1.0)
        rows, columns, depth, batch = sides
        shared = np.stack([rows, columns], axis=1) * (depth * batch)[:, None]
        operands = t.values.product_bytes[value] / shared
        own = hardware.products.moved_bytes(operands)
        whole = t.values.bytes[value] / (rows * columns * batch)
        result = hardware.products.moved_bytes(whole)
        away = result / np.maximum(whole, 1.0)
        shards = rows * columns * depth * batch
        at_peak = t.ops.peak_seconds[op_class] / shards
        # The side that the scattered sum divides: that of the first dimension that it shards.
        axis = np.argmax((layout.scattered[state, value, None] >> np.arange(held.shape[1])) & 1, 1)
        side = t.values.product_side[value, layout.settled[state, value, axis]]
        kernels = np.ceil(parts[state, value] / 2)
        once = self._kernel(hardware, size, at_peak, away, own.sum(axis=1) + result)
        # An operand that products round is rounded before the loop, not by its kernels.
        rounds = np.array([d == "f32" and bool(hardware.product_operands) for d in t.dtypes])
        rounded = rounds[t.ops.dtype[op_class]]
        divided = np.where(np.arange(4) == side[:, None], kernels[:, None], 1.0)
        again = operands * np.where(rounded, ROUNDED, 1.0)[:, None]
        again = hardware.products.moved_bytes(again, often=True)
        again = np.where(divided[:, :2] > 1, own, again)
        moved = (again / divided[:, :2]).sum(axis=1) + result / kernels
        part = np.maximum(size / divided, 1.0)
        each = self._kernel(hardware, part, at_peak / kernels, away, moved)
        longer = kernels * (each + hardware.product_latency_s) - once - hardware.product_latency_s
        adding = parts[state, value] * hardware.kernel_latency_s
        adding += ADDED * whole / hardware.memory_bytes_per_s
        read = np.where(side[:, None] == np.array([1, 0]), operands, 0.0).sum(axis=1)
        rounding = rounded * read * (1 + ROUNDED)
        adding += rounding / (hardware.memory_bytes_per_s * hardware.single_op_share)
        adding += parts[state, value] * self._copying(layout, state, value)
        seconds = np.zeros(layout.scattered.shape)
        seconds[state, value] = (np.maximum(longer, 0.0) + adding) * t.values.count[value]
        return seconds

    @staticmethod
    def _copying(layout: Layout, state: Ints, value: Ints) -> Floats:
        """The seconds of copies of a part of each sum into the layout in which it is sent.

        XLA sends parts without padding.  If their rows are no whole tiles, but the batch of a
        device is, the batch is in the rows.
        """
        values, hardware = layout.tables.values, layout.machine.hardware
        dims, sizes, rank = layout.settled[state, value], values.sizes[value], values.rank[value]
        shards = np.stack([
            layout.devices[axes_of(dims == d)] for d in range(sizes.shape[1])
        ], axis=1)  # fmt: skip
        local = np.maximum(sizes / shards, 1.0)
        rows = np.take_along_axis(local, np.maximum(rank - 2, 0)[:, None], axis=1)[:, 0]
        in_rows = np.take_along_axis(values.tiled[value], np.maximum(rank - 2, 0)[:, None], axis=1)
        padded = (rank > _MATRIX) & in_rows[:, 0] & (rows % SUBLANES != 0)
        batch = local[:, 0]
        slower = np.where(batch % SUBLANES == 0, _IN_ROWS[SUBLANES], 0.0)
        for size, share in _IN_ROWS.items():
            slower = np.where(batch == size, share, slower)
        element = hardware.relayout_bytes / hardware.memory_bytes_per_s
        return np.asarray(padded * slower * local.prod(axis=1) * element)

    @staticmethod
    def _kernel(
        hardware: Hardware, size: Floats, at_peak: Floats, away: Floats, moved: Floats
    ) -> Floats:
        products, memory = hardware.products, hardware.memory_bytes_per_s
        computing = products.seconds(size, at_peak, memory)
        stored = products.moved_results(size[:, 0] * size[:, 1] * size[:, 3], away)
        return products.kernel_seconds(computing, stored, moved, np.ones(len(moved)), memory)


class KernelWork(LocalTerm):
    """Custom calls whose costs are known: a roofline of FLOPs, bytes and transcendentals.

    The bytes are those of operands and results, and those that the kernel moves besides.  Kernels
    with FLOPs compute exponentials beside products: the hardware's rate, which is fitted to XLA's
    own kernels, would make flash attention seven times slower than its products.  Kernels with both
    are those of attention, whose products reach a share of the peak of their own.
    """

    name, scope, part = "kernels", Entity.OP_CLASS, StepPart.PRODUCTS

    def seconds(self, layout: LocalLayout) -> Floats:
        t, hardware = layout.tables, layout.machine.hardware
        seconds = np.zeros(layout.held.shape[:2])
        if not len(t.kernels):
            return seconds
        terms, tensors = t.kernels, t.kernel_tensors
        # Few op classes are kernels.
        kernels, place = np.unique(
            np.concatenate([terms.op_class, tensors.op_class]), return_inverse=True
        )
        of_term, of_tensor = np.split(place.reshape(-1), [len(terms)])
        work = np.zeros((len(QUANTITIES), len(seconds), len(kernels)))
        every = np.arange(len(seconds))[:, None]
        held = np.take(layout.held, terms.op_class, axis=1)
        over = terms.over[np.arange(len(terms))[:, None], held]
        amount = terms.amount / layout.devices[axes_of(over)] * _of_last(layout, held)
        for quantity in range(len(QUANTITIES)):
            rows = np.flatnonzero(terms.quantity == quantity)
            np.add.at(work[quantity], (every, of_term[rows]), amount[:, rows])
        dims = slot_dims(t, layout.held, tensors.slot)
        moved = tensors.bytes / layout.devices[axes_of(dims >= 0)]
        np.add.at(work[QUANTITIES.index("bytes")], (every, of_tensor), moved)
        peaks = np.array([hardware.peak(dtype) for dtype in t.dtypes])
        flops, exponentials, all_bytes, _ = work
        alone = np.where(flops > 0, 0.0, exponentials / hardware.transcendentals_per_s)
        attends = exponentials * _FLOPS_OF_SCORE > flops
        share = np.where(attends, hardware.attention_share, 1.0)
        computing = flops / (peaks[t.ops.dtype[kernels]] * share)
        beside = np.maximum(computing, all_bytes / hardware.memory_bytes_per_s)
        seconds[:, kernels] = np.maximum(beside, alone) * t.ops.count[kernels]
        return seconds


def _of_last(layout: LocalLayout, held: Ints) -> Floats:
    """``[S, rows]`` the costs of the device with the last causal queries, over the mean of devices.

    Of ``n`` devices, it has ``1 / n`` of the queries: all but the early ones see the most keys.
    """
    terms = layout.tables.kernels
    part = 1 / layout.devices[axes_of(held == terms.queries[:, None])]
    few = np.maximum(terms.early - (1 - part), 0.0)
    mean = terms.most - terms.early**2 / 2
    share = (part * terms.most - few**2 / 2) / (part * mean)
    none = terms.queries == layout.tables.slots.dim.shape[1] - 1
    return np.where(none, 1.0, share)


class Writes(LocalTerm):
    """Values that memory-bound kernels write.

    Constants are written by kernels of one op; those of TPUs take as long for small elements.
    """

    name, scope = "writes", Entity.VALUE_CLASS

    def seconds(self, layout: LocalLayout) -> Floats:
        values, hardware = layout.tables.values, layout.machine.hardware
        filling = hardware.fill_bytes_per_s(values.element)
        rate = np.where(values.constant, filling, hardware.memory_bytes_per_s)
        size = layout.written_bytes * layout.moved_share
        size = size * access_share(hardware, values, layout.written_bytes)
        written = np.where(values.constant, np.minimum(values.written, 1.0), values.written)
        return np.asarray(size * (written * values.count / rate))


class Latencies(LocalTerm):
    """The time that every memory-bound kernel takes besides its work, however small it is."""

    name, scope = "latencies", Entity.VALUE_CLASS

    def seconds(self, layout: LocalLayout) -> Floats:
        seconds = layout.tables.values.kernels * layout.machine.hardware.kernel_latency_s
        return np.broadcast_to(seconds, layout.value_bytes.shape)


class SumKernels(Term):
    """Kernels after sums over devices, which compute what a product's kernel computes without one.

    A product fuses the op after it, and writes that op's result while it computes.  If the result
    of the product is summed over devices, a kernel of its own reads the sum, unless that sum waits
    for the one of what is added to it.
    """

    name, scope = "kernels after sums", Entity.VALUE_CLASS

    def seconds(self, layout: Layout) -> Floats | None:
        values, hardware = layout.tables.values, layout.machine.hardware
        if not values.sum_kernels.any() or not layout.partial.any():
            return None
        share = layout.value_bytes / np.maximum(values.bytes, 1.0)
        moving = share * values.sum_moves / hardware.memory_bytes_per_s
        spent = moving + values.sum_kernels * hardware.kernel_latency_s
        at_once = 1.0 - np.minimum(joint_share(layout, layout.partial), 1.0)
        return np.asarray(np.where(layout.partial > 0, spent * at_once, 0.0))

    def least_seconds(self, layout: Layout) -> Floats | None:
        return None


class Roundings(LocalTerm):
    """Copies of stacked arguments in the element type of products, by kernels of one op.

    See :class:`toast.cost.terms.buffers.RoundedStacks` for their memory.
    """

    name, scope = "roundings", Entity.VALUE_CLASS

    def seconds(self, layout: LocalLayout) -> Floats:
        hardware = layout.machine.hardware
        rate = hardware.memory_bytes_per_s * hardware.single_op_share
        return np.asarray(
            layout.value_bytes * (layout.tables.values.rounded * (1 + ROUNDED) / rate)
        )


#: The time to add up the exponentials of narrower scores, over that of float32 ones: 9.3 and 10 ps
#: in programs compiled for v5e.
_OF_NARROW = 0.93


class Reads(LocalTerm):
    """Values that memory-bound kernels read, by use, and those that they write into stacks.

    TPUs write into a stack, which is in memory, no faster than products move their operands.  The
    sums to which products add their results in loops are read as operands of products are.
    """

    name, scope = "reads", Entity.USE_CLASS

    def seconds(self, layout: LocalLayout) -> Floats:
        uses = layout.tables.uses
        if not uses.reads_in_products.any():
            return self._seconds(layout, uses.reads)
        narrowed = layout.narrowed[:, uses.value]
        more = np.where(narrowed < 1, _OF_NARROW / narrowed - 1, -1.0)
        return self._seconds(layout, uses.reads + more * uses.reads_in_products)

    def least_seconds(self, layout: LocalLayout) -> Floats:
        # Whether the kernel of a product adds depends on the sharding of its scores.
        uses = layout.tables.uses
        return self._seconds(layout, uses.reads - uses.reads_in_products)

    @staticmethod
    def _seconds(layout: LocalLayout, reads: Floats) -> Floats:
        t, hardware = layout.tables, layout.machine.hardware
        share = access_share(hardware, t.values, layout.read_bytes, t.uses.value)
        if hardware.products.fast_bytes:
            share = np.where(t.uses.update, max(1.0, 1 / hardware.products.memory_share), share)
        rate = hardware.memory_bytes_per_s
        together = layout.read_bytes * t.uses.added_room
        added = hardware.products.moved_bytes(together) / np.maximum(t.uses.added_room, 1.0)
        added = added * (t.uses.added_reads / rate)
        return np.asarray(layout.read_bytes * share * (reads / rate) + added)


def access_share(
    hardware: Hardware, values: ValueClasses, size: Floats, of: Ints | slice = slice(None)
) -> Floats | float:
    """``[S, X]`` the time of accesses to values over that of their bytes.

    XLA keeps small values in fast memory, where the vector unit bounds the kernels of float32
    values: it takes as long for an element as the memory for some of the bytes of two accesses.
    That of smaller elements takes longer than their bytes anyway
    (:func:`toast.cost.vector_work.stretched`).  ``size`` are bytes on a device, and ``of``
    (``[X]``) are the value classes.
    """
    if not hardware.products.fast_bytes:
        return 1.0
    away = share_away(hardware, size)
    bound = min(hardware.vector_bytes / (2 * _WIDE), 1.0)
    inside = (values.element >= _WIDE) & ~values.outer
    return np.asarray(np.where(inside[of], bound + (1 - bound) * away, 1.0))


def share_away(hardware: Hardware, size: Floats) -> Floats:
    """The share of arrays of some bytes that is not in fast memory between kernels."""
    fast = hardware.products.fast_bytes
    if not fast:
        return np.ones_like(size)
    least, most = (share * fast for share in _KEPT)
    return np.clip((size - least) / (most - least), 0.0, 1.0)


class StepRows(LocalTerm):
    """Rows of tiles that loops read and write, such as the steps of sequences in a recurrence.

    The vector unit moves such rows one by one, in kernels of their own.  If a device has a single
    sequence, its steps are rows as they are, and other kernels read and write them.  XLA puts the
    steps into the lanes if they fill these better than a device's part of a row does; then the unit
    reads a lane of each tile.
    """

    name, scope = "step rows", Entity.USE_CLASS

    def seconds(self, layout: LocalLayout) -> Floats:
        uses, hardware = layout.tables.uses, layout.machine.hardware
        seconds = np.zeros(layout.used.shape[:2])
        rows = np.flatnonzero(uses.row_kernels)
        if not len(rows):
            return seconds
        used, sizes = layout.used[:, rows], layout.tables.values.sizes[uses.value[rows]]

        def local(dim: int) -> Floats:
            """``[S, rows]`` elements of a device along a dimension of ``[steps, batch, width]``."""
            return np.maximum(sizes[:, dim] / layout.devices[axes_of(used == dim)], 1.0)

        lanes, width, steps = hardware.lanes, local(2), local(0)
        in_lanes = np.ceil(width / lanes) / width > np.ceil(steps / lanes) / steps
        written = uses.update[rows]
        elements = sizes.prod(axis=1) / layout.devices[layout.used_axes[:, rows]]
        rate = np.where(
            written,
            WRITTEN * hardware.row_elements_per_s,
            np.where(in_lanes, hardware.lane_elements_per_s, hardware.row_elements_per_s),
        )
        kernels = (uses.row_pairs if hardware.rows_in_pairs else uses.row_kernels)[rows]
        spent = elements * uses.row_moves[rows] / rate + kernels * hardware.kernel_latency_s
        several = np.ceil(local(1)) > 1
        # Other kernels write steps into stacks whose rows do not fill the lanes.
        filled = np.ceil(width / lanes) * lanes <= width
        apart = np.where(written, several & filled, several | in_lanes)
        seconds[:, rows] = np.where(apart, spent, 0.0)
        return seconds


class HostTransfers(Term):
    """Values that move to the memory of the host or back.

    Copies are asynchronous: they take time only if they take longer than all the rest of a step.
    """

    name, scope, part = "host transfers", Entity.VALUE_CLASS, StepPart.HOST

    def seconds(self, layout: Layout) -> Floats:
        values, rate = layout.tables.values, layout.machine.hardware.host_bytes_per_s
        return np.asarray(layout.value_bytes * (values.transfers / rate))


class RandomBits(LocalTerm):
    """Operations on integers that kernels do not hide (:mod:`toast.cost.random_bits`)."""

    name, scope = "random bits", Entity.VALUE_CLASS

    def seconds(self, layout: LocalLayout) -> Floats:
        work = layout.tables.values.bit_operations
        rate = layout.machine.hardware.integer_operations_per_s
        return np.asarray(work / rate / layout.devices[layout.defined_axes])


class Transcendentals(LocalTerm):
    """Exponentials and the like, which are slow on the vector unit."""

    name, scope = "transcendentals", Entity.VALUE_CLASS

    def seconds(self, layout: LocalLayout) -> Floats:
        work = layout.tables.values.transcendentals
        rate = layout.machine.hardware.transcendentals_per_s
        return np.asarray(work / rate / layout.devices[layout.defined_axes])
