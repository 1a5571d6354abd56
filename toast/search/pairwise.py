"""A program's cost in pairs: of every op's strategy, and of every two that meet at a value.

The cost model prices whole states.  Without what couples many ops (collectives that run beside
products, the order of axes, memory) its cost is a sum over leaders (:mod:`toast.search.strategies`)
and over pairs of them; the best choice is then an integer linear program, as in Alpa (Zheng et al.,
OSDI 2022), whose relaxation is solved in a moment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import sparse

from toast.cost import CostModel, Layout
from toast.cost.layout import axes_of
from toast.cost.transfers import ALL_TO_ALL, GATHER, PERMUTE, REDUCE, SCATTER
from toast.search.strategies import Strategies, enumerate_strategies
from toast.space import NONE, States

if TYPE_CHECKING:
    from scipy import optimize

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Dims = npt.NDArray[np.int8]

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
    #: ``[uses, left labels, right labels]`` bytes of the resharded copy; without memory of no use.
    copies: Floats


class Row(NamedTuple):
    """What is alive at one moment: a linear function of the choices and pairs."""

    choices: Floats  # [S, L] bytes
    pairs: tuple[Floats, ...]  # of each edge: [left labels, right labels] bytes


class Problem:
    """The cost of every choice and of every pair, in seconds."""

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
        self._devices: Floats = model.collectives.devices.astype(np.float64)
        #: ``[C]`` leader that each value class follows; ``[U]`` the same of use classes.
        self.value_leader: Ints = s.leader[t.slot_class[t.value_slot]]
        self._use_leader: Ints = s.leader[t.slot_class[t.use_slot]]
        layout = model.layout(s.factors)
        kept = s.scattered[:, t.slot_class[t.value_slot]]
        settled = np.where(kept == NONE, layout.defined, kept)
        #: ``[S, C]`` bytes of a value per device.
        self.bytes: Floats = t.value_bytes / self._devices[axes_of(settled >= 0)]
        if with_memory:
            scattered = layout.partial & axes_of(settled >= 0)
            whole = model.summed_whole(scattered, layout.held, settled)
            #: ``[S, C]`` the same in memory, with padding.
            self._held: Floats = self.bytes * model.lane_padding(t.value_sizes, settled)
            #: ``[S, C]`` what a sum is more before it is cut up, products that are kept for one.
            self._sums: Floats = self._held * (self._devices[scattered] - 1) * whole
            self._kept: Floats = self._held * (t.value_merged & (layout.partial > 0))
        #: ``[S, L]``
        self.cost: Floats = self._work(layout, settled)
        self.edges: tuple[Edge, ...] = tuple(self._edges(settled, layout.used))
        # What differs between choices that are not there is nobody's business.
        self.cost[np.arange(len(self.cost))[:, None] >= s.sizes] = 0.0

    def seconds(self, choice: Ints) -> float:
        """The objective at one choice per leader."""
        found = float(self.cost[choice, np.arange(len(choice))].sum())
        for edge in self.edges:
            row, column = edge.left_label[choice[edge.left]], edge.right_label[choice[edge.right]]
            found += float(edge.seconds[row, column])
        return found

    # -- choices -----------------------------------------------------------------------------

    def _by_leader(self, leader: Ints, values: Floats) -> Floats:
        """``[S, X]`` added up by leader."""
        shape = (len(leader), len(self.strategies.sizes))
        rows = np.arange(len(leader))
        return np.asarray(values @ sparse.csr_array((np.ones(len(leader)), (rows, leader)), shape))

    def _work(self, layout: Layout, settled: Dims) -> Floats:
        """Products, kernels that memory bounds, sums over devices and halos."""
        model, t = self.model, self.model.tables
        hbm = model.hardware.memory_bytes_per_s
        found = self._by_leader(
            self.strategies.leader[t.product_class], model.product_seconds(layout.held)
        )
        values = self.bytes * (t.value_written * t.value_count / hbm)
        work = t.value_transcendentals / model.hardware.transcendentals_per_s
        values += work / self._devices[axes_of(layout.defined >= 0)]
        scattered = layout.partial & axes_of(settled >= 0) & ~axes_of(layout.defined >= 0)
        reduced = layout.partial & ~scattered
        seconds = model.collectives.seconds
        whole = self.bytes * self._devices[scattered]
        values += t.value_count * (
            seconds(SCATTER, whole, scattered) + seconds(REDUCE, self.bytes, reduced)
        )
        halo = t.halo[np.arange(len(t.halo))[:, None], layout.held]
        part = halo[:, t.slot_class[t.value_slot]]
        here = axes_of(part > 0)
        shards, furthest = self._devices[here], part.max(axis=2)
        moved = np.where(np.isinf(furthest), 1.0, np.minimum(furthest * shards, shards))
        values += t.value_count * seconds(PERMUTE, np.where(here, moved * self.bytes, 0.0), here)
        found += self._by_leader(self.value_leader, values)
        read = t.value_bytes[t.use_value] / self._devices[axes_of(layout.used >= 0)]
        return found + self._by_leader(self._use_leader, read * (t.use_reads / hbm))

    # -- edges -------------------------------------------------------------------------------

    def _reshard(self, size: Floats, before: Dims, after: Dims) -> Floats:
        """Seconds to reshard ``size`` bytes (unsharded): ``[...]`` from ``[..., A]``."""
        was, now, differs = axes_of(before >= 0), axes_of(after >= 0), axes_of(before != after)
        gather, exchange = was & ~now, was & now & differs
        local = size / self._devices[was | now]
        seconds = self.model.collectives.seconds
        return seconds(GATHER, local * self._devices[gather], gather) + seconds(
            ALL_TO_ALL, local, exchange
        )

    def _edges(self, settled: Dims, used: Dims) -> Iterable[Edge]:
        t, sizes = self.model.tables, self.strategies.sizes
        left, right = self.value_leader[t.use_value], self._use_leader
        # What is made of constants, nobody has to send.
        times = t.use_count * (1 - t.use_constant)
        size, elements = t.value_bytes[t.use_value] * t.use_share, t.value_sizes[t.use_value]
        inner = np.flatnonzero(left == right)
        before, after = settled[:, t.use_value[inner]], used[:, inner]
        here = self._reshard(size[inner], before, after)
        self.cost += self._by_leader(left[inner], here * times[inner])
        if self._with_memory:
            #: Uses that follow what they use, and ``[S, uses]`` bytes of their copies.
            self._inner: Ints = inner
            self._inner_copies: Floats = self._copied(size[inner], elements[inner], before, after)
        found: dict[tuple[int, int, bytes, bytes], _Parallel] = {}
        known: dict[tuple[float, bytes, bytes, bytes], tuple[Floats, list[Floats]]] = {}
        choosing = (sizes[left] > 1) | (sizes[right] > 1)
        for use in np.flatnonzero((left != right) & (times > 0) & choosing).tolist():
            one, other = int(left[use]), int(right[use])
            before, one_label = _distinct(settled[: sizes[one], t.use_value[use]])
            after, other_label = _distinct(used[: sizes[other], use])
            shape = elements[use].tobytes() if self._with_memory else b""
            key = (float(size[use]), shape, before.tobytes(), after.tobytes())
            if key not in known:
                pair = np.broadcast_arrays(before[:, None], after[None])
                copied = []
                if self._with_memory:
                    copied = [self._copied(size[use], elements[use], *pair)]
                known[key] = self._reshard(size[use], *pair), copied
            seconds, copied = known[key]
            if other < one:
                one, other, one_label, other_label = other, one, other_label, one_label
                seconds, copied = seconds.T, [copies.T for copies in copied]
            place = (one, other, one_label.tobytes(), other_label.tobytes())
            parallel = found.setdefault(place, _Parallel(one_label, other_label, [], [], []))
            parallel.seconds.append(times[use] * seconds)
            parallel.uses.append(use)
            parallel.copies.extend(copied)
        floor = _NEGLIGIBLE * self.model.initial_seconds
        for (one, other, *_), parallel in found.items():
            edge = _merged(one, other, parallel)
            rows, columns = edge.seconds.shape
            if edge.seconds.max() <= floor:
                continue
            # What depends on one end alone is that end's cost.
            if columns == 1:
                self.cost[: sizes[one], one] += edge.seconds[edge.left_label, 0]
            elif rows == 1:
                self.cost[: sizes[other], other] += edge.seconds[0, edge.right_label]
            else:
                yield edge

    def _copied(self, size: Floats, elements: Ints, before: Dims, after: Dims) -> Floats:
        """Bytes of a resharded copy in memory: ``[...]`` from ``[..., A]``."""
        copied = np.where((before != after).any(axis=-1), size, 0.0)
        padding = self.model.lane_padding(elements, after)
        return np.asarray(copied / self._devices[axes_of(after >= 0)] * padding)

    # -- memory ------------------------------------------------------------------------------

    def memory(self, moment: int) -> Row:
        """What is alive at a local peak of memory; at -1, arguments alone."""
        if not self._with_memory:
            raise ValueError("a problem without memory")
        t = self.model.tables
        values, uses = len(t.value_bytes), len(t.use_value)
        growth = np.asarray(t.growth[: moment + 1].sum(axis=0)).reshape(-1)
        alive = growth[:values] + np.bincount(t.argument_columns, minlength=values)
        copied = growth[values : values + uses]
        # A copy is kept for a later use that wants the same: here that is any later use.
        offset, shared = values + uses, np.zeros_like(copied)
        for later, _ in t.pairs:
            shared[later] = np.maximum(shared[later], growth[offset : offset + len(later)])
            offset += len(later)
        copied = copied + shared
        sums, kept, second = growth[len(growth) - 3 * values :].reshape(3, values)
        # A second buffer depends on who takes the value: here it is always needed.
        own = self._held * (alive + second) + self._sums * sums + self._kept * kept
        return Row(
            self._by_leader(self.value_leader, own)
            + self._by_leader(
                self._use_leader[self._inner], self._inner_copies * copied[self._inner]
            ),
            tuple(np.tensordot(copied[edge.uses], edge.copies, 1) for edge in self.edges),
        )

    def alive(self, row: Row, choice: Ints) -> float:
        """The bytes of a row at one choice per leader."""
        found = float(row.choices[choice, np.arange(len(choice))].sum())
        for edge, pairs in zip(self.edges, row.pairs, strict=True):
            left, right = edge.left_label[choice[edge.left]], edge.right_label[choice[edge.right]]
            found += float(pairs[left, right])
        return found

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

    def solve(seconds: float | None = None) -> tuple[States, ...]:
        if seconds is not None and seconds <= 0:
            return ()
        choice = relaxed(problem, program, seconds)
        return () if choice is None else (model.space.within(strategies.state(choice)),)

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


class _Parallel(NamedTuple):
    """Uses whose ends have the same leaders and labels."""

    left_label: Ints
    right_label: Ints
    seconds: list[Floats]  # of each use
    uses: list[int]
    copies: list[Floats]


def _merged(left: int, right: int, parallel: _Parallel) -> Edge:
    """One edge, whose labels with equal costs and copies are one."""
    stacked = np.stack([np.sum(parallel.seconds, axis=0), *parallel.copies])
    stacked, rows = np.unique(stacked, axis=1, return_inverse=True)
    stacked, columns = np.unique(stacked, axis=2, return_inverse=True)
    return Edge(
        left, right, rows.reshape(-1)[parallel.left_label],
        columns.reshape(-1)[parallel.right_label], stacked[0], np.array(parallel.uses), stacked[1:],
    )  # fmt: skip


def _both(rows: int, columns: int) -> tuple[Ints, Ints]:
    """Row of each pair in the constraints of the left end, and of the right end behind them."""
    return np.repeat(np.arange(rows), columns), rows + np.tile(np.arange(columns), rows)
