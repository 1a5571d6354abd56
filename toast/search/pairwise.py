"""A program's cost in pairs: of every op's strategy, and of every two that meet at a value.

The cost model prices whole states.  Without what couples many ops (collectives that run beside
products, the order of axes, memory) its cost is a sum over leaders (:mod:`toast.search.strategies`)
and over pairs of them; the best choice is then an integer linear program, as in Alpa (Zheng et al.,
OSDI 2022), whose relaxation is solved in a moment.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import sparse

from toast.cost import CostModel, Layout, LocalTerm
from toast.cost.entities import OP_SCOPES, Bools, Dims, Entity, Floats, Ints
from toast.cost.layout import LocalLayout, held_by, slot_dims
from toast.cost.tables import Tables
from toast.search.strategies import Strategies, enumerate_strategies
from toast.space import NONE, States

if TYPE_CHECKING:
    from scipy import optimize

#: Fractions of the unsharded step time below which a resharding does not count.
_NEGLIGIBLE = 1e-9

#: Variables of a program beyond which it is not solved: it would take longer than the search.
_LARGEST = 200_000

#: Choices of all leaders beyond which it is not even written: three axes have many.
_MOST_CHOICES = 12_000


#: Roundings of a solution, of which the best counts.
_ROUNDINGS = 8


@dataclasses.dataclass(frozen=True)
class Edge:
    """Resharding between the choices of two leaders, whose labels tell what matters of them."""

    left: int
    right: int
    left_label: Ints  # [choices of left]
    right_label: Ints  # [choices of right]
    seconds: Floats  # [left labels, right labels]
    uses: Ints  # use classes that are resharded
    #: ``[terms, uses, left labels, right labels]`` bytes that uses keep; without memory of no term.
    kept: Floats


class Row(NamedTuple):
    """What is alive at one moment: a linear function of the choices and pairs."""

    choices: Floats  # [S, L] bytes
    pairs: tuple[Floats, ...]  # of each edge: [left labels, right labels] bytes


class Problem:
    """The cost of every choice and of every pair, in seconds.

    It is the sum of the terms of a price: those of op classes and of values go by the choices of
    one leader each, those of uses by the choices of two.  What depends on more than that (copies
    that uses share, joint sums, the order of the axes, memory of what other values need) counts as
    if a value stood alone; in memory that is the most it can be.
    """

    def __init__(
        self, model: CostModel, strategies: Strategies | None = None, *, with_memory: bool = True
    ) -> None:
        """``strategies`` are those of the model's space, if they are known.

        Without memory the ends of an edge are labelled by what costs time alone; then
        :meth:`memory` raises ``ValueError``.
        """
        self.model = model
        self._with_memory = with_memory
        self.strategies: Strategies = strategies or enumerate_strategies(model.space)
        t, s = model.tables, self.strategies
        scopes = (*OP_SCOPES, Entity.VALUE_CLASS, Entity.USE_CLASS)
        #: The leader that each entity follows: of a value, that of the op which makes it.
        self._leader: dict[Entity, Ints] = {scope: s.leader[t.op_class(scope)] for scope in scopes}
        none = np.zeros(0, dtype=np.int64)
        alone = dataclasses.replace(
            t, pairs=t.pairs.take(none), joint_sums=t.joint_sums.take(none),
            operands=t.operands.take(none),
        )  # fmt: skip
        held = held_by(t, s.factors)
        kept = s.scattered[:, t.op_class(Entity.VALUE_CLASS)]
        settled = np.where(kept == NONE, slot_dims(t, held, t.values.slot), kept)
        layout = Layout(alone, model.machine, held, fixed_settled=settled)
        #: Uses that follow what they use.
        self._inner: Ints = np.flatnonzero(
            self._leader[Entity.VALUE_CLASS][t.uses.value] == self._leader[Entity.USE_CLASS]
        )
        if with_memory:
            self._values_kept: dict[str, Floats] = {
                term.name: term.most_bytes(layout)
                for term in model.terms
                if term.scope is Entity.VALUE_CLASS and (term.resident or term in model.buffers)
            }
            self._inner_kept: Floats = self._uses_kept(layout)[:, :, self._inner]
        #: ``[S, L]``
        self.cost: Floats = self._own_seconds(layout)
        self.edges: tuple[Edge, ...] = tuple(self._edges(layout))
        # What differs between choices that are not there is nobody's business.
        choices = np.arange(len(self.cost))[:, None] < s.sizes
        self.cost *= choices
        parts = dataclasses.replace(layout, in_parts=True)
        saved = _spent(model, parts, Entity.VALUE_CLASS) - _spent(model, layout, Entity.VALUE_CLASS)
        self._saved: Floats = choices * self._by_leader(self._leader[Entity.VALUE_CLASS], saved)

    def in_parts(self) -> Problem | None:
        """The problem as if XLA took no sum whole that is kept in parts; none if that is the same.

        What it says of seconds is too little.  Its solution is near others, which may be better.
        """
        if not self._saved.any():
            return None
        other = copy.copy(self)
        other.cost = self.cost + self._saved
        return other

    def seconds(self, choice: Ints) -> float:
        """The objective at one choice per leader."""
        seconds = float(self.cost[choice, np.arange(len(choice))].sum())
        for edge in self.edges:
            row, column = edge.left_label[choice[edge.left]], edge.right_label[choice[edge.right]]
            seconds += float(edge.seconds[row, column])
        return seconds

    # -- choices -----------------------------------------------------------------------------

    def _by_leader(self, leader: Ints, values: Floats) -> Floats:
        """``[S, X]`` added up by leader."""
        shape = (len(leader), len(self.strategies.sizes))
        rows = np.arange(len(leader))
        return np.asarray(values @ sparse.csr_array((np.ones(len(leader)), (rows, leader)), shape))

    def _own_seconds(self, layout: Layout) -> Floats:
        """``[S, L]`` what depends on one leader alone."""
        model = self.model
        local = LocalLayout(layout.tables, layout.machine, layout.held)
        seconds = np.zeros((len(layout.held), len(self.strategies.sizes)))
        for term, spent in model.op_work(layout.held):
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
            # What depends on one end alone is that end's cost.
            if columns == 1:
                self.cost[: sizes[edge.left], edge.left] += edge.seconds[edge.left_label, 0]
            elif rows == 1:
                self.cost[: sizes[edge.right], edge.right] += edge.seconds[0, edge.right_label]
            else:
                yield edge

    def _amounts(self, layout: Layout, ends: Sequence[_Ends]) -> list[Floats]:
        """Of each use, by the labels of its ends: seconds, and behind them what it keeps.

        ``[1 + terms, left labels, right labels]``.  All uses are priced as one state, one value and
        one use for each pair of labels; uses that are alike are priced once.
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
            amounts = np.concatenate([amounts, self._uses_kept(pairs)[:, 0]])
        by_use = {
            n: amounts[:, first:last].reshape(-1, *shape)
            for n, shape, first, last in zip(
                known.values(), shapes, places, places[1:], strict=False
            )
        }
        return [by_use[n] for n in number]

    # -- memory ------------------------------------------------------------------------------

    def _uses_kept(self, layout: Layout) -> Floats:
        """``[terms, S, U]`` bytes of the terms by which uses keep something in memory."""
        shape = layout.used.shape[:2]
        kept = [t.most_bytes(layout) for t in self.model.buffers if t.scope is Entity.USE_CLASS]
        return np.array(kept, dtype=np.float64).reshape(-1, *shape)

    def memory(self, moment: int) -> Row:
        """What is alive at a local peak of memory; at -1, arguments alone."""
        if not self._with_memory:
            raise ValueError("a problem without memory")
        t = self.model.tables
        growth: Floats = np.asarray(t.growth[: moment + 1].sum(axis=0), dtype=np.float64).ravel()
        own = sum(
            size if name not in t.columns.names else size * growth[t.columns[name]]
            for name, size in self._values_kept.items()
        )
        alive = self._uses_alive(growth)
        inner = (self._inner_kept * alive[:, None, self._inner]).sum(axis=0)
        return Row(
            self._by_leader(self._leader[Entity.VALUE_CLASS], np.asarray(own))
            + self._by_leader(self._leader[Entity.USE_CLASS][self._inner], inner),
            tuple(np.tensordot(alive[:, edge.uses], edge.kept, 2) for edge in self.edges),
        )

    def _uses_alive(self, growth: Floats) -> Floats:
        """``[terms, U]`` how many of the buffers of :meth:`_uses_kept` are alive."""
        t, alive = self.model.tables, []
        for term in self.model.buffers:
            if term.scope is Entity.USE_CLASS:
                alive.append(growth[t.columns[term.name]].copy())
            elif term.scope is Entity.COPY_PAIR:
                # A copy is kept for a later use that wants the same: here that is any later use.
                shared = np.zeros(len(t.uses))
                np.maximum.at(shared, t.pairs.later, growth[t.columns[term.name]])
                alive[-1] += shared
        return np.array(alive, dtype=np.float64).reshape(-1, len(t.uses))

    def alive(self, row: Row, choice: Ints) -> float:
        """The bytes of a row at one choice per leader."""
        size = float(row.choices[choice, np.arange(len(choice))].sum())
        for edge, pairs in zip(self.edges, row.pairs, strict=True):
            left, right = edge.left_label[choice[edge.left]], edge.right_label[choice[edge.right]]
            size += float(pairs[left, right])
        return size

    def worst(self, choice: Ints) -> int:
        """The local peak of memory that is the highest; -1 where arguments are all there is."""
        moments = self.model.moments(self.strategies.state(choice))
        return int(np.argmax(moments)) if len(moments) else -1


