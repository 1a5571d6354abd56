"""Terms of kernels: products, custom calls, and kernels bound by memory or the vector unit."""

from __future__ import annotations

import numpy as np

from toast.cost.entities import Entity, Floats
from toast.cost.layout import Layout, LocalLayout, axes_of, slot_dims
from toast.cost.terms.term import LocalTerm, StepPart, Term
from toast.program import QUANTITIES


class ProductWork(LocalTerm):
    """Matrix products and convolutions: the larger of FLOPs over peak and bytes over bandwidth.

    The FLOPs include the padding to the tiles of the matrix unit.  Every product takes some
    microseconds besides, so small ones reach a small part of the peak.
    """

    name, scope, part = "products", Entity.PRODUCT, StepPart.PRODUCTS

    def seconds(self, layout: LocalLayout) -> Floats:
        t, op_class = layout.tables, layout.tables.products.op_class
        if not len(t.products):
            return np.zeros((len(layout.held), 0))
        held = np.take(layout.held, op_class, axis=1)
        shards = layout.devices[axes_of(held < t.slots.dim.shape[1] - 1)]
        flops = (t.ops.peak_seconds * t.ops.count)[op_class] / shards * self.padding(layout)
        dims = slot_dims(t, layout.held, t.tensors.slot)
        tensors = t.tensors.bytes / layout.devices[axes_of(dims >= 0)]
        first = np.flatnonzero(np.diff(t.tensors.product, prepend=-1))
        moved = np.add.reduceat(tensors, first, axis=1)
        moving = moved * t.ops.count[op_class] / layout.machine.hardware.memory_bytes_per_s
        latency = layout.machine.hardware.product_latency_s * t.ops.count[op_class]
        return np.asarray(np.maximum(flops, moving) + latency)

    def padding(self, layout: LocalLayout) -> Floats:
        """``[S, P]`` FLOPs with padding to tiles, over FLOPs without."""
        products = layout.tables.products
        held = np.take(layout.held, products.op_class, axis=1)
        size = np.broadcast_to(products.size, (len(held), *products.size.shape)).copy()
        rows = np.arange(len(products))
        for axis, devices in enumerate(layout.machine.axis_sizes.tolist()):
            group = products.group[rows, held[..., axis]]
            for side in range(3):
                size[..., side] /= np.where(group == side, devices, 1.0)
        size = np.maximum(size, 1.0)  # for products without elements
        tile = np.array(layout.machine.hardware.tile, dtype=np.float64)
        return np.asarray((np.ceil(size / tile) * tile / size).prod(axis=2))


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
        states, classes, _ = layout.held.shape
        work = np.zeros((len(QUANTITIES), states, classes))
        if not len(t.kernels):
            return np.zeros((states, classes))
        terms, tensors, every = t.kernels, t.kernel_tensors, np.arange(states)[:, None]
        held = np.take(layout.held, terms.op_class, axis=1)
        over = terms.over[np.arange(len(terms))[:, None], held]
        amount = terms.amount / layout.devices[axes_of(over)]
        for quantity in range(len(QUANTITIES)):
            rows = np.flatnonzero(terms.quantity == quantity)
            np.add.at(work[quantity], (every, terms.op_class[rows]), amount[:, rows])
        dims = slot_dims(t, layout.held, tensors.slot)
        moved = tensors.bytes / layout.devices[axes_of(dims >= 0)]
        np.add.at(work[QUANTITIES.index("bytes")], (every, tensors.op_class), moved)
        peaks = np.array([hardware.peak(dtype) for dtype in t.dtypes])
        flops, exponentials, all_bytes, _ = work
        alone = np.where(flops > 0, 0.0, exponentials / hardware.transcendentals_per_s)
        peak = peaks[t.ops.dtype] * np.where(exponentials > 0, hardware.attention_share, 1.0)
        beside = np.maximum(flops / peak, all_bytes / hardware.memory_bytes_per_s)
        return np.asarray(np.maximum(beside, alone) * t.ops.count)


class Writes(LocalTerm):
    """Values that memory-bound kernels write."""

    name, scope = "writes", Entity.VALUE_CLASS

    def seconds(self, layout: LocalLayout) -> Floats:
        values, rate = layout.tables.values, layout.machine.hardware.memory_bytes_per_s
        return np.asarray(layout.value_bytes * (values.written * values.count / rate))


class Reads(LocalTerm):
    """Values that memory-bound kernels read, by use."""

    name, scope = "reads", Entity.USE_CLASS

    def seconds(self, layout: LocalLayout) -> Floats:
        uses, rate = layout.tables.uses, layout.machine.hardware.memory_bytes_per_s
        return np.asarray(layout.use_bytes * (uses.reads / rate))


class HostTransfers(Term):
    """Values that move to the memory of the host or back.

    Copies are asynchronous: they take time only if they take longer than all the rest of a step.
    """

    name, scope, part = "host transfers", Entity.VALUE_CLASS, StepPart.HOST

    def seconds(self, layout: Layout) -> Floats:
        values, rate = layout.tables.values, layout.machine.hardware.host_bytes_per_s
        return np.asarray(layout.value_bytes * (values.transfers / rate))


class Transcendentals(LocalTerm):
    """Exponentials and the like, which are slow on the vector unit."""

    name, scope = "transcendentals", Entity.VALUE_CLASS

    def seconds(self, layout: LocalLayout) -> Floats:
        work = layout.tables.values.transcendentals
        rate = layout.machine.hardware.transcendentals_per_s
        return np.asarray(work / rate / layout.devices[layout.defined_axes])
