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
import dataclasses
import itertools
import os
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from toast.cost.prices import Parts, Prices, joined
from toast.cost.tables import NEGLIGIBLE, Tables, build
from toast.cost.timeline import Timeline
from toast.errors import SearchError
from toast.hardware import COLLECTIVES, Collectives, Hardware
from toast.space import NONE, Space, States

#: What runs beside products: no collective; those that hardware runs in the background, where
#: products are independent of them; all, as far as there are products.
Overlap = Literal["none", "partial", "full"]

#: Collectives in the background, as far as XLA goes: it waits for all-reduces and all-to-alls.
_BACKGROUND = frozenset({"all_gather", "reduce_scatter", "collective_permute"})

T = TypeVar("T")
R = TypeVar("R")

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Dims = npt.NDArray[np.int8]
#: Sets of mesh axes: axis ``a`` is bit ``a``, as in :meth:`toast.hardware.Collectives.seconds`.
Axes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

_GATHER, _REDUCE, _SCATTER, _ALL_TO_ALL, _PERMUTE = range(5)

#: A product is summed whole where it takes less than this share of the transfer of its parts.
_SHORT = 0.4

#: Devices up to which XLA unrolls the loop of a product that is summed in parts.
_UNROLLED = 4

#: Devices up to which XLA sums what gathers and scatters make in parts.
_FEW = 8

#: Threads that price a batch, and the states times value classes that are worth one.
_THREADS = min(4, os.cpu_count() or 1)
_WORTH = 25_000

#: States priced at once on a thread: their arrays stay in its cache.
_BLOCK = 64

#: Weight of the memory penalty in C(s) = RT(s) + MP(s): the constant C of section 4.5.
MEMORY_WEIGHT = 10.0


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where every value is sharded, for ``S`` states: dimension per axis, or -1."""

    held: npt.NDArray[np.intp]  # [S, K, A] factor that holds each axis; F for none
    defined: Dims  # [S, C, A] as the op computes it
    settled: Dims  # [S, C, A] after a reduce-scatter
    used: Dims  # [S, U, A] as each use demands it
    partial: Axes  # [S, C] the op's result is a partial sum over these axes
    differs: Axes  # [S, U] axes on which a use sees another sharding than the definition's
    shared: Bools  # [S, U] an earlier use class already made the same copy
    scattered: Axes  # [S, C] axes of partial sums that are kept in parts
    whole: Bools  # [S, C] ... and that XLA sums whole nevertheless
    #: ``[S, A]`` how much each axis should be the major one where several shard one dimension.
    major: npt.NDArray[np.int64]

    def of(self, states: npt.NDArray[np.integer[typing.Any]]) -> Layout:
        """That of some states, in their order."""
        return Layout(*(getattr(self, f.name)[states] for f in dataclasses.fields(self)))


def _axes(condition: Bools) -> Axes:
    """``[S, X]`` sets of the axes for which ``[S, X, A]`` holds."""
    found = condition[..., 0].astype(np.uint8)
    for axis in range(1, condition.shape[-1]):
        found |= condition[..., axis].astype(np.uint8) << np.uint8(axis)
    return found


class _Moves(NamedTuple):
    """Collectives of one kind, of X value or use classes in S states."""

    kind: int
    axes: Axes  # [S, X]
    size: Floats  # [S, X] bytes as priced
    result: Floats  # [S, X] bytes of results
    times: Floats  # [S, X] how often, if there are axes
    spared: Floats | float = 0.0  # [S, X] or [X] the share of them that XLA does not need
    rounded: Floats | float = 1.0  # [X] bytes of an element over those in the program
    edges: bool = False
    #: Whether X are use classes, and whether shards change places for the order of axes.
    of_uses: bool = False
    places: bool = False


class Timed(NamedTuple):
    """The collectives of one kind: how often each happens, and what it takes."""

    move: _Moves
    kind: int
    priced: tuple[int, ...]  # kinds, of which the slowest is the price
    times: Floats  # [S, X] before any is spared
    once: Floats  # [S, X] seconds
    result: Floats  # [S, X] bytes of results


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Collectives that are alike, as XLA leaves them; all of them add up to a state's prices."""

    kind: str
    axes: tuple[str, ...]
    #: Of the result that a device holds after each.
    bytes: float
    #: In a step: of those that stand in the program, XLA merges some, and makes constants anew.
    count: float
    #: The cheapest that the links allow, and what one takes.
    algorithm: str
    seconds: float
    #: Whether shards exchange their edges (of a window, slice or pad).
    edges: bool = False