@dataclasses.dataclass(frozen=True)
class LinearProgram:
    """A problem in variables between 0 and 1: one per choice of a leader, one per pair of labels.

    The first ones are the choices, ``leaders`` and ``choices`` say of whom and which; they add up
    to 1 for each leader, and the pairs of a label to the choices that have it.
    """

    costs: Floats  # in units of the unsharded step
    matrix: sparse.csr_array
    sums: Floats  # what the rows of the matrix add up to
    leaders: Ints
    choices: Ints

    @staticmethod
    def of(problem: Problem) -> LinearProgram:
        """The program of all choices and pairs of a problem."""
        sizes = problem.strategies.sizes
        first = np.concatenate([[0], np.cumsum(sizes)])
        leaders = np.repeat(np.arange(len(sizes)), sizes)
        choices = np.arange(first[-1]) - first[leaders]
        scale = 1.0 / max(problem.model.initial_seconds, np.finfo(np.float64).tiny)
        costs = [problem.cost[choices, leaders] * scale]
        row, column, sign = [leaders], [np.arange(first[-1])], [np.ones(first[-1])]
        equal = [np.ones(len(sizes))]
        next_row, next_column = len(sizes), int(first[-1])
        for edge in problem.edges:
            m, n = edge.seconds.shape
            pair = next_column + np.arange(m * n)
            # Pairs of a label add up to the choices that have it: at both ends.
            row += [next_row + pair_of for pair_of in _both(m, n)]
            column += [pair, pair]
            sign += [np.ones(m * n), np.ones(m * n)]
            for leader, label, offset in (
                (edge.left, edge.left_label, 0), (edge.right, edge.right_label, m),
            ):  # fmt: skip
                row.append(next_row + offset + label)
                column.append(first[leader] + np.arange(len(label)))
                sign.append(-np.ones(len(label)))
            equal.append(np.zeros(m + n))
            costs.append(edge.seconds.ravel() * scale)
            next_row, next_column = next_row + m + n, next_column + m * n
        place = np.concatenate(row), np.concatenate(column)
        matrix = sparse.csr_array((np.concatenate(sign), place), shape=(next_row, next_column))
        return LinearProgram(np.concatenate(costs), matrix, np.concatenate(equal), leaders, choices)

    @property
    def constraint(self) -> optimize.LinearConstraint:
        """What ties the variables to one another."""
        from scipy import optimize  # not above: who asks a plan waits for it

        return optimize.LinearConstraint(self.matrix, self.sums, self.sums)

    def choice(self, values: Floats) -> Ints:
        """The choice of each leader with the largest variable."""
        return np.array([np.argmax(share) for share in self.shares(values)], dtype=np.int64)

    def shares(self, values: Floats) -> list[Floats]:
        """The variables of each leader's choices."""
        first = np.flatnonzero(np.diff(self.leaders, prepend=-1))
        return np.split(values[: len(self.leaders)], first[1:])


