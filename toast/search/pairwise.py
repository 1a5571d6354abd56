"""The pairwise cost of a program: of every op's strategy, and of every two ops at a value.

The cost model prices whole states.  Without the couplings of many ops (overlap of collectives and
products, the order of axes, memory), its cost is a sum over leaders
(:mod:`toast.search.strategies`) and pairs of leaders.  :mod:`toast.search.relaxation` minimises it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import sparse

from toast.cost import CostModel, Layout, LocalTerm, StepPart
from toast.cost.entities import OP_SCOPES, Bools, Dims, Entity, Floats, Ints
from toast.cost.layout import LocalLayout, held_by, slot_dims
from toast.cost.tables import Tables
from toast.distinct import distinct_rows
from toast.search.strategies import Strategies, enumerate_strategies
from toast.space import NONE

#: Fraction of the unsharded step time below which a reshard is ignored.
_NEGLIGIBLE = 1e-9


@dataclasses.dataclass(frozen=True)
class Edge:
    """Reshards between the choices of two leaders; choices with one label cost the same."""

    left: int
    right: int
    left_label: Ints  # [choices of left]
    right_label: Ints  # [choices of right]
    seconds: Floats  # [left labels, right labels]
    uses: Ints  # use classes that are resharded
    #: ``[terms, uses, left labels, right labels]`` bytes that uses keep; no terms without memory.
    bytes: Floats


class Row(NamedTuple):
    """The live bytes at one moment: a linear function of the choices and pairs."""

    choices: Floats  # [S, L] bytes
    pairs: tuple[Floats, ...]  # of each edge: [left labels, right labels] bytes


class Problem:
    """The cost of every choice and of every pair, in seconds.

    It is the sum of the terms of a price: terms of op classes and values depend on the choice of
    one leader, terms of uses on the choices of two.  What depends on more (copies that uses share,
    joint sums, the order of the axes, memory that other values determine) is priced as if a value
    were alone, which for memory is the maximum.
    """

    def __init__(
        self, model: CostModel, strategies: Strategies | None = None, *, with_memory: bool = True
    ) -> None:
        """``strategies`` are those of the model's space; by default they are enumerated.

        Without memory, labels distinguish only choices that differ in time, and :meth:`memory`
        raises ``ValueError``.
        """
        self.model = model
        self._with_memory = with_memory
        self.strategies: Strategies = strategies or enumerate_strategies(model.space)
        t, s = model.tables, self.strategies
        scopes = (*OP_SCOPES, Entity.VALUE_CLASS, Entity.USE_CLASS)
        #: The leader of each entity; for a value, that of the op that defines it.
        self._leader: dict[Entity, Ints] = {scope: s.leader[t.op_class(scope)] for scope in scopes}
        none = np.zeros(0, dtype=np.int64)
        alone = dataclasses.replace(
            t, pairs=t.pairs.take(none), joint_sums=t.joint_sums.take(none),
            operands=t.operands.take(none),
        )  # fmt: skip
        held = held_by(t, s.factors)
        scattered = s.scattered[:, t.op_class(Entity.VALUE_CLASS)]
        settled = np.where(scattered == NONE, slot_dims(t, held, t.values.slot), scattered)
        layout = Layout(alone, model.machine, held, fixed_settled=settled)
        #: Uses with the same leader as their values.
        self._inner: Ints = np.flatnonzero(
            self._leader[Entity.VALUE_CLASS][t.uses.value] == self._leader[Entity.USE_CLASS]
        )
        if with_memory:
            self._value_bytes: dict[str, Floats] = {
                term.name: (term.least_bytes if term.of_loops else term.most_bytes)(layout)
                for term in model.terms
                if term.scope is Entity.VALUE_CLASS and (term.resident or term in model.buffers)
            }
            self._inner_bytes: Floats = self._use_bytes(layout)[:, :, self._inner]
        #: ``[S, L]`` seconds of each choice.
        self.cost: Floats = self._own_seconds(layout)
        self.edges: tuple[Edge, ...] = tuple(self._edges(layout))
        # Rows beyond a leader's choices cost nothing.
        self.cost *= np.arange(len(self.cost))[:, None] < s.sizes

    def seconds(self, choice: Ints) -> float:
        """The objective in seconds, at one choice per leader (``[L]``)."""
        seconds = float(self.cost[choice, np.arange(len(choice))].sum())
        for edge in self.edges:
            row, column = edge.left_label[choice[edge.left]], edge.right_label[choice[edge.right]]
            seconds += float(edge.seconds[row, column])
        return seconds

    # -- choices -----------------------------------------------------------------------------

    def _by_leader(self, leader: Ints, values: Floats) -> Floats:
        """``[S, L]`` sums of ``values`` (``[S, X]``) by leader."""
        shape = (len(leader), len(self.strategies.sizes))
        rows = np.arange(len(leader))
        return np.asarray(values @ sparse.csr_array((np.ones(len(leader)), (rows, leader)), shape))

    def _own_seconds(self, layout: Layout) -> Floats:
        """``[S, L]`` seconds that depend on one leader alone."""
        model = self.model
        local = LocalLayout(layout.tables, layout.machine, layout.held)
        seconds = np.zeros((len(layout.held), len(self.strategies.sizes)))
        for term, spent in model.op_work(layout.held, least=True):
            seconds += self._by_leader(self._leader[term.scope], spent)
        for term in model.terms:
            if term.scope is Entity.USE_CLASS and isinstance(term, LocalTerm):
                spent = term.seconds(local) * ~_rounded_uses(layout.tables)
                seconds += self._by_leader(self._leader[term.scope], spent)
        values = _spent(model, layout, Entity.VALUE_CLASS)
        seconds += self._by_leader(self._leader[Entity.VALUE_CLASS], values)
        inner, leader = self._inner, self._leader[Entity.USE_CLASS]
        return seconds + self._by_leader(
            leader[inner], _spent(model, layout, Entity.USE_CLASS)[:, inner]
        )

    # -- edges -------------------------------------------------------------------------------

    def _edges(self, layout: Layout) -> Iterable[Edge]:
        t, sizes = self.model.tables, self.strategies.sizes
        left = self._leader[Entity.VALUE_CLASS][t.uses.value]
        right = self._leader[Entity.USE_CLASS]
        choosing = (left != right) & ((sizes[left] > 1) | (sizes[right] > 1))
        ends = [
            _Ends(
                use, left, right,
                *_distinct(layout.settled[: sizes[left], t.uses.value[use]]),
                *_distinct(layout.used[: sizes[right], use]),
            )
            for use, left, right in zip(
                np.flatnonzero(choosing).tolist(), left[choosing].tolist(),
                right[choosing].tolist(), strict=True,
            )
        ]  # fmt: skip
        parallel: dict[tuple[int, int, bytes, bytes], list[tuple[_Ends, Floats]]] = {}
        for end, amounts in zip(ends, self._amounts(layout, ends), strict=True):
            if end.right < end.left:
                end, amounts = end.turned(), amounts.swapaxes(1, 2)
            place = end.left, end.right, end.left_label.tobytes(), end.right_label.tobytes()
            parallel.setdefault(place, []).append((end, amounts))
        floor = _NEGLIGIBLE * self.model.initial_seconds
        for uses in parallel.values():
            edge = _merged(uses)
            rows, columns = edge.seconds.shape
            if edge.seconds.max() <= floor:
                continue
            # If only one end matters, the seconds belong to the cost of that end.
            if columns == 1:
                self.cost[: sizes[edge.left], edge.left] += edge.seconds[edge.left_label, 0]
            elif rows == 1:
                self.cost[: sizes[edge.right], edge.right] += edge.seconds[0, edge.right_label]
            else:
                yield edge

    def _amounts(self, layout: Layout, ends: Sequence[_Ends]) -> list[Floats]:
        """For each use, by the labels of its ends: seconds, then the bytes that it keeps.

        ``[1 + terms, left labels, right labels]``.  All uses are priced as one state, with one
        value and one use for each pair of labels; equal uses are priced once.
        """
        t = layout.tables
        alike = _alike(t)
        known: dict[tuple[int, bytes, bytes], int] = {}
        number = [
            known.setdefault((alike[end.use], end.before.tobytes(), end.after.tobytes()), n)
            for n, end in enumerate(ends)
        ]
        chosen = [ends[n] for n in known.values()]
        shapes = [(len(end.before), len(end.after)) for end in chosen]
        use = np.repeat([end.use for end in chosen], [m * n for m, n in shapes]).astype(np.int64)
        axes = layout.settled.shape[-1]
        before, after = np.zeros((2, 1, len(use), axes), dtype=np.int8)
        places = np.cumsum([0, *(m * n for m, n in shapes)])
        for end, (m, n), first, last in zip(chosen, shapes, places, places[1:], strict=False):
            before[0, first:last] = np.repeat(end.before, n, axis=0)
            after[0, first:last] = np.tile(end.after, (m, 1))
        pairs = dataclasses.replace(
            layout,
            tables=dataclasses.replace(
                t, values=t.values.take(t.uses.value[use]),
                uses=dataclasses.replace(t.uses.take(use), value=np.arange(len(use))),
            ),
            held=layout.held[:1], fixed_settled=before, fixed_used=after,
        )  # fmt: skip
        amounts = _spent(self.model, pairs, Entity.USE_CLASS)
        if self._with_memory:
            amounts = np.concatenate([amounts, self._use_bytes(pairs)[:, 0]])
        by_use = {
            n: amounts[:, first:last].reshape(-1, *shape)
            for n, shape, first, last in zip(
                known.values(), shapes, places, places[1:], strict=False
            )
        }
        return [by_use[n] for n in number]

    # -- memory ------------------------------------------------------------------------------

    def _use_bytes(self, layout: Layout) -> Floats:
        """``[terms, S, U]`` bytes that uses keep in memory, by term."""
        shape = layout.used.shape[:2]
        sizes = [t.most_bytes(layout) for t in self.model.buffers if t.scope is Entity.USE_CLASS]
        return np.array(sizes, dtype=np.float64).reshape(-1, *shape)

    def memory(self, moment: int) -> tuple[Row, ...]:
        """The memory at a local peak, each row a lower bound; with -1, of the arguments alone.

        The largest of the rows is the memory: temporaries are in fast memory up to a share of them,
        and up to its room (:meth:`toast.cost.machine.Machine.in_memory`).
        """
        if not self._with_memory:
            raise ValueError("a problem without memory")
        share, room = self.model.machine.fast_memory
        grown = self.model.tables.growth[: moment + 1]
        growth: Floats = np.asarray(grown.sum(axis=0), dtype=np.float64).ravel()
        if moment < 0 or not room:
            return (self._row(growth),)
        whole = self._row(growth)
        constant = np.zeros_like(whole.choices)
        constant[:, :1] = room
        return self._row(growth * (1.0 - share)), Row(whole.choices - constant, whole.pairs)

    def _row(self, growth: Floats) -> Row:
        """The bytes with ``growth`` (``[columns]``) live buffers."""
        t = self.model.tables
        own = sum(
            size if name not in t.columns.names else size * growth[t.columns[name]]
            for name, size in self._value_bytes.items()
        )
        alive = self._uses_alive(growth)
        inner = (self._inner_bytes * alive[:, None, self._inner]).sum(axis=0)
        return Row(
            self._by_leader(self._leader[Entity.VALUE_CLASS], np.asarray(own))
            + self._by_leader(self._leader[Entity.USE_CLASS][self._inner], inner),
            tuple(np.tensordot(alive[:, edge.uses], edge.bytes, 2) for edge in self.edges),
        )

    def _uses_alive(self, growth: Floats) -> Floats:
        """``[terms, U]`` the number of live buffers of :meth:`_use_bytes`."""
        t, alive = self.model.tables, []
        for term in self.model.buffers:
            if term.scope is Entity.USE_CLASS:
                alive.append(growth[t.columns[term.name]].copy())
            elif term.scope is Entity.COPY_PAIR:
                # A copy is kept for a later use with the same sharding; here, for any later use.
                shared = np.zeros(len(t.uses))
                np.maximum.at(shared, t.pairs.later, growth[t.columns[term.name]])
                alive[-1] += shared
        return np.array(alive, dtype=np.float64).reshape(-1, len(t.uses))

    def alive(self, row: Row, choice: Ints) -> float:
        """The bytes of ``row`` at one choice per leader (``[L]``)."""
        size = float(row.choices[choice, np.arange(len(choice))].sum())
        for edge, pairs in zip(self.edges, row.pairs, strict=True):
            left, right = edge.left_label[choice[edge.left]], edge.right_label[choice[edge.right]]
            size += float(pairs[left, right])
        return size

    def worst(self, choice: Ints) -> int:
        """The highest local peak of memory; -1 if only arguments are in memory."""
        moments = self.model.moments(self.strategies.state(choice))
        return int(np.argmax(moments)) if len(moments) else -1


def _distinct(dims: Dims) -> tuple[Dims, Ints]:
    """The distinct rows in order of appearance, and the index of each row among them."""
    code = (dims.astype(np.int64) + 1) @ (64 ** np.arange(dims.shape[1]))
    _, first, label = np.unique(code, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return dims[first[order]], rank[label.reshape(-1)]


class _Ends(NamedTuple):
    """A use whose ends have different leaders, with the distinct shardings at each end."""

    use: int
    left: int
    right: int
    before: Dims  # [left labels, A]
    left_label: Ints  # [choices of left]
    after: Dims  # [right labels, A]
    right_label: Ints

    def turned(self) -> _Ends:
        """The same use with its ends exchanged."""
        return self._replace(
            left=self.right, right=self.left, left_label=self.right_label,
            right_label=self.left_label,
        )  # fmt: skip


def _spent(model: CostModel, layout: Layout, entity: Entity) -> Floats:
    """``[S, entities]`` seconds of one scope; for uses, of the terms that depend on both ends."""
    seconds = np.zeros((len(layout.settled), layout.tables.size(entity)))
    for term in model.terms:
        beside = term.part is StepPart.HOST
        spent = term.seconds(layout) if term.scope is entity and not beside else None
        if spent is not None and entity is Entity.USE_CLASS and isinstance(term, LocalTerm):
            spent = spent * _rounded_uses(layout.tables)
        seconds += 0.0 if spent is None else spent
    for traffic in model.traffic(layout, ordered=False):
        if traffic.term.scope is entity:
            seconds += traffic.seconds
    return seconds


def _rounded_uses(t: Tables) -> Bools:
    """``[U]`` whether a copy and its value differ in size: its bytes then depend on both ends."""
    return np.asarray(t.uses.share != 1.0)


def _alike(t: Tables) -> list[int]:
    """``[U]`` equal numbers for uses that differ only in the slots of value and use."""
    values = dataclasses.replace(t.values, slot=0 * t.values.slot).take(t.uses.value)
    uses = dataclasses.replace(t.uses, slot=0 * t.uses.slot, value=0 * t.uses.value)
    columns = [
        np.asarray(getattr(table, field.name), dtype=np.float64).reshape(len(t.uses), -1)
        for table in (values, uses)
        for field in dataclasses.fields(table)
    ]
    return [*map(int, distinct_rows(np.concatenate(columns, axis=1)).label)]


def _merged(uses: Sequence[tuple[_Ends, Floats]]) -> Edge:
    """One edge of uses with the same leaders and labels; equal rows and columns are merged."""
    ends, terms = uses[0][0], len(uses[0][1]) - 1
    seconds = np.sum([amounts[0] for _, amounts in uses], axis=0)
    memory = np.stack([amounts[1:] for _, amounts in uses], axis=1)  # [terms, uses, ...]
    stacked = np.concatenate([seconds[None], memory.reshape(-1, *seconds.shape)])
    stacked, rows = np.unique(stacked, axis=1, return_inverse=True)
    stacked, columns = np.unique(stacked, axis=2, return_inverse=True)
    return Edge(
        ends.left, ends.right, rows.reshape(-1)[ends.left_label],
        columns.reshape(-1)[ends.right_label], stacked[0], np.array([end.use for end, _ in uses]),
        stacked[1:].reshape(terms, len(uses), *stacked.shape[1:]),
    )  # fmt: skip
