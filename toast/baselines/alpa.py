"""Alpa's intra-operator pass (Zheng et al., OSDI 2022) on TOAST's analysis and cost model.

An integer linear program chooses one strategy per leader op (:mod:`toast.baselines.strategies`).
Its cost is that of Alpa: the time of each op under its strategy with the sums over devices that it
needs, and the time to reshard along every def-use edge whose ends disagree, linearised with one
variable per pair of shardings.  What is alive at once must fit the memory limit; such rows are
added for the program points where a solution does not.  HiGHS solves it.

What it does not know, as Alpa does not: repeated layers, and collectives that run beside products.
What it knows beyond Alpa: sums that are left scattered, and copies in memory after resharding.
The plan is priced by the cost model as any other.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse

from toast import given
from toast.analysis import Analysis
from toast.baselines.strategies import Strategies, enumerate_strategies
from toast.cost import CostModel, Layout, Overlap
from toast.errors import SearchError
from toast.given import AnyHardware, AnyMesh
from toast.hardware import COLLECTIVES
from toast.plan import Plan, make_plan
from toast.search import Found, begin_fixed
from toast.space import NONE, Constraints, Space, States
from toast.units import size_text, time_text

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Dims = npt.NDArray[np.int8]

_GATHER, _REDUCE, _SCATTER, _ALL_TO_ALL, _PERMUTE = range(len(COLLECTIVES))

#: Solutions whose cost is within this fraction of the bound count as optimal.
GAP = 1e-4

#: Programs solved at most: each adds a row of memory, or leaves more room for copies.
_ATTEMPTS = 12

#: Room in units of the memory limit beyond which the limit is given up.
_MOST_ROOM = 2.0

#: Fraction of the memory limit below which the room for what rows miss is not refined.
_FINEST = 0.02

#: Fractions of the unsharded step time below which a resharding does not count.
_NEGLIGIBLE = 1e-9


@dataclasses.dataclass(frozen=True)
class Edge:
    """Resharding between the choices of two leaders, whose labels tell what matters of them."""

    left: int
    right: int
    left_label: Ints  # [choices of left]
    right_label: Ints  # [choices of right]
    seconds: Floats  # [left labels, right labels]
    uses: Ints  # use classes that are resharded
    copies: Floats  # [uses, left labels, right labels] bytes of the resharded copy


class Row(NamedTuple):
    """What is alive at one moment: a linear function of the choices and pairs."""

    choices: Floats  # [S, L] bytes
    pairs: tuple[Floats, ...]  # of each edge: [left labels, right labels] bytes


class Problem:
    """The cost of every choice and of every pair, in seconds."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.strategies: Strategies = enumerate_strategies(model.space)
        t, s = model.tables, self.strategies
        self._devices: Floats = model.collectives.devices.astype(np.float64)
        #: ``[C]`` leader that each value class follows; ``[U]`` the same of use classes.
        self.value_leader: Ints = s.leader[t.slot_class[t.value_slot]]
        self._use_leader: Ints = s.leader[t.slot_class[t.use_slot]]
        layout = model.layout(s.factors)
        kept = s.scattered[:, t.slot_class[t.value_slot]]
        settled = np.where(kept == NONE, layout.defined, kept)
        #: ``[S, C]`` bytes of a value per device.
        self.bytes: Floats = t.value_bytes / self._devices[_axes(settled >= 0)]
        scattered = layout.partial & _axes(settled >= 0)
        whole = model.summed_whole(scattered, layout.held, settled)
        #: ``[S, C]`` the same in memory, with padding.
        self._held: Floats = self.bytes * model.lane_padding(t.value_sizes, settled)
        #: ``[S, C]`` what a sum is more before it is cut up, and products that are kept for one.
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
            self.strategies.leader[t.product_class], model.product_seconds(layout)
        )
        values = self.bytes * (t.value_written * t.value_count / hbm)
        work = t.value_transcendentals / model.hardware.transcendentals_per_s
        values += work / self._devices[_axes(layout.defined >= 0)]
        scattered = layout.partial & _axes(settled >= 0) & ~_axes(layout.defined >= 0)
        reduced = layout.partial & ~scattered
        seconds = model.collectives.seconds
        whole = self.bytes * self._devices[scattered]
        values += t.value_count * (
            seconds(_SCATTER, whole, scattered) + seconds(_REDUCE, self.bytes, reduced)
        )
        halo = t.halo[np.arange(len(t.halo))[:, None], layout.held]
        part = halo[:, t.slot_class[t.value_slot]]
        here = _axes(part > 0)
        shards, furthest = self._devices[here], part.max(axis=2)
        moved = np.where(np.isinf(furthest), 1.0, np.minimum(furthest * shards, shards))
        values += t.value_count * seconds(_PERMUTE, np.where(here, moved * self.bytes, 0.0), here)
        found += self._by_leader(self.value_leader, values)
        read = t.value_bytes[t.use_value] / self._devices[_axes(layout.used >= 0)]
        return found + self._by_leader(self._use_leader, read * (t.use_reads / hbm))

    # -- edges -------------------------------------------------------------------------------

    def _reshard(self, size: Floats, before: Dims, after: Dims) -> Floats:
        """Seconds to reshard ``size`` bytes (unsharded): ``[...]`` from ``[..., A]``."""
        was, now, differs = _axes(before >= 0), _axes(after >= 0), _axes(before != after)
        gather, exchange = was & ~now, was & now & differs
        local = size / self._devices[was | now]
        seconds = self.model.collectives.seconds
        return seconds(_GATHER, local * self._devices[gather], gather) + seconds(
            _ALL_TO_ALL, local, exchange
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
        #: Uses that follow what they use, and ``[S, uses]`` bytes of their copies.
        self._inner: Ints = inner
        self._inner_copies: Floats = self._copied(size[inner], elements[inner], before, after)
        found: dict[tuple[int, int, bytes, bytes], _Parallel] = {}
        known: dict[tuple[float, bytes, bytes, bytes], tuple[Floats, Floats]] = {}
        choosing = (sizes[left] > 1) | (sizes[right] > 1)
        for use in np.flatnonzero((left != right) & (times > 0) & choosing).tolist():
            one, other = int(left[use]), int(right[use])
            before, one_label = _distinct(settled[: sizes[one], t.use_value[use]])
            after, other_label = _distinct(used[: sizes[other], use])
            here = elements[use].tobytes()
            key = (float(size[use]), here, before.tobytes(), after.tobytes())
            if key not in known:
                pair = np.broadcast_arrays(before[:, None], after[None])
                copied = self._copied(size[use], elements[use], *pair)
                known[key] = self._reshard(size[use], *pair), copied
            seconds, copied = known[key]
            if other < one:
                one, other, one_label, other_label = other, one, other_label, one_label
                seconds, copied = seconds.T, copied.T
            place = (one, other, one_label.tobytes(), other_label.tobytes())
            parallel = found.setdefault(place, _Parallel(one_label, other_label, [], [], []))
            parallel.seconds.append(times[use] * seconds)
            parallel.uses.append(use)
            parallel.copies.append(copied)
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
        return np.asarray(copied / self._devices[_axes(after >= 0)] * padding)

    # -- memory ------------------------------------------------------------------------------

    def memory(self, moment: int) -> Row:
        """What is alive at a local peak of memory; at -1, arguments alone."""
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
class Solution:
    """How the solver ended, and its choices if it has any."""

    #: ``optimal``, ``time limit``, ``infeasible``, or what HiGHS says.
    status: str
    choice: Ints | None
    seconds: float
    #: Relative distance to the bound, of a solution that is not known to be optimal.
    gap: float = 0.0


def solve(
    problem: Problem, rows: Iterable[Row], limit: float, time_limit: float, *, gap: float = GAP
) -> Solution:
    """Solve the integer linear program; ``rows`` stay within ``limit`` bytes."""
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
    sums = np.concatenate(equal)
    constraints = [optimize.LinearConstraint(matrix, sums, sums)]
    alive = [
        np.concatenate([r.choices[choices, leaders], *(pairs.ravel() for pairs in r.pairs)])
        for r in rows
    ]
    if alive:
        most = np.array(alive) / limit
        constraints.append(optimize.LinearConstraint(sparse.csr_array(most), -np.inf, 1.0))
    whole = np.zeros(next_column, dtype=np.int64)
    whole[: first[-1]] = 1
    begin = time.perf_counter()
    found = optimize.milp(
        np.concatenate(costs), integrality=whole, bounds=optimize.Bounds(0, 1),
        constraints=constraints, options={"time_limit": max(time_limit, 0.0), "mip_rel_gap": gap},
    )  # fmt: skip
    status = {0: "optimal", 1: "time limit", 2: "infeasible"}.get(found.status, found.message)
    choice = None
    if found.x is not None:
        # The largest variable of each leader: rounding takes care of the solver's tolerance.
        order = np.lexsort((-found.x[: first[-1]], leaders))
        choice = choices[order[first[:-1]]]
    left = float(found.mip_gap) if found.x is not None and status == "time limit" else 0.0
    return Solution(status, choice, time.perf_counter() - begin, left)


def alpa(
    analysis: Analysis,
    mesh: AnyMesh,
    hardware: AnyHardware,
    *,
    memory_bytes: float | None = None,
    time_limit: float = 60.0,
    overlap: Overlap = "partial",
    constraints: Constraints | None = None,
    collapse: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The plan that Alpa's integer linear program finds.

    ``time_limit`` is in seconds from the call: the solver has what building its program leaves, and
    is asked once in any case.  ``constraints`` hold: ops of which one says something choose for
    themselves, of what it leaves; ``fix`` means the dimension, and not its color.  ``collapse``
    gives it one op of each class of :class:`toast.space.Space`, which Alpa does not.  ``Plan.note``
    says how the solver ended.
    """
    called = time.perf_counter()
    mesh, hardware = given.system_of(mesh, hardware)
    limit = given.limit_of(memory_bytes, hardware)
    if not given.is_number(time_limit) or not time_limit >= 0:
        raise SearchError(f"time limit {time_limit!r}: must be positive, or 0")
    tell = progress or (lambda _stage: None)
    seconds = dict(analysis.seconds)
    begin = time.perf_counter()
    tell("decision space")
    space = Space(analysis, mesh, constraints=constraints, collapse=collapse)
    model = CostModel(space, hardware, overlap=overlap)
    begin_fixed(model)
    seconds["decision space"] = time.perf_counter() - begin
    begin = time.perf_counter()
    tell("integer linear program")
    problem = Problem(model)
    seconds["integer linear program"] = time.perf_counter() - begin
    begin = time.perf_counter()
    tell("solver")
    best, priced = _best(problem, limit, called + time_limit, tell)
    seconds["solver"] = time.perf_counter() - begin
    found = Found((), best.state, best.cost, priced, seconds["solver"], ())
    return make_plan(
        model, found, memory_bytes=limit, seed=0, seconds=seconds, method="alpa", note=best.note
    )


@dataclasses.dataclass(frozen=True)
class _Candidate:
    state: States
    note: str
    cost: float
    peak: float
    fits: bool

    @property
    def rank(self) -> tuple[bool, float]:
        """As the search ranks states: what fits comes first."""
        return not self.fits, self.cost


def _priced(model: CostModel, states: States, limit: float, note: str) -> list[_Candidate]:
    prices = model.price(states)
    costs, peaks = model.cost(prices, limit).tolist(), prices.peak_bytes.tolist()
    return [
        _Candidate(state, note, cost, peak, peak <= limit)
        for state, cost, peak in zip(states, costs, peaks, strict=True)
    ]


def _best(
    problem: Problem, limit: float, end: float, tell: Callable[[str], None]
) -> tuple[_Candidate, int]:
    """The best state, and how many were priced; ``end`` is when the solver's time is over."""
    model = problem.model
    moments = {-1, problem.worst(np.zeros_like(problem.strategies.sizes))}
    rows = {moment: problem.memory(moment) for moment in sorted(moments)}
    candidates: list[_Candidate] = []
    room, note, suffix = limit, "", ""
    # The least room that has a solution, what that takes over the limit; the most that has none.
    accepted, over, refused = limit, 0.0, 0.0
    for attempt in range(_ATTEMPTS):
        left = end - time.perf_counter()
        if attempt and left <= 0:
            break
        found = solve(problem, rows.values(), room, left)
        note = _note(found) + suffix
        tell(
            f"solver: {note}, {len(rows)} memory rows of {size_text(room)}, "
            f"{time_text(found.seconds)}"
        )
        if found.status == "infeasible" and not candidates and rows:
            # The rows count too much rather than too little: a solution of more may fit.
            refused, room = room, 1.5 * room
            if room > _MOST_ROOM * limit:
                rows, suffix = {}, "; without the memory limit, which is infeasible"
            continue
        if found.status == "infeasible":
            refused = room
        elif found.choice is None:
            break
        else:
            state = problem.strategies.state(found.choice)
            candidates += _priced(model, state[None], limit, note)
            if not rows or candidates[-1].fits:
                break
            moment = problem.worst(found.choice)
            if moment not in rows:
                rows[moment] = problem.memory(moment)
                continue
            # Leave room for what the rows miss.
            accepted, over = room, candidates[-1].peak - limit
        room = max(accepted - over, (accepted + refused) / 2)
        if accepted - room < _FINEST * limit:
            break
    if not candidates or "time limit" in note:
        end_of = "worse than" if candidates else "without a solution; this is"
        note = f"{note}, {end_of} the best state that shards one kind of dimension"
        candidates += _priced(model, _simple_states(model.space), limit, note)
    return min(candidates, key=lambda c: c.rank), len(candidates)


def _note(found: Solution) -> str:
    return f"{found.status}, gap {found.gap:.1%}" if found.gap else found.status


def _simple_states(space: Space) -> States:
    """The unsharded state, and each color on all axes: data parallelism is one of them."""
    states = [space.initial]
    for color in dict.fromkeys((a.color, a.resolution) for a in space.actions):
        state = space.initial
        for action in space.actions:
            if (action.color, action.resolution) == color:
                state = space.apply(state, action)
        states.append(state)
    return np.stack(states)


def _axes(condition: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """``[...]`` sets of the axes for which ``[..., A]`` holds."""
    bits = (1 << np.arange(condition.shape[-1])).astype(np.uint8)
    return np.asarray(condition @ bits, dtype=np.uint8)


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