def relaxed(problem: Problem, program: LinearProgram, seconds: float | None = None) -> Ints | None:
    """The choices of the relaxed program, rounded; none if it takes more than ``seconds``."""
    from scipy import optimize

    # Presolving spares less than it takes.
    limit = np.inf if seconds is None else seconds
    found = optimize.milp(
        program.costs, bounds=optimize.Bounds(0, 1), constraints=[program.constraint],
        options={"presolve": False, "time_limit": limit},
    )  # fmt: skip
    return None if found.x is None else _rounded(problem, program.shares(found.x))


def _rounded(problem: Problem, shares: list[Floats]) -> Ints:
    """The best choices, in pairs, of those that roundings lead to.

    One leader after the other takes what is best beside those that have chosen, and beside the
    shares of the others; then each takes what is best beside all others, until none changes.
    """
    beside: list[list[tuple[Ints, Floats, int, Ints]]] = [[] for _ in shares]
    for edge in problem.edges:
        ends = (edge.left, edge.left_label), (edge.right, edge.right_label)
        for (one, label), (other, labels), seconds in (
            (*ends, edge.seconds), (*ends[::-1], edge.seconds.T),
        ):  # fmt: skip
            beside[one].append((label, seconds, other, labels[: len(shares[other])]))

    def best(leader: int, choice: Ints) -> int:
        cost = problem.cost[: len(shares[leader]), leader].copy()
        for label, seconds, other, labels in beside[leader]:
            if choice[other] >= 0:
                cost += seconds[label, labels[choice[other]]]
            else:
                share = np.bincount(labels, shares[other], minlength=seconds.shape[1])
                cost += (seconds @ share)[label]
        if choice[leader] >= 0 and not cost.min() < cost[choice[leader]] * (1 - 1e-9):
            return int(choice[leader])
        return int(np.argmin(cost))

    found = []
    surest = np.argsort([-share.max() for share in shares], kind="stable")
    random = np.random.default_rng(0)
    for order in (surest, *(random.permutation(len(shares)) for _ in range(_ROUNDINGS - 1))):
        choice, changed = np.full(len(shares), -1), True
        while changed:
            before = choice.copy()
            for leader in order.tolist():
                choice[leader] = best(leader, choice)
            changed = bool((choice != before).any())
        found.append(choice)
    return min(found, key=problem.seconds)


