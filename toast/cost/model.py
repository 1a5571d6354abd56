"""Prices of batches of states: step time, collectives and peak memory (paper, section 4.5).

All arrays have a leading axis over states; there is no Python loop over ops, only over the few
mesh axes.  Step time is the sum of

* matrix products and convolutions, padded to the tiles of the matrix unit: the larger of FLOPs over
  peak and bytes over HBM bandwidth;
* memory-bound kernels: bytes that existing values are written and read, over HBM bandwidth, and
  exponentials and the like at the rate of the vector unit;
* collectives: where a value's definition and a use disagree on an axis (slice, all-gather or
  all-to-all), where an op reduces over a sharded factor (all-reduce, or reduce-scatter when all
  uses want the result sharded there), and where a permutation factor is sharded
  (collective-permute of its halo).

``overlap`` says what collectives cost beside that: with ``"none"`` all their time; with
``"partial"`` (the default) all-gathers, reduce-scatters and permutations are hidden behind products
that they neither wait for nor feed, each second of those behind one of these
(:mod:`toast.cost.overlap`), and the time of the step is that of its critical path, the gathers of
the first layer and the sums of activations; with ``"full"`` everything hides, as far as there are
products, which is a lower bound.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import typing
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import numpy.typing as npt

from toast.cost import store
from toast.cost.layout import Axes, Bools, Dims, Floats, Held, Layout, axes_of, lay_out, slot_dims
from toast.cost.prices import Prices, Worth, highest, joined
from toast.cost.tables import NEGLIGIBLE, Tables, build
from toast.cost.timeline import Timeline, columns
from toast.cost.transfers import (
    ALL_TO_ALL,
    REDUCE,
    SCATTER,
    UNROLLED,
    Moves,
    Timed,
    Transfer,
    moves,
    sent_in_parts,
    trades,
)
from toast.errors import SearchError
from toast.hardware import COLLECTIVES, Collectives, Hardware
from toast.space import Space, States

#: What runs beside products: no collective; those that hardware runs in the background, where
#: products are independent of them; all, as far as there are products.
Overlap = Literal["none", "partial", "full"]

#: Collectives in the background, as far as XLA goes: it waits for all-reduces and all-to-alls.
_BACKGROUND = frozenset({"all_gather", "reduce_scatter", "collective_permute"})

Ints = npt.NDArray[np.int64]

#: A product is summed whole where it takes less than this share of the transfer of its parts.
_SHORT = 0.4

#: Devices up to which XLA sums what gathers and scatters make in parts.
_FEW = 8

#: Threads that price a batch, and the states times value classes that are worth one.
_THREADS = min(4, os.cpu_count() or 1)
_WORTH = 25_000

#: Ways to shard a value that are looked at one by one.
_SPLITS = 2048

#: States priced at once on a thread: their arrays stay in its cache.
_BLOCK = 64

#: Axes of a mesh on which the lower bound takes a fraction of a second, of whatever program.
_QUICK_AXES = 3

#: Weight of the memory penalty in C(s) = RT(s) + MP(s): the constant C of section 4.5.
MEMORY_WEIGHT = 10.0


class CostModel:
    """Prices states of one decision space on one hardware."""

    def __init__(
        self,
        space: Space,
        hardware: Hardware,
        *,
        overlap: Overlap = "partial",
        like: CostModel | None = None,
        keep: bool = False,
    ) -> None:
        """``like`` is a model of the same program on another mesh; its tables are used again.

        ``keep`` keeps them on disk for the next time.
        """
        if overlap not in typing.get_args(Overlap):
            raise SearchError(f"overlap {overlap!r}: give one of none, partial and full")
        self.space = space
        self.overlap = overlap
        self.hardware = hardware
        alike = like is not None and like.hardware == hardware
        if like is not None and alike and space.same_classes(like.space):
            self.tables: Tables = like.tables
        else:
            made = store.tables if keep else build
            self.tables = made(space, product_operands=hardware.product_operands)
        self.collectives = Collectives(hardware, space.mesh)
        self._sizes: Floats = space.axis_sizes.astype(np.float64)
        #: Devices on each set of axes.
        self._devices: Floats = self.collectives.devices.astype(np.float64)
        peaks = np.array([
            hardware.peak(dtype) if matmul else np.inf
            for dtype, matmul in zip(self.tables.peak_dtype, self.tables.matmul, strict=True)
        ])  # fmt: skip
        self._flop_seconds: Floats = self.tables.flops / peaks * self.tables.count
        self._hbm = hardware.memory_bytes_per_s
        self._padded = self._may_be_padded()
        first = self.price(space.unsharded[None])
        self.initial_seconds = float(first.seconds[0])
        self.initial_peak = float(first.peak_bytes[0])

    def for_search(self) -> CostModel:
        """The model without the program: it prices states, and can be sent to a process."""
        _ = self.quick_bound  # of the program; kept from here on
        slim = copy.copy(self)
        slim.space = self.space.for_search()
        return slim

    def with_tables(self, tables: Tables, classes: Ints, values: Ints) -> CostModel:
        """The model of some op and value classes, with tables that speak of these only."""
        part = copy.copy(self)
        part.tables = tables
        part._flop_seconds = self._flop_seconds[classes]
        part._padded = self._padded[values]
        return part

    def layout(self, states: States) -> Layout:
        """Shardings of all value and use classes."""
        return lay_out(self.tables, self._devices, states, self.space.major, self.summed_whole)

    def _shards(self, dims: npt.NDArray[np.generic]) -> Floats:
        """Product over axes of the sizes of those that shard: ``[S, X]`` from ``[S, X, A]``."""
        return np.asarray(self._devices[axes_of(np.asarray(dims) >= 0)])

    # -- prices ------------------------------------------------------------------------------

    def price(self, states: States) -> Prices:
        """Price ``states``: ``[S, classes, axes]``; large batches on several threads.

        Many of one program are priced faster by :class:`toast.cost.Memo`.
        """
        # numpy lets go of the interpreter in large arrays only.
        worth = int(len(states) * len(self.tables.value_slot) / _WORTH)
        threads = max(1, min(_THREADS, worth))
        parts = np.array_split(states, max(threads, -(-len(states) // _BLOCK)))
        if threads < 2:
            return joined([self._price(part) for part in parts])
        with ThreadPoolExecutor(threads) as pool:
            return joined([*pool.map(self._price, parts)])

    def _price(self, states: States) -> Prices:
        t, layout = self.tables, self.layout(states)
        settled, used = self.sizes(layout)
        seconds, count, moved, sent, asked = self._collectives(layout, settled, used)
        kept = settled * (t.value_written * t.value_count)
        memory = (kept.sum(axis=1) + (used * t.use_reads).sum(axis=1)) / self._hbm
        memory += self.vector_seconds(layout).sum(axis=1)
        matmul = self.product_seconds(layout.held).sum(axis=1)
        hidden = self.hidden(matmul, seconds.sum(axis=1), asked)
        settled, used = self.in_memory(layout, settled, used)
        arguments = settled[:, t.argument_columns].sum(axis=1)
        columns = self.columns(layout, settled, used)
        growth = np.asarray(t.growth @ np.ascontiguousarray(columns.T)).T
        return Prices(
            seconds=matmul + memory + seconds.sum(axis=1) - hidden,
            matmul_seconds=matmul,
            memory_seconds=memory,
            collective_seconds=seconds,
            collective_count=count,
            collective_bytes=moved,
            sent_bytes=sent,
            hidden_seconds=hidden,
            peak_bytes=arguments + highest(growth),
            argument_bytes=arguments,
            output_bytes=used[:, t.result_columns].sum(axis=1),
        )

    def hidden(self, matmul: Floats, collectives: Floats, asked: Floats) -> Floats:
        """Seconds of collectives that products run beside: ``[S]``.

        ``matmul`` and ``collectives`` (``[S]``) are the seconds of all of them, ``asked``
        (``[S, G]``) those of what may be hidden in each window.
        """
        if self.overlap == "full":
            return np.minimum(collectives, matmul)
        if self.overlap == "partial":
            return self.tables.windows.hidden(asked, matmul)
        return np.zeros(len(matmul))

    def cost(self, prices: Prices | Worth, memory_bytes: float) -> Floats:
        """C(s) = RT(s) + MP(s), relative to the unsharded program (4.5): ``[S]``."""
        # A program that takes no time, or no memory, is as good as any other of its kind.
        tiny = np.finfo(np.float64).tiny
        time = (prices.seconds + tiny) / (self.initial_seconds + tiny)
        over = np.maximum(prices.peak_bytes - memory_bytes, 0.0) / max(self.initial_peak, 1.0)
        return np.asarray(time + MEMORY_WEIGHT * over)

    def sizes(self, layout: Layout) -> tuple[Floats, Floats]:
        """Bytes on a device of every value and of every use: ``[S, C]`` and ``[S, U]``."""
        t = self.tables
        share = np.where(layout.differs > 0, t.use_share, 1.0)
        used = t.value_bytes[t.use_value] * share / self._shards(layout.used)
        return t.value_bytes / self._shards(layout.settled), used

    def in_memory(self, layout: Layout, settled: Floats, used: Floats) -> tuple[Floats, Floats]:
        """Bytes that values and uses take with padding: ``[S, C]`` and ``[S, U]``.

        One dimension is padded to a multiple of the hardware's lanes: that for which it is least.
        """
        if not self._padded.any():
            return settled, used
        t, settled, used = self.tables, settled.copy(), used.copy()
        values = np.flatnonzero(self._padded)
        uses = np.flatnonzero(self._padded[t.use_value])
        settled[:, values] *= self.lane_padding(t.value_sizes[values], layout.settled[:, values])
        used[:, uses] *= self.lane_padding(t.value_sizes[t.use_value[uses]], layout.used[:, uses])
        return settled, used

    def lane_padding(self, sizes: Ints, dims: Dims) -> Floats:
        """Bytes in memory over bytes, of tensors sharded along ``dims``: ``[...]``.

        ``dims`` is ``[..., A]``, ``sizes`` (their elements, unsharded) ``[R]`` or ``[X, R]``.
        """
        lanes = self.hardware.lanes
        if lanes == 1:
            return np.ones(dims.shape[:-1])
        local = np.broadcast_to(sizes, (*dims.shape[:-1], sizes.shape[-1])).astype(np.float64)
        for axis, devices in enumerate(self._sizes.tolist()):
            here = dims[..., axis, None] == np.arange(sizes.shape[-1])
            local = np.where(here, local / devices, local)
        local = np.maximum(local, 1.0)
        return np.asarray((np.ceil(local / lanes) * lanes / local).min(axis=-1))

    def _may_be_padded(self) -> Bools:
        """Value classes that take more than their bytes where axes shard them in some way: ``[C]``.

        Of small ones, which shape no peak, that does not matter.
        """
        t = self.tables
        found = np.zeros(len(t.value_bytes), dtype=bool)
        large = np.flatnonzero(t.value_bytes > NEGLIGIBLE * (t.value_bytes * t.value_count).sum())
        if self.hardware.lanes == 1 or not len(large):
            return found
        sizes = t.value_sizes[large]
        if (sizes.shape[1] + 1) ** len(self._sizes) > _SPLITS:
            found[large] = True  # perhaps
            return found
        for split in itertools.product(range(-1, sizes.shape[1]), repeat=len(self._sizes)):
            dims = np.broadcast_to(np.array(split, dtype=np.int8), (1, len(large), len(split)))
            found[large] |= (self.lane_padding(sizes, dims) > 1)[0]
        return found

    def vector_seconds(self, layout: Layout) -> Floats:
        """Exponentials and the like, which the vector unit is slow at: ``[S, C]``."""
        work = self.tables.value_transcendentals / self.hardware.transcendentals_per_s
        return np.asarray(work / self._shards(layout.defined))

    def _padding(self, held: Held) -> Floats:
        """What the matrix unit computes over what is asked for: ``[S, P]``."""
        t = self.tables
        held = held[:, t.product_class]
        size = np.broadcast_to(t.product_size, (len(held), *t.product_size.shape)).copy()
        rows = np.arange(len(t.product_class))
        for axis, devices in enumerate(self._sizes.tolist()):
            group = t.product_group[rows, held[..., axis]]
            for part in range(3):
                size[..., part] /= np.where(group == part, devices, 1.0)
        size = np.maximum(size, 1.0)  # of a product without any elements
        tile = np.array(self.hardware.tile, dtype=np.float64)
        return np.asarray((np.ceil(size / tile) * tile / size).prod(axis=2))

    def product_seconds(self, held: Held) -> Floats:
        """Time of all products of each class in ``tables.product_class``: ``[S, P]``.

        ``held`` is as in :class:`Layout`.
        """
        t = self.tables
        if not len(t.tensor_slot):
            return np.zeros((len(held), 0))
        here = held[:, t.product_class]
        shards = self._devices[axes_of(here < t.slot_dim.shape[1] - 1)]
        flops = self._flop_seconds[t.product_class] / shards * self._padding(held)
        tensors = t.tensor_bytes / self._shards(slot_dims(t, held, t.tensor_slot))
        first = np.flatnonzero(np.r_[True, t.tensor_class[1:] != t.tensor_class[:-1]])
        moved = np.add.reduceat(tensors, first, axis=1)
        moving = moved * t.count[t.tensor_class[first]] / self._hbm
        return np.asarray(np.maximum(flops, moving))

    def _collectives(
        self, layout: Layout, settled: Floats, used: Floats
    ) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """Seconds, count and bytes by kind, ``[S, 5]``; bytes sent, ``[S]``; seconds by window."""
        seconds = np.zeros((len(settled), len(COLLECTIVES)))
        count = np.zeros_like(seconds)
        moved = np.zeros_like(seconds)
        sent = np.zeros(len(settled))
        beside = np.zeros_like(settled), np.zeros_like(used)  # seconds that may be hidden
        for timed in self.timed(layout, settled, used):
            move, kind, once = timed.move, timed.kind, timed.once
            times = timed.times * (1 - move.spared)
            seconds[:, kind] += (times * once).sum(axis=1)
            count[:, kind] += times.sum(axis=1)
            moved[:, kind] += (times * timed.result).sum(axis=1)
            share = self.collectives.sent_share(kind, move.axes)
            if kind == SCATTER:
                share = share * sent_in_parts(self.tables, self._devices, layout)
            sent += (times * share * move.size).sum(axis=1)
            if self.in_background(kind):
                beside[move.of_uses][:] += times * once
        return seconds, count, moved, sent, self.tables.windows.asked(*beside)

    def timed(self, layout: Layout, settled: Floats, used: Floats) -> Iterator[Timed]:
        """Every collective with its time, of all value classes or of all use classes at once."""
        of = self.tables, self._devices, layout, settled
        return self.timed_moves(itertools.chain(moves(*of, used), trades(*of)), layout)

    def timed_moves(self, moved: Iterable[Moves], layout: Layout) -> Iterator[Timed]:
        """:meth:`timed` of some of them."""
        for move in moved:
            happens = (move.axes > 0) * move.times
            parts = [(move.kind, happens, move.result)]
            if move.kind == SCATTER:
                parts = [(SCATTER, happens * ~layout.whole, move.result),
                         (REDUCE, happens * layout.whole, move.size)]  # fmt: skip
            for kind, times, result in parts:
                # Shards that trade places go anywhere, not only to neighbours.
                priced = (kind, ALL_TO_ALL) if move.places else (kind,)
                once = np.max(
                    [self.collectives.seconds(k, move.size, move.axes) for k in priced], axis=0
                )
                yield Timed(move, kind, priced, times, once, result)

    def most_hidden(self, timed: Timed, matmul: float) -> Floats:
        """What products hide of each collective at most, if all take ``matmul``: ``[S, X]``."""
        if not self.in_background(timed.kind):
            return np.zeros_like(timed.once)
        if self.overlap == "full":
            return timed.once
        windows = self.tables.windows
        free = windows.use_free if timed.move.of_uses else windows.value_free
        return np.asarray(np.minimum(timed.once, free * matmul))

    def in_background(self, kind: int) -> bool:
        """Whether products may run beside collectives of a kind."""
        if self.overlap == "partial":
            return COLLECTIVES[kind] in _BACKGROUND
        return self.overlap == "full"

    def lower_bound(self, memory_bytes: float | None = None) -> float:
        """Seconds that every legal state takes at least, in this mode of overlap.

        The roofline of :mod:`toast.cost.bound`: every op at its own best split, no collectives.
        Infinite where even the arguments cannot be in ``memory_bytes``: then there is no plan.
        """
        from toast.cost import bound

        if memory_bytes is not None and bound.least_argument_bytes(self) > memory_bytes:
            return math.inf
        return self._lower_bound

    @functools.cached_property
    def _lower_bound(self) -> float:
        from toast.cost import bound

        return bound.least_seconds(self)

    @functools.cached_property
    def quick_bound(self) -> float:
        """The lower bound, or 0 on a mesh of so many axes that it takes long to find."""
        few = (self.space.axis_sizes > 1).sum() <= _QUICK_AXES
        return self.lower_bound() if few else 0.0

    def summed_whole(self, axes: Axes, held: Held, settled: Dims) -> Bools:
        """Sums over ``axes`` that XLA does not take in parts: ``[S, C]``.

        Those of scatters and gathers over many devices, those scattered along several dimensions,
        and products that are too short to run beside the transfer of their parts.
        """
        t = self.tables
        k = t.slot_class[t.value_slot]
        if not axes.any():
            return np.zeros(axes.shape, dtype=bool)
        size = t.value_bytes / self._shards(settled) * self._devices[axes]
        shards = self._devices[axes_of(held < t.slot_dim.shape[1] - 1)]
        once = (self._flop_seconds / np.maximum(t.count, 1) / shards)[:, k]
        short = once < _SHORT * self.collectives.seconds(SCATTER, size, axes)
        short &= t.matmul[k] & (self._devices[axes] > UNROLLED)
        found = (t.summed_whole & (self._devices[axes] > _FEW)) | short
        for a, b in itertools.combinations(range(len(self._sizes)), 2):
            both = (axes >> np.uint8(a)) & (axes >> np.uint8(b)) & 1
            found |= (both > 0) & (settled[..., a] != settled[..., b])
        return np.asarray(found)

    def waiting(self, state: States) -> Floats:
        """Seconds that each op class has to do with under one state: ``[K]``.

        Those of its products beyond an even share of all devices, and of the collectives between
        its results and their uses, and before its own uses.
        """
        t, layout = self.tables, self.layout(state[None])
        seconds = np.zeros(len(t.count))
        even = self._flop_seconds / self._devices[-1]
        seconds[t.product_class] = self.product_seconds(layout.held)[0] - even[t.product_class]
        of_value = t.slot_class[t.value_slot]
        of_use = t.slot_class[t.use_slot]
        for timed in self.timed(layout, *self.sizes(layout)):
            spent = (timed.times * (1 - timed.move.spared) * timed.once)[0]
            if timed.move.of_uses:
                np.add.at(seconds, of_value[t.use_value], spent)
                np.add.at(seconds, of_use, spent)
            else:
                np.add.at(seconds, of_value, spent)
        return seconds

    def transfers(self, state: States) -> list[Transfer]:
        """Every collective of one state (``[classes, axes]``), by value and use class."""
        layout = self.layout(state[None])
        found = []
        for timed in self.timed(layout, *self.sizes(layout)):
            move = timed.move
            times = (timed.times * (1 - move.spared))[0]
            for x in np.flatnonzero(times).tolist():
                axes, size = self._names_of(move.axes[0, x]), float(move.size[0, x])
                best = max(
                    (self.collectives.cheapest(COLLECTIVES[k], size, axes) for k in timed.priced),
                    key=lambda line: line.seconds(size),
                )
                found.append(
                    Transfer(
                        kind=COLLECTIVES[timed.kind],
                        axes=axes,
                        bytes=float(timed.result[0, x]),
                        count=float(times[x]),
                        algorithm=best.name,
                        seconds=float(timed.once[0, x]),
                        edges=move.edges,
                    )
                )
        return found

    def reshards(self, state: States) -> Counter[tuple[str, tuple[str, ...], float]]:
        """How often each collective stands in the program under one state: ``[classes, axes]``.

        By kind, axes, and bytes as :data:`toast.hardware.COLLECTIVES` counts them, in the element
        types of the program: what Shardy makes explicit, before XLA merges or rounds any.  The
        partitioner adds exchanges of edges to ops, where Shardy sees no reshard.
        """
        layout = self.layout(state[None])
        found: Counter[tuple[str, tuple[str, ...], float]] = Counter()
        settled, used = self.sizes(layout)
        of = self.tables, self._devices, layout, settled
        for move in itertools.chain(moves(*of, used), trades(*of)):
            size = (move.size / move.rounded)[0]
            times = ((move.axes > 0) * move.times * (not move.edges))[0]
            for x in np.flatnonzero(times).tolist():
                key = COLLECTIVES[move.kind], self._names_of(move.axes[0, x]), float(size[x])
                found[key] += int(times[x])
        return found

    def _names_of(self, axes: np.uint8) -> tuple[str, ...]:
        names = self.space.mesh.names
        return tuple(name for a, name in enumerate(names) if int(axes) >> a & 1)

    def timeline(self, state: States) -> Timeline:
        """What is in memory when, under one state: ``[classes, axes]``."""
        t, layout = self.tables, self.layout(state[None])
        settled, used = self.in_memory(layout, *self.sizes(layout))
        arguments = float(settled[:, t.argument_columns].sum())
        return Timeline.of(t, self.columns(layout, settled, used)[0], arguments)

    def moments(self, state: States) -> Floats:
        """Bytes at each local peak of memory, in the order of ``tables.growth``: ``[moments]``."""
        t, layout = self.tables, self.layout(state[None])
        settled, used = self.in_memory(layout, *self.sizes(layout))
        columns = self.columns(layout, settled, used)[0]
        arguments = float(settled[:, t.argument_columns].sum())
        return np.asarray(arguments + np.cumsum(t.growth @ columns))

    def columns(self, layout: Layout, settled: Floats, used: Floats) -> Floats:
        """Bytes of every column of the timeline's events, from those :meth:`in_memory`."""
        return columns(self.tables, self._devices, layout, settled, used)