class CostModel:
    """Prices states of one decision space on one hardware."""

    def __init__(
        self,
        space: Space,
        hardware: Hardware,
        *,
        overlap: Overlap = "partial",
        like: CostModel | None = None,
    ) -> None:
        """``like`` is a model of the same program on another mesh; its tables are used again."""
        if overlap not in typing.get_args(Overlap):
            raise SearchError(f"overlap {overlap!r}: give one of none, partial and full")
        self.space = space
        self.overlap = overlap
        self.hardware = hardware
        #: Threads that price a large batch; prices do not depend on it.
        self.threads = _THREADS
        alike = like is not None and like.hardware == hardware
        if like is not None and alike and space.same_classes(like.space):
            self.tables: Tables = like.tables
        else:
            self.tables = build(space, product_operands=hardware.product_operands)
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

    def for_search(self, *, threads: int) -> CostModel:
        """The model without the program: it prices states, and can be sent to a process."""
        slim = copy.copy(self)
        slim.space = self.space.for_search()
        slim.threads = threads
        return slim

    def with_tables(self, tables: Tables, classes: Ints, values: Ints) -> CostModel:
        """The model of some op and value classes, with tables that speak of these only."""
        part = copy.copy(self)
        part.tables = tables
        part._flop_seconds = self._flop_seconds[classes]
        part._padded = self._padded[values]
        return part

    # -- layout ------------------------------------------------------------------------------

    def layout(self, states: States) -> Layout:
        """Shardings of all value and use classes."""
        t = self.tables
        factors = t.slot_dim.shape[1] - 1
        held = np.where(states < 0, factors, states).astype(np.intp)
        defined = self._slot_dims(held, t.value_slot)
        used = self._slot_dims(held, t.use_slot)
        value_class = t.slot_class[t.value_slot]
        flat = np.arange(len(t.value_slot))[:, None] * (factors + 1) + held[:, value_class]
        summed = t.reduces.ravel()[flat]
        settled = defined
        if summed.any():
            wanted = np.full(defined.shape, NONE, dtype=np.int8)
            if len(t.use_first):
                low = np.minimum.reduceat(used, t.use_first, axis=1)
                high = np.maximum.reduceat(used, t.use_first, axis=1)
                wanted[:, t.used_value] = np.where(low == high, low, NONE)
            settled = self._scattered(defined, np.where(summed, wanted, NONE))
        shared = np.zeros(used.shape[:2], dtype=bool)
        for later, earlier in t.pairs:
            shared[:, later] |= _axes(used[:, later] != used[:, earlier]) == 0
        major = self._major_axes(settled, used)
        partial, differs = _axes(summed), _axes(settled[:, t.use_value] != used)
        scattered = partial & _axes(settled >= 0)
        whole = self.summed_whole(scattered, held, settled)
        return Layout(
            held, defined, settled, used, partial, differs, shared, scattered, whole, major
        )

    def _major_axes(self, settled: Dims, used: Dims) -> npt.NDArray[np.int64]:
        """How often each axis stays while another of its dimension is gathered: ``[S, A]``.

        Where several axes shard one dimension their order decides what a gather costs: shards that
        stay must be the major ones, or they have to change places first.  One order holds for the
        whole program: only then are a sum's parts in the order that its scattered shards need.
        """
        t, axes = self.tables, range(len(self._sizes))
        if self.space.major is not None:
            return np.broadcast_to(self.space.major, (len(used), len(self._sizes)))
        before = settled[:, t.use_value]
        kept = np.zeros((len(used), len(self._sizes)), dtype=np.int64)
        for a, b in itertools.combinations(axes, 2):
            together = (before[..., a] == before[..., b]) & (before[..., a] >= 0)
            if together.any():
                stays_a, stays_b = (before[..., x] == used[..., x] for x in (a, b))
                kept[:, a] += (together & stays_a & ~stays_b) @ t.use_number
                kept[:, b] += (together & stays_b & ~stays_a) @ t.use_number
        return kept

    def _changes_places(self, layout: Layout, before: Dims, after: Dims) -> Axes:
        """Axes that must trade places along their dimension on the way from before to after.

        ``[S, X]``: an axis that comes or goes stands major to one that stays.
        """
        found = np.zeros(after.shape[:2], dtype=np.uint8)
        axes = range(len(self._sizes))
        for stay, move in itertools.permutations(axes, 2):
            rank = layout.major[:, move] - layout.major[:, stay]
            outside = (rank > 0 if move > stay else rank >= 0)[:, None]
            here = before[..., stay]
            stays = (here == after[..., stay]) & (here >= 0)
            moves = (before[..., move] == here) != (after[..., move] == here)
            trade = stays & moves & outside
            found |= trade * np.uint8(1 << stay | 1 << move)
        return found

    def _scattered(self, defined: Dims, wanted: Dims) -> Dims:
        """``defined`` with partial sums scattered where wanted, if the dimension has room."""
        settled = np.where(wanted >= 0, wanted, defined)
        sizes, rank = self.tables.value_sizes.ravel(), self.tables.value_sizes.shape[1]
        row = np.arange(len(self.tables.value_sizes)) * rank
        for axis in range(len(self._sizes)):
            asked = wanted[:, :, axis] >= 0
            if not asked.any():
                continue
            here = settled[:, :, axis]
            shards = self._devices[_axes(settled == here[:, :, None])]
            full = asked & (sizes[row + np.maximum(here, 0)] % shards != 0)
            settled[:, :, axis] = np.where(full, defined[:, :, axis], here)
        return settled

    def _slot_dims(self, held: npt.NDArray[np.intp], slots: npt.NDArray[np.int64]) -> Dims:
        table = self.tables.slot_dim
        flat = slots[:, None] * table.shape[1] + held[:, self.tables.slot_class[slots]]
        return np.asarray(table.ravel()[flat])

    def _shards(self, dims: npt.NDArray[np.generic]) -> Floats:
        """Product over axes of the sizes of those that shard: ``[S, X]`` from ``[S, X, A]``."""
        return np.asarray(self._devices[_axes(np.asarray(dims) >= 0)])

    # -- prices ------------------------------------------------------------------------------

    def price(self, states: States) -> Prices:
        """Price ``states``: ``[S, classes, axes]``; large batches on several threads.

        Those that differ from one state in little are priced faster by :class:`toast.cost.Near`.
        """
        work = len(states) * len(self.tables.value_slot)
        number = max(self.threads_for(work), -(-len(states) // _BLOCK))
        return joined(self.on_threads(self._price, np.array_split(states, number), work))

    def _price(self, states: States) -> Prices:
        return self.prices(self.parts(self.layout(states)))

    def parts(self, layout: Layout) -> Parts:
        """The sums over classes that prices are made of."""
        t = self.tables
        settled, used = self.sizes(layout)
        seconds, count, moved, sent, asked = self._collectives(layout, settled, used)
        kept = settled * (t.value_written * t.value_count)
        memory = (kept.sum(axis=1) + (used * t.use_reads).sum(axis=1)) / self._hbm
        settled, used = self.in_memory(layout, settled, used)
        columns = self.columns(layout, settled, used)
        return Parts(
            matmul_seconds=self.product_seconds(layout).sum(axis=1),
            memory_seconds=memory + self._vector_seconds(layout),
            seconds=seconds,
            times=count,
            moved_bytes=moved,
            sent_bytes=sent,
            asked=asked,
            argument_bytes=settled[:, t.argument_columns].sum(axis=1),
            output_bytes=used[:, t.result_columns].sum(axis=1),
            growth=np.asarray(t.growth @ np.ascontiguousarray(columns.T)).T,
        )

    def prices(self, parts: Parts) -> Prices:
        """Prices of their parts: what is hidden, and the worst moment of memory."""
        matmul = parts.matmul_seconds
        hidden = np.zeros(len(matmul))
        if self.overlap == "full":
            hidden = np.minimum(parts.seconds.sum(axis=1), matmul)
        elif self.overlap == "partial":
            hidden = self.tables.windows.hidden(parts.asked, matmul)
        live = np.cumsum(parts.growth, axis=1)
        spent = matmul + parts.memory_seconds + parts.seconds.sum(axis=1)
        return Prices(
            seconds=spent - hidden,
            matmul_seconds=matmul,
            memory_seconds=parts.memory_seconds,
            collective_seconds=parts.seconds,
            collective_count=parts.times,
            collective_bytes=parts.moved_bytes,
            sent_bytes=parts.sent_bytes,
            hidden_seconds=hidden,
            peak_bytes=parts.argument_bytes + np.maximum(live.max(axis=1, initial=0.0), 0.0),
            argument_bytes=parts.argument_bytes,
            output_bytes=parts.output_bytes,
        )

    def threads_for(self, work: float) -> int:
        """Threads that are worth it for ``work``: states times value classes.

        numpy lets go of the interpreter in large arrays only.
        """
        return max(1, min(self.threads, int(work / _WORTH)))

    def on_threads(self, price: Callable[[T], R], parts: Sequence[T], work: float) -> list[R]:
        """What ``price`` makes of each part, in order, on the threads that are worth it."""
        threads = min(len(parts), self.threads_for(work))
        if threads < 2:
            return [price(part) for part in parts]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(price, parts))

    def cost(self, prices: Prices, memory_bytes: float) -> Floats:
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
        for split in itertools.product(range(-1, sizes.shape[1]), repeat=len(self._sizes)):
            dims = np.broadcast_to(np.array(split, dtype=np.int8), (1, len(large), len(split)))
            found[large] |= (self.lane_padding(sizes, dims) > 1)[0]
        return found

    def _vector_seconds(self, layout: Layout) -> Floats:
        """Exponentials and the like, which the vector unit is slow at: ``[S]``."""
        work = self.tables.value_transcendentals / self.hardware.transcendentals_per_s
        return np.asarray((work / self._shards(layout.defined)).sum(axis=1))

    def _padding(self, layout: Layout) -> Floats:
        """What the matrix unit computes over what is asked for: ``[S, P]``."""
        t = self.tables
        held = layout.held[:, t.product_class]
        size = np.broadcast_to(t.product_size, (len(held), *t.product_size.shape)).copy()
        rows = np.arange(len(t.product_class))
        for axis, devices in enumerate(self._sizes.tolist()):
            group = t.product_group[rows, held[..., axis]]
            for part in range(3):
                size[..., part] /= np.where(group == part, devices, 1.0)
        size = np.maximum(size, 1.0)  # of a product without any elements
        tile = np.array(self.hardware.tile, dtype=np.float64)
        return np.asarray((np.ceil(size / tile) * tile / size).prod(axis=2))

    def product_seconds(self, layout: Layout) -> Floats:
        """Time of all products of each class in ``tables.product_class``: ``[S, P]``."""
        t = self.tables
        if not len(t.tensor_slot):
            return np.zeros((len(layout.held), 0))
        shards = self._shards(np.where(layout.held < t.slot_dim.shape[1] - 1, 0, NONE))
        flops = self._flop_seconds / shards
        flops[:, t.product_class] *= self._padding(layout)
        tensors = t.tensor_bytes / self._shards(self._slot_dims(layout.held, t.tensor_slot))
        first = np.flatnonzero(np.r_[True, t.tensor_class[1:] != t.tensor_class[:-1]])
        moved = np.add.reduceat(tensors, first, axis=1)
        classes = t.tensor_class[first]
        moving = moved * t.count[classes] / self._hbm
        return np.asarray(np.maximum(flops[:, classes], moving))

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
            if kind == _SCATTER:
                share = share * self._sent_in_parts(layout)
            sent += (times * share * move.size).sum(axis=1)
            if self._in_background(kind):
                beside[move.of_uses][:] += times * once
        return seconds, count, moved, sent, self.tables.windows.asked(*beside)

    def _sent_in_parts(self, layout: Layout) -> Floats:
        """Bytes that a device sends in sums in parts, over those sent round a ring: ``[S, C]``.

        Short loops of products are unrolled, with two sums on their way: over four devices there
        are five messages instead of three.  Where an axis as large is idle, a product is computed
        in parts along that; these are summed whole, and change places.
        """
        t, axes = self.tables, layout.scattered
        k = t.slot_class[t.value_slot]
        devices = self._devices[axes]
        found = np.where(t.matmul[k] & (devices == _UNROLLED), 5 / 3, 1.0)
        free = (layout.held == t.slot_dim.shape[1] - 1)[:, k]
        for axis, size in enumerate(self._sizes.tolist()):
            alike = np.flatnonzero(self._sizes == size)
            if size > _UNROLLED or len(alike) < 2:
                continue
            idle = (axes == 1 << axis) & free[..., alike].any(axis=2) & t.matmul[k]
            found = np.where(idle, (2 * (size - 1) / size + 1) / max(size - 1, 1), found)
        return found

    def timed(self, layout: Layout, settled: Floats, used: Floats) -> Iterator[Timed]:
        """Every collective with its time, of all value classes or of all use classes at once."""
        for move in self._transfers(layout, settled, used):
            happens = (move.axes > 0) * move.times
            parts = [(move.kind, happens, move.result)]
            if move.kind == _SCATTER:
                parts = [(_SCATTER, happens * ~layout.whole, move.result),
                         (_REDUCE, happens * layout.whole, move.size)]  # fmt: skip
            for kind, times, result in parts:
                # Shards that trade places go anywhere, not only to neighbours.
                priced = (kind, _ALL_TO_ALL) if move.places else (kind,)
                once = np.max(
                    [self.collectives.seconds(k, move.size, move.axes) for k in priced], axis=0
                )
                yield Timed(move, kind, priced, times, once, result)

    def most_hidden(self, timed: Timed, matmul: float) -> Floats:
        """What products hide of each collective at most, if all take ``matmul``: ``[S, X]``."""
        if not self._in_background(timed.kind):
            return np.zeros_like(timed.once)
        if self.overlap == "full":
            return timed.once
        windows = self.tables.windows
        free = windows.use_free if timed.move.of_uses else windows.value_free
        return np.asarray(np.minimum(timed.once, free * matmul))

    def _in_background(self, kind: int) -> bool:
        if self.overlap == "partial":
            return COLLECTIVES[kind] in _BACKGROUND
        return self.overlap == "full"

    def lower_bound(self, memory_bytes: float | None = None) -> float:
        """Seconds that every legal state takes at least, in this mode of overlap.

        The roofline of :mod:`toast.cost.bound`: every op at its own best split, no collectives.
        Infinite where even the arguments cannot be in ``memory_bytes``: then there is no plan.
        """
        from toast.cost import bound

        return bound.lower_bound(self, memory_bytes)

    def summed_whole(self, axes: Axes, held: npt.NDArray[np.intp], settled: Dims) -> Bools:
        """Sums over ``axes`` that XLA does not take in parts: ``[S, C]``.

        Those of scatters and gathers over many devices, those scattered along several dimensions,
        and products that are too short to run beside the transfer of their parts.
        """
        t = self.tables
        k = t.slot_class[t.value_slot]
        if not axes.any():
            return np.zeros(axes.shape, dtype=bool)
        size = t.value_bytes / self._shards(settled) * self._devices[axes]
        shards = self._devices[_axes(held < t.slot_dim.shape[1] - 1)]
        once = (self._flop_seconds / np.maximum(t.count, 1) / shards)[:, k]
        short = once < _SHORT * self.collectives.seconds(_SCATTER, size, axes)
        short &= t.matmul[k] & (self._devices[axes] > _UNROLLED)
        found = (t.summed_whole & (self._devices[axes] > _FEW)) | short
        for a, b in itertools.combinations(range(len(self._sizes)), 2):
            both = (axes >> np.uint8(a)) & (axes >> np.uint8(b)) & 1
            found |= (both > 0) & (settled[..., a] != settled[..., b])
        return np.asarray(found)

    def _transfers(self, layout: Layout, settled: Floats, used: Floats) -> Iterator[_Moves]:
        """What moves between devices, of all value classes or of all use classes at a time."""
        t = self.tables
        # Partial sums, where they are made.
        once_each = np.ones(settled.shape[:1] + (1,)) * t.value_count
        held, scattered = _axes(layout.settled >= 0), layout.scattered
        reduced = layout.partial & ~held
        whole = settled * self._devices[scattered]
        if scattered.any():
            spared = self._merged(scattered, True)
            yield _Moves(_SCATTER, scattered, whole, settled, once_each, spared)
        if reduced.any():
            spared = self._merged(reduced, False)
            yield _Moves(_REDUCE, reduced, settled, settled, once_each, spared)
        if scattered.any():
            places = self._changes_places(layout, layout.defined, layout.settled)
            places *= layout.partial > 0
            yield _Moves(_PERMUTE, places, settled, settled, once_each, places=True)
        # Definitions and uses that disagree.
        before = layout.settled[:, t.use_value]
        was, now = held[:, t.use_value], _axes(layout.used >= 0)
        gather, exchange, sliced = was & ~now, was & now & layout.differs, now & ~was
        times_used = t.use_count * ((layout.differs > 0) & ~layout.shared)
        local = settled[:, t.use_value] / self._devices[sliced] * t.use_share
        spared, rounded = t.use_constant, t.use_share

        def moves(kind: int, axes: Axes, size: Floats, result: Floats) -> _Moves:
            return _Moves(kind, axes, size, result, times_used, spared, rounded, of_uses=True)

        if exchange.any():
            yield moves(_ALL_TO_ALL, exchange, local, used)
        yield moves(_GATHER, gather, local * self._devices[gather], used)
        places = self._changes_places(layout, before, layout.used)
        if places.any():
            yield moves(_PERMUTE, places, local, local)._replace(places=True)
        # Sharded permutation factors exchange with neighbours.
        factors = t.slot_dim.shape[1]
        flat = np.arange(len(t.halo))[:, None] * factors + layout.held
        halo = t.halo.ravel()[flat]
        if halo.any():
            part = halo[:, t.slot_class[t.value_slot]]
            here = _axes(part > 0)
            shards = self._devices[here]
            furthest = part.max(axis=2)
            # A halo is never more than all other shards.
            shifted = np.where(np.isinf(furthest), 1.0, np.minimum(furthest * shards, shards))
            shifted *= settled
            yield _Moves(_PERMUTE, here, shifted, shifted, once_each, edges=True)

    def _merged(self, where: Axes, scattered: bool) -> Floats:
        """The share of each value class whose sums over devices wait for a common one."""
        t = self.tables
        found = np.zeros(where.shape)
        for later, earlier, share in zip(
            t.merge_class.tolist(), t.merge_with.tolist(), t.merge_share.tolist(), strict=True
        ):
            alike = where[:, later] == where[:, earlier]
            if scattered and t.summed_whole[later] != t.summed_whole[earlier]:
                continue
            found[:, later] += share * alike
        return found

    def waiting(self, state: States) -> Floats:
        """Seconds that each op class has to do with under one state: ``[K]``.

        Those of its products beyond an even share of all devices, and of the collectives between
        its results and their uses, and before its own uses.
        """
        t, layout = self.tables, self.layout(state[None])
        seconds = np.zeros(len(t.count))
        even = self._flop_seconds / self._devices[-1]
        seconds[t.product_class] = self.product_seconds(layout)[0] - even[t.product_class]
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
        for move in self._transfers(layout, *self.sizes(layout)):
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
        t, copies = self.tables, used * (layout.differs > 0)
        columns = [settled, copies]
        bridged = copies == 0  # or no copy to bridge to
        for later, earlier in t.pairs:
            same = _axes(layout.used[:, later] != layout.used[:, earlier]) == 0
            same &= ~bridged[:, later]
            bridged[:, later] |= same
            columns.append(np.where(same, copies[:, later], 0.0))
        rest, whole = self._devices[layout.scattered] - 1, layout.whole
        merged = t.value_merged & (layout.partial > 0)
        columns += [settled * (rest * whole), settled * merged]
        # A product that is summed in parts is a loop, whose operands are made before it begins;
        # a short one takes slices of those that have the dimension that is scattered.
        loops = (rest + 1 > _UNROLLED) & ~whole
        beside = np.zeros(settled.shape, dtype=bool)
        operand, result = t.product_operand, t.product_result
        if len(operand):
            made, sliced = np.arange(len(result)), np.zeros((len(settled), len(result)), dtype=bool)
            for axis in range(len(self._sizes)):
                here = (layout.scattered[:, result] >> np.uint8(axis)) & 1 > 0
                sliced |= here & t.product_along[made, layout.settled[:, result, axis]]
            needed = loops[:, result] | (sliced & ~whole[:, result])
            first = np.flatnonzero(np.diff(operand, prepend=-1))
            beside[:, operand[first]] = np.logical_or.reduceat(needed, first, axis=1)
        columns.append(settled * beside)
        return np.concatenate(columns, axis=1)