def proposing(model: CostModel) -> Callable[[float | None], tuple[States, ...]]:
    """Makes states that are good in pairs, for a search to combine with its own; perhaps none.

    The program is written here; the result solves it, within about so many seconds, and leaves the
    interpreter alone until it rounds: that is for another thread.
    """
    if not model.space.actions:
        return _nothing
    strategies = enumerate_strategies(model.space)
    if strategies.sizes.sum() > _MOST_CHOICES:
        return _nothing
    problem = Problem(model, strategies, with_memory=False)
    program = LinearProgram.of(problem)
    if len(program.costs) > _LARGEST:
        return _nothing
    programs = [(problem, program)]
    if (other := problem.in_parts()) is not None:
        programs.append((other, LinearProgram.of(other)))

    def solve(seconds: float | None = None) -> tuple[States, ...]:
        end = np.inf if seconds is None else time.perf_counter() + seconds
        states = []
        for each in programs:
            left = end - time.perf_counter()
            choice = relaxed(*each, None if seconds is None else left) if left > 0 else None
            if choice is not None:
                states.append(model.space.within(strategies.state(choice)))
        return tuple(states)

    return solve


def _nothing(_seconds: float | None = None) -> tuple[States, ...]:
    return ()


def _distinct(dims: Dims) -> tuple[Dims, Ints]:
    """The distinct rows in the order they come, and the number of each row's."""
    code = (dims.astype(np.int64) + 1) @ (64 ** np.arange(dims.shape[1]))
    _, first, label = np.unique(code, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return dims[first[order]], rank[label.reshape(-1)]


class _Ends(NamedTuple):
    """A use whose ends have different leaders, and what it depends on of their choices."""

    use: int
    left: int
    right: int
    before: Dims  # [left labels, A]
    left_label: Ints  # [choices of left]
    after: Dims  # [right labels, A]
    right_label: Ints

    def turned(self) -> _Ends:
        """The same with its ends exchanged."""
        return self._replace(
            left=self.right, right=self.left, left_label=self.right_label,
            right_label=self.left_label,
        )  # fmt: skip


def _spent(model: CostModel, layout: Layout, entity: Entity) -> Floats:
    """``[S, entities]`` seconds of terms of one scope; of uses, of those that both ends decide."""
    seconds = np.zeros((len(layout.settled), layout.tables.size(entity)))
    for term in model.terms:
        spent = term.seconds(layout) if term.scope is entity else None
        if spent is not None and entity is Entity.USE_CLASS and isinstance(term, LocalTerm):
            spent = spent * _rounded_uses(layout.tables)
        seconds += 0.0 if spent is None else spent
    for traffic in model.traffic(layout, ordered=False):
        if traffic.term.scope is entity:
            seconds += traffic.seconds
    return seconds


def _rounded_uses(t: Tables) -> Bools:
    """``[U]`` whether a copy has fewer bytes than the value: then both ends decide the bytes."""
    return np.asarray(t.uses.share != 1.0)


def _alike(t: Tables) -> list[int]:
    """``[U]`` numbers that are equal where all is but the places of a value and of its use."""
    values = dataclasses.replace(t.values, slot=0 * t.values.slot).take(t.uses.value)
    uses = dataclasses.replace(t.uses, slot=0 * t.uses.slot, value=0 * t.uses.value)
    columns = [
        np.asarray(getattr(table, field.name), dtype=np.float64).reshape(len(t.uses), -1)
        for table in (values, uses)
        for field in dataclasses.fields(table)
    ]
    return [*map(int, np.unique(np.concatenate(columns, axis=1), axis=0, return_inverse=True)[1])]


def _merged(uses: Sequence[tuple[_Ends, Floats]]) -> Edge:
    """One edge of uses with the same leaders and labels; equal rows and columns become one."""
    ends, terms = uses[0][0], len(uses[0][1]) - 1
    seconds = np.sum([amounts[0] for _, amounts in uses], axis=0)
    kept = np.stack([amounts[1:] for _, amounts in uses], axis=1)  # [terms, uses, ...]
    stacked = np.concatenate([seconds[None], kept.reshape(-1, *seconds.shape)])
    stacked, rows = np.unique(stacked, axis=1, return_inverse=True)
    stacked, columns = np.unique(stacked, axis=2, return_inverse=True)
    return Edge(
        ends.left, ends.right, rows.reshape(-1)[ends.left_label],
        columns.reshape(-1)[ends.right_label], stacked[0], np.array([end.use for end, _ in uses]),
        stacked[1:].reshape(terms, len(uses), *stacked.shape[1:]),
    )  # fmt: skip


def _both(rows: int, columns: int) -> tuple[Ints, Ints]:
    """Row of each pair in the constraints of the left end, and of the right end behind them."""
    return np.repeat(np.arange(rows), columns), rows + np.tile(np.arange(columns), rows)
