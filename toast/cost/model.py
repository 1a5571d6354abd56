"""Prices of batches of states: step time, collectives and peak memory (paper, section 4.5).

A price is a sum of terms (:mod:`toast.cost.terms`): products, memory-bound kernels, collectives,
buffers.  All arrays have a leading axis over states; Python loops run only over terms and mesh
axes.

``overlap`` selects which collectives products hide, second for second: with ``"none"``, none; with
``"partial"`` (the default), those that the compiler runs in the background on this hardware, behind
independent products (:mod:`toast.cost.overlap`).  Flags of the compiler put more there: all-gathers
with ``"gathers"``, also sums with ``"asynchronous"``.  With ``"full"``, products hide all
collectives.  In these three modes, scattered sums of products are not computed in loops.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Self

import numpy as np

from toast.cost import bound, gathering, table_cache
from toast.cost.axis_sets import PERMUTE, axis_numbers
from toast.cost.entities import OP_SCOPES, Bools, Entity, Floats, Ints
from toast.cost.error_bars import ErrorBars, Number, at_ratio, made_of
from toast.cost.joint_sums import JointSum, PartialSums
from toast.cost.layout import ExactLayout, Held, Layout, LocalLayout, held_by
from toast.cost.machine import Machine
from toast.cost.policy_tables import PolicyTables, policy_tables
from toast.cost.prices import Prices, Transfer, Worth, highest, joined
from toast.cost.program_loops import loops_of
from toast.cost.random_bits import CONSTANT_ARRAYS, recomputed_bits
from toast.cost.region_collectives import stated_collectives
from toast.cost.sliding_windows import EXCHANGING, exchanges
from toast.cost.tables import Tables
from toast.cost.terms import (
    DEFAULT_TERMS,
    LOCAL_TERMS,
    ConditionGathers,
    LocalTerm,
    OrderedTerm,
    Reshards,
    StepPart,
    Term,
    Traffic,
    UsePlaces,
    check,
)
from toast.cost.timeline import Timeline
from toast.errors import SearchError
from toast.hardware import ASYNCHRONOUS, COLLECTIVES, Collectives, Hardware
from toast.records import uncached_copy
from toast.space import Space, States

#: Collectives that run beside products: none; those that the compiler runs in the background by
#: default, beside independent products; all-gathers, or also sums, as flags tell it to; all, as far
#: as there are products.
Overlap = Literal["none", "partial", "gathers", "asynchronous", "full"]

#: Collectives that flags for all-gathers put into the background.
_GATHERS = ("all_gather", "collective_permute")

#: Maximum number of threads for a batch, and the states times value classes that justify one.
_THREADS = min(4, os.cpu_count() or 1)
_WORTH = 25_000

#: States that a thread prices at once: their arrays stay in its cache.
_BLOCK = 64

#: Axes of a mesh up to which the lower bound takes a fraction of a second, for any program.
_QUICK_AXES = 3

#: Labels of collectives that the partitioner does not insert as reshards.
_NOT_RESHARDS = ("edges", "manual", "condition")

#: Terms with the collectives of a partial sum.
_OF_SUMS = ("sums", "places of sums")

#: Weight of the memory penalty in C(s) = RT(s) + MP(s): the constant C of section 4.5.
MEMORY_WEIGHT = 10.0


class CostModel:
    """Prices states of one decision space on one hardware."""

    #: Whether a few states may be priced without a memo.
    priced_alone = True

    def __init__(
        self,
        space: Space,
        hardware: Hardware,
        *,
        overlap: Overlap = "partial",
        terms: Sequence[Term] | None = None,
        like: CostModel | None = None,
        keep: bool = False,
        loops: bool | None = None,
        safety: float | None = None,
    ) -> None:
        """A model of ``space`` on ``hardware``.

        ``terms`` are the summands of a price, each with a name of its own; by default, those of
        the form that is run: annotated (``DEFAULT_TERMS``) or device-local (``LOCAL_TERMS``).
        ``like`` is a model of the same program on another mesh; its tables are used again.
        ``keep`` caches tables on disk.  ``loops`` is whether to price the device-local program, in
        which products whose operands are gathered, or whose results are scattered, may be computed
        shard by shard beside permutes; by default, if TOAST lowers the program itself.
        ``safety`` are the odds with which a plan must fit (:meth:`needed_bytes`); by default, its
        predicted peak must.  Raises :class:`toast.errors.SearchError` for an unknown ``overlap``,
        ``ValueError`` for invalid terms.
        """
        if overlap not in typing.get_args(Overlap):
            raise SearchError(
                f"overlap {overlap!r}: use none, partial, gathers, asynchronous or full"
            )
        self.space = space
        self.overlap = overlap
        self.hardware = hardware
        local = space.analysis.lowering == "local" if loops is None else loops
        #: Whether XLA partitions the program; TOAST lowers others to those of one device.
        self.partitioned = not local
        default = LOCAL_TERMS if local else DEFAULT_TERMS
        self.terms = tuple(default if terms is None else terms)
        check(self.terms)
        collectives, estimated = (
            Collectives(each, space.mesh) for each in (hardware, hardware.as_compiled_for)
        )
        background = {
            "none": (), "partial": hardware.background,
            "gathers": (*hardware.background, *_GATHERS),
            "asynchronous": (*hardware.background, *ASYNCHRONOUS, "all_reduce"),
            "full": COLLECTIVES,
        }[overlap]  # fmt: skip
        sizes = space.axis_sizes.astype(np.float64)
        # Recipes with such flags turn off loops of products, or have too many devices for them.
        self.machine = Machine(
            hardware, collectives, estimated, sizes, frozenset(background),
            parts_products=overlap in ("none", "partial"),
            early_gathers=hardware.early_gathers if overlap == "partial" else (1.0, 1.0),
        )  # fmt: skip
        #: Without overlap, loops have no use; with all of it, gathers take no time either.
        self.loops = local and overlap not in ("none", "full")
        alike = (
            like is not None
            and (like.hardware, like.terms, like.loops, like.partitioned)
            == (hardware, self.terms, self.loops, self.partitioned)
        )  # fmt: skip
        if like is not None and alike and space.same_classes(like.space):
            tables = like.tables
        else:
            tables = self._gathered(space, keep=keep)
        self.tables: Tables = self.machine.tables(tables, *stated_collectives(space, tables))
        self.machine = dataclasses.replace(self.machine, part_of_results=self._part_of_results())
        first = self.price(space.unsharded[None])
        self.initial_seconds = float(first.seconds[0])
        self.initial_peak = float(first.peak_bytes[0])
        self._unsharded = first
        #: The odds with which a plan must fit, if any.
        self.safety = safety
        self._factor = 1.0 if safety is None else self.error_bars.factor(safety)

    def _gathered(self, space: Space, *, keep: bool = False) -> Tables:
        """The tables of a space, without what depends on the hardware; ``keep`` caches them."""
        # Only tables of our own terms are cached.
        own = self.terms in (DEFAULT_TERMS, LOCAL_TERMS)
        gather = table_cache.tables if keep and own else gathering.build
        hardware = self.hardware
        return gather(
            space,
            self.terms,
            product_operands=hardware.product_operands,
            grouped_operands=hardware.grouped_operands,
            lanes=hardware.lanes,
            vector_bytes=hardware.vector_bytes,
            relayout_bytes=hardware.relayout_bytes,
            flops_beside=hardware.flops_beside_integers,
            elements_beside=hardware.integers_beside_elements,
            loops=self.loops,
            partitioned=self.partitioned,
            delays=hardware.lanes > 1 and "all_gather" in hardware.background,
            recomputes_images=hardware.recomputes_images,
        )

    def _part_of_results(self) -> float:
        """Results that overwrite no argument, over all memory beside arguments, unsharded.

        Other states, and other forms of the program (:meth:`of_program`), have a similar share.
        """
        program = self.space.analysis.program
        new = {
            value for value, alias in zip(program.result_values, program.aliases, strict=True)
            if alias < 0
        }  # fmt: skip
        size = sum(program.value_bytes[v] for v in new - {*program.argument_values})
        most = float(highest(self._growth(self.layout(self.space.unsharded[None])))[0])
        return min(size / most, 1.0) if most else 0.0

    def _growth(self, layout: Layout) -> Floats:
        """``[S, moments]`` how the memory beside arguments grows from one moment to the next."""
        return np.asarray(self.tables.growth @ np.ascontiguousarray(self.columns(layout).T)).T

    def of_program(self, space: Space) -> CostModel:
        """Prices of the states of another program on the same mesh, relative to this one."""
        other = uncached_copy(self)
        other.space = space
        tables = self._gathered(space)
        other.tables = self.machine.tables(tables, *stated_collectives(space, tables))
        return other

    def for_search(self) -> Self:
        """A copy without the program, which prices states and can be sent to a process."""
        _ = self.quick_bound  # computed now, because it needs the program
        slim = copy.copy(self)
        slim.space = self.space.for_search()
        return slim

    def layout(self, states: States) -> Layout:
        """Shardings of all value and use classes in ``states``: ``[S, classes, axes]``."""
        held = held_by(self.tables, states)
        return Layout(self.tables, self.machine, held, self.space.major)

    def exact_layout(self, state: States) -> ExactLayout:
        """:meth:`layout` of one state (``[classes, axes]``), with all copies that uses share."""
        held = held_by(self.tables, state[None])
        return ExactLayout(self.tables, self.machine, held, self.space.major)

    @functools.cached_property
    def policies(self) -> PolicyTables:
        """The tables of the policies of a survey."""
        return policy_tables(self.space, self.tables, self.hardware.lanes)

    # -- prices ------------------------------------------------------------------------------

    def price(self, states: States) -> Prices:
        """Price ``states`` (``[S, classes, axes]``); large batches on several threads.

        :class:`toast.cost.Memo` prices many states of one program faster.
        """
        # numpy releases the interpreter lock for large arrays only.
        worth = int(len(states) * len(self.tables.values) / _WORTH)
        threads = max(1, min(_THREADS, worth))
        parts = np.array_split(states, max(threads, -(-len(states) // _BLOCK)))
        if threads < 2:
            return joined([self._price(part) for part in parts])
        with ThreadPoolExecutor(threads) as pool:
            return joined([*pool.map(self._price, parts)])

    def _price(self, states: States) -> Prices:
        layout = self.layout(states)
        parts = np.zeros((len(StepPart), len(states)))
        for term, spent in self.work(layout):
            parts[term.part] += spent.sum(axis=1)
        seconds, count, moved = np.zeros((3, len(states), len(COLLECTIVES)))
        sent = np.zeros(len(states))
        asked = np.zeros((len(states), len(self.tables.windows.room)))
        for traffic in self.traffic(layout):
            spent = traffic.seconds
            seconds[:, traffic.kind] += spent.sum(axis=1)
            count[:, traffic.kind] += traffic.count.sum(axis=1)
            moved[:, traffic.kind] += (traffic.count * traffic.result).sum(axis=1)
            sent += traffic.sent.sum(axis=1)
            if self.in_background(traffic):
                early = spent * self.early_share(traffic)
                asked += self.tables.windows.asked(
                    traffic.term.scope, early, beside_op=traffic.term.beside_op
                )
        hidden = self.hidden(parts[StepPart.PRODUCTS], seconds.sum(axis=1), asked)
        arguments = self.resident(layout)
        growth = self._growth(layout)
        busy, waiting = self.step_seconds(parts, seconds.sum(axis=1), hidden)
        return Prices(
            seconds=busy + waiting,
            matmul_seconds=parts[StepPart.PRODUCTS],
            memory_seconds=parts[StepPart.MEMORY] + waiting,
            collective_seconds=seconds,
            collective_count=count,
            collective_bytes=moved,
            sent_bytes=sent,
            hidden_seconds=hidden,
            peak_bytes=arguments + self.machine.in_memory(highest(growth)),
            argument_bytes=arguments,
            output_bytes=layout.use_memory[:, self.tables.results].sum(axis=1),
            constant_bytes=self._constant_bytes(layout),
        )

    def _constant_bytes(self, layout: Layout) -> Floats:
        """``[S]`` bytes of the constants that XLA may write for random bits."""
        bits = self._recomputed_bits
        if self.hardware.lanes == 1 or not len(bits):
            return np.zeros(len(layout.held))
        return np.asarray(CONSTANT_ARRAYS * layout.value_bytes[:, bits].max(axis=1))

    @functools.cached_property
    def _recomputed_bits(self) -> Ints:
        """The value classes of random bits that a backward pass computes again."""
        bits = recomputed_bits(self.space.analysis.program)
        return np.unique(self.tables.value_class[bits])

    def cost(self, prices: Prices | Worth, memory_bytes: float) -> Floats:
        """C(s) = RT(s) + MP(s), relative to the unsharded program (4.5): ``[S]``."""
        # Programs without time or memory must not divide by zero.
        tiny = np.finfo(np.float64).tiny
        time = (prices.seconds + tiny) / (self.initial_seconds + tiny)
        needed = self.needed_bytes(prices.argument_bytes, prices.peak_bytes)
        over = np.maximum(needed - memory_bytes, 0.0) / max(self.initial_peak, 1.0)
        return np.asarray(time + MEMORY_WEIGHT * over)

    # -- error bars ------------------------------------------------------------------------------

    @functools.cached_property
    def made_of(self) -> dict[str, float]:
        """What the program is made of: shares of :data:`toast.cost.error_bars.MADE_OF`."""
        seconds = np.zeros(len(self.tables.ops))
        for term, spent in self.work(self.layout(self.space.unsharded[None])):
            np.add.at(seconds, self.tables.op_class(term.scope), spent[0])
        program, one = self.space.analysis.program, self.space.classes.representative
        return made_of(program, one, seconds, self._unsharded)

    @functools.cached_property
    def error_bars(self) -> ErrorBars:
        """How far predictions for this program may be off."""
        return ErrorBars.of(self.made_of, self.hardware.platform)

    def fits(self, prices: Prices | Worth, memory_bytes: float) -> Bools:
        """Whether states fit in ``memory_bytes``, with the odds :attr:`safety` if it is set."""
        needed = self.needed_bytes(prices.argument_bytes, prices.peak_bytes)
        return np.asarray(needed <= memory_bytes)

    def needed_bytes(self, argument_bytes: Number, peak_bytes: Number) -> Number:
        """The memory to compare with the limit, of one state or of ``[S]``.

        It is the predicted peak; with :attr:`safety`, what XLA needs at most with these odds.
        """
        if self._factor == 1.0:
            return peak_bytes
        return at_ratio(argument_bytes, peak_bytes, self._factor)

    # -- terms -------------------------------------------------------------------------------

    def work(self, layout: Layout, *, least: bool = False) -> Iterator[tuple[Term, Floats]]:
        """Terms with their seconds without collectives, or the ``least``: ``[S, entities]``."""
        for term in self.terms:
            seconds = term.least_seconds(layout) if least else term.seconds(layout)
            if seconds is not None:
                yield term, seconds

    def traffic(self, layout: Layout, *, ordered: bool | None = None) -> Iterator[Traffic]:
        """Collectives; with ``ordered``, only those that depend on the axes' order, or do not."""
        for term in self.terms:
            if ordered in (None, isinstance(term, OrderedTerm)):
                yield from term.traffic(layout)

    def op_work(self, held: Held, *, least: bool = False) -> Iterator[tuple[Term, Floats]]:
        """:meth:`work` of the terms of op classes.

        The ``least`` seconds depend on each op class alone.
        """
        layout = LocalLayout(self.tables, self.machine, held)
        for term in self.terms:
            if term.scope in OP_SCOPES and isinstance(term, LocalTerm):
                yield term, term.least_seconds(layout) if least else term.seconds(layout)

    def resident(self, layout: Layout) -> Floats:
        """Bytes that are in memory during the whole step, captured arrays included: ``[S]``."""
        size = (term.bytes(layout).sum(axis=1) for term in self.terms if term.resident)
        return np.asarray(sum(size, start=np.full(len(layout.held), self.captured_bytes)))

    @functools.cached_property
    def captured_bytes(self) -> float:
        """Bytes of the arrays that the function closes over, which every device holds whole."""
        size = float(sum(self.space.analysis.program.captured.values()))
        return size / self.hardware.allocator_efficiency

    @functools.cached_property
    def buffers(self) -> tuple[Term, ...]:
        """The terms of the timeline's blocks of columns, in order."""
        return tuple(term for term in self.terms if term.name in self.tables.columns.names)

    def columns(self, layout: Layout) -> Floats:
        """Bytes of every column of the timeline: ``[S, columns]``."""
        blocks = [np.zeros((len(layout.held), 0)), *(term.bytes(layout) for term in self.buffers)]
        return np.concatenate(blocks, axis=1)

    # -- collectives beside products ---------------------------------------------------------

    def in_background(self, traffic: Traffic) -> bool:
        """Whether products may run beside collectives."""
        kind = PERMUTE if traffic.in_loops else traffic.kind
        return COLLECTIVES[kind] in self.machine.background

    def early_share(self, traffic: Traffic) -> Floats | float:
        """``[X]`` the share of collectives that start early enough for products beside them.

        Flags of the compiler make it start all gathers early.  Those that a program states itself,
        of value classes, count as early, too.
        """
        gather = COLLECTIVES[traffic.kind] == "all_gather" and not traffic.in_loops
        if traffic.term.scope is not Entity.USE_CLASS or not gather:
            return 1.0
        arguments, later = self.machine.early_gathers
        return np.asarray(np.where(traffic.layout.tables.uses.after_product, later, arguments))

    def hidden(
        self,
        products: Floats,
        collectives: Floats,
        asked: Floats,
        share: Floats | float = 1.0,
    ) -> Floats:
        """Seconds of collectives that products hide: ``[S]``.

        ``products`` and ``collectives`` (``[S]``) are the seconds of all of them; ``asked`` is
        those that may be hidden in each window (``[S, G]``).  ``share`` is as for
        :meth:`toast.cost.overlap.Windows.hidden`.
        """
        if self.overlap == "full":
            return np.minimum(collectives, products)
        saved = self.hardware.overlap_efficiency
        return np.asarray(saved * self.tables.windows.hidden(asked, products, share))

    @staticmethod
    def step_seconds(parts: Floats, collectives: Floats, hidden: Floats) -> tuple[Floats, Floats]:
        """``[S]`` seconds in which a device is busy, and in which it waits for the host.

        Transfers to the host and back run beside everything else.  ``parts`` is ``[parts, S]``;
        the others are ``[S]`` seconds of collectives, and of those that products hide.
        """
        busy = parts[: StepPart.HOST].sum(axis=0) + collectives - hidden
        return busy, np.maximum(parts[StepPart.HOST] - busy, 0.0)

    def most_hidden(self, traffic: Traffic, products: float) -> Floats:
        """``[S, X]`` the most of each collective that ``products`` seconds of products hide."""
        if not self.in_background(traffic):
            return np.zeros_like(traffic.once)
        if self.overlap == "full":
            return traffic.once
        if traffic.term.beside_op:
            return np.asarray(np.minimum(traffic.once, products))
        t = traffic.layout.tables
        free = t.uses.free if traffic.term.scope is Entity.USE_CLASS else t.values.free
        saved = self.hardware.overlap_efficiency
        return np.asarray(saved * np.minimum(traffic.once, free * products))

    # -- bounds ------------------------------------------------------------------------------

    def lower_bound(self, memory_bytes: float | None = None) -> float:
        """Seconds that every legal state takes at least, in this mode of overlap.

        The roofline of :mod:`toast.cost.bound`: every op at its best split, without collectives.
        Infinite if even the arguments do not fit in ``memory_bytes``: then there is no plan.
        """
        if memory_bytes is not None:
            least = bound.least_argument_bytes(self.tables, self.machine, self.space.choices)
            if least > memory_bytes:
                return math.inf
        return self._lower_bound

    @functools.cached_property
    def _lower_bound(self) -> float:
        return sum(float(seconds.min()) for seconds in self.class_seconds())

    def class_seconds(self) -> list[Floats]:
        """``[classes][choices]`` the least seconds of each choice of an op class."""
        return bound.class_seconds(self.tables, self.machine, self.terms, self.space.choices)

    @functools.cached_property
    def quick_bound(self) -> float:
        """The lower bound; 0 on a mesh with so many axes that computing it takes long."""
        few = (self.space.axis_sizes > 1).sum() <= _QUICK_AXES
        return self.lower_bound() if few else 0.0

    # -- one state ---------------------------------------------------------------------------

    def waiting(self, state: States) -> Floats:
        """``[K]`` seconds that each op class may save, under one state (``[classes, axes]``).

        Those of its products beyond an even share of all devices, and those of the collectives
        before its own uses and between its results and their uses.
        """
        t, layout = self.tables, self.layout(state[None])
        seconds: Floats = -t.ops.peak_seconds * t.ops.count / self.machine.devices[-1]
        for term, spent in self.op_work(layout.held):
            np.add.at(seconds, t.op_class(term.scope), spent[0])
        for traffic in self.traffic(layout):
            spent = traffic.seconds[0]
            np.add.at(seconds, t.op_class(traffic.term.scope), spent)
            if traffic.term.scope is Entity.USE_CLASS:
                np.add.at(seconds, t.op_class(Entity.VALUE_CLASS)[t.uses.value], spent)
        return seconds

    def transfers(self, state: States) -> list[Transfer]:
        """Every collective of one state (``[classes, axes]``), by value and use class."""
        transfers = []
        for traffic in self.traffic(self.layout(state[None])):
            for x in np.flatnonzero(traffic.count[0]).tolist():
                axes, size = self.axis_names(traffic.axes[0, x]), float(traffic.size[0, x])
                links = self.machine.collectives
                best = max(
                    (links.cheapest(COLLECTIVES[kind], size, axes) for kind in traffic.kinds),
                    key=lambda line: line.seconds(size),
                )
                transfers.append(
                    Transfer(
                        kind=COLLECTIVES[traffic.kind],
                        axes=axes,
                        bytes=float(traffic.result[0, x]),
                        count=float(traffic.count[0, x]),
                        algorithm=best.name,
                        seconds=float(traffic.once[0, x]),
                        edges=traffic.term.label == "edges",
                    )
                )
        return transfers

    def reshards(self, state: States) -> Counter[tuple[str, tuple[str, ...], float]]:
        """How often each collective occurs in the program under one state (``[classes, axes]``).

        By kind, axes, and bytes as :data:`toast.hardware.COLLECTIVES` counts them, in the element
        types of the program: as Shardy inserts them, before XLA merges or rounds any.  Exchanges of
        edges are not counted: the partitioner adds them to ops.  Nor are the collectives that the
        program states itself.
        """
        moved = self._stated(self.exact_layout(state))
        return self._counted(each for each in moved if each.term.label not in _NOT_RESHARDS)

    def _stated(self, layout: Layout) -> Iterator[Traffic]:
        """The collectives of the program."""
        for term in self.terms:
            yield from term.stated(layout)

    def _counted(self, moved: Iterable[Traffic]) -> Counter[tuple[str, tuple[str, ...], float]]:
        number: Counter[tuple[str, tuple[str, ...], float]] = Counter()
        for traffic in moved:
            kind = COLLECTIVES[traffic.kind if traffic.stated is None else traffic.stated]
            size = (traffic.size / traffic.rounded)[0]
            # XLA shards no empty arrays.
            times = ((traffic.axes > 0) * (traffic.size > 0) * traffic.times)[0]
            for x in np.flatnonzero(times).tolist():
                number[kind, self.axis_names(traffic.axes[0, x]), float(size[x])] += int(times[x])
        return number

    def joint_sums(self, state: States) -> tuple[JointSum, ...]:
        """The partial sums that a device-local program adds up first, in one state."""
        return tuple(PartialSums(self.space, self.tables).of(self.exact_layout(state)))

    def local_collectives(self, state: States) -> Counter[tuple[str, tuple[str, ...], float]]:
        """How often each collective occurs in the device-local program of one state, as planned.

        By kind, axes and bytes: those of :meth:`reshards` and of :meth:`edges`, and the gathers for
        conditions of loops.
        """
        if self is not self._of_local_loops:
            return self._of_local_loops.local_collectives(state)
        conditions = self._counted(ConditionGathers().traffic(self.layout(state[None])))
        counts = self.reshards(state)
        joint = self.joint_sums(state)
        counts.subtract(self._of_constants(state))
        counts.subtract(self._spared_sums(state, joint))
        counts.update(self._further_sums(state, joint))
        return +counts + self.edges(state) + conditions

    @functools.cached_property
    def _of_local_loops(self) -> CostModel:
        """Prices of device-local programs: XLA moves none of their collectives out of loops."""
        if not self.partitioned or not loops_of(self.space.analysis.program):
            return self
        other = uncached_copy(self)
        other.partitioned = False
        tables = other._gathered(self.space)
        other.tables = self.machine.tables(tables, *stated_collectives(self.space, tables))
        return other

    def _of_constants(self, state: States) -> Counter[tuple[str, tuple[str, ...], float]]:
        """How often each collective is left out, because devices compute its value anew."""
        remade = self.tables.values.remade[self.tables.uses.value]
        return self._counted(
            dataclasses.replace(traffic, times=traffic.times * remade)
            for traffic in self._stated(self.exact_layout(state))
            if isinstance(traffic.term, Reshards | UsePlaces)
        )

    def _spared_sums(
        self, state: States, joint_sums: Sequence[JointSum]
    ) -> Counter[tuple[str, tuple[str, ...], float]]:
        """How often each collective of a sum is left out, because it waits for a common one."""
        program, left_out = self.space.analysis.program, np.zeros(len(self.tables.values))
        for joint in joint_sums:
            for value in joint.spared:
                left_out[self.tables.value_class[value]] += program.repeats[
                    program.values[value].op
                ]
        if not left_out.any():
            return Counter()
        return self._counted(
            dataclasses.replace(traffic, times=np.minimum(left_out, traffic.times))
            for traffic in self._stated(self.exact_layout(state))
            if traffic.term.name in _OF_SUMS
        )

    def _further_sums(
        self, state: States, joint_sums: Sequence[JointSum]
    ) -> Counter[tuple[str, tuple[str, ...], float]]:
        """The all-reduces of totals over more axes than those over which their ops sum.

        Those over fewer axes, which they replace, are negative.
        """
        program, names = self.space.analysis.program, self.space.mesh.names
        layout = self.exact_layout(state)
        counts: Counter[tuple[str, tuple[str, ...], float]] = Counter()
        for joint in joint_sums:
            number = self.tables.value_class[joint.value]
            size = float(layout.value_bytes[0, number])
            own = self.axis_names(int((layout.partial & ~layout.settled_axes)[0, number]))
            times = program.repeats[program.values[joint.value].op]
            if joint.further and size:
                both = tuple(axis for axis in names if axis in own or axis in joint.further)
                counts["all_reduce", both, size] += times
                if own:
                    counts["all_reduce", own, size] -= times
        return counts

    def edges(self, state: States) -> Counter[tuple[str, tuple[str, ...], float]]:
        """How often devices exchange edges of shards under one state (``[classes, axes]``).

        By kind, axes and bytes, as :meth:`reshards`: the exchanges of the device-local program, one
        by one.  Prices have one exchange for each dimension instead, with the bytes of all.
        """
        counts: Counter[tuple[str, tuple[str, ...], float]] = Counter()
        analysis, classes = self.space.analysis, self.space.classes
        held, sizes = held_by(self.tables, state[None])[0], self.machine.axis_sizes.astype(int)
        none = self.tables.slots.dim.shape[1] - 1
        signatures = analysis.program.signatures
        for k, number in enumerate(analysis.names.signature[classes.representative].tolist()):
            if signatures[number].kind not in EXCHANGING:
                continue
            axes: dict[int, list[int]] = {}
            for axis in np.flatnonzero(held[k] < none).tolist():
                axes.setdefault(int(held[k, axis]), []).append(axis)
            shards = {factor: int(sizes[of].prod()) for factor, of in axes.items()}
            times = int(self.tables.ops.count[k])
            for each in exchanges(signatures[number], analysis.rules[number], shards):
                names = tuple(self.space.mesh.names[axis] for axis in axes[each.factor])
                counts["collective_permute", names, each.bytes] += times
        return counts

    def axis_names(self, axes: int) -> tuple[str, ...]:
        """The names of a set of axes."""
        return tuple(self.space.mesh.names[axis] for axis in axis_numbers(int(axes)))

    def timeline(self, state: States) -> Timeline:
        """The timeline of memory under one state (``[classes, axes]``)."""
        layout = self.layout(state[None])
        labels = {term.name: term.label for term in self.buffers}
        arguments = float(self.resident(layout)[0])
        return Timeline.of(self.tables, self.machine, labels, self.columns(layout)[0], arguments)

    def moments(self, state: States) -> Floats:
        """Bytes at each local peak of memory, in the order of ``tables.growth``: ``[moments]``."""
        layout = self.layout(state[None])
        growth = np.cumsum(self.tables.growth @ self.columns(layout)[0])
        return np.asarray(self.resident(layout) + self.machine.in_memory(growth))
