"""Alpa's intra-operator pass (Zheng et al., OSDI 2022) on TOAST's analysis and cost model.

An integer linear program chooses one strategy per leader op (:mod:`toast.search.strategies`).
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

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse

from toast import inputs
from toast.analysis import Analysis
from toast.cost import CostModel, Overlap
from toast.errors import SearchError
from toast.inputs import AnyHardware, AnyMesh
from toast.plan import Plan, make_plan
from toast.search import SearchResult, begin_fixed
from toast.search.pairwise import Problem, Row
from toast.search.relaxation import LinearProgram
from toast.space import Constraints, Space, States
from toast.units import size_text, time_text

Ints = npt.NDArray[np.int64]

#: Solutions whose cost is within this fraction of the bound count as optimal.
GAP = 1e-4

#: Programs solved at most: each adds a row of memory, or leaves more room for copies.
_ATTEMPTS = 12

#: Room in units of the memory limit beyond which the limit is given up.
_MOST_ROOM = 2.0

#: Fraction of the memory limit below which the room for what rows miss is not refined.
_FINEST = 0.02


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
    program = LinearProgram.of(problem)
    leaders, choices = program.leaders, program.choices
    constraints = [program.constraint]
    alive = [
        np.concatenate([r.choices[choices, leaders], *(pairs.ravel() for pairs in r.pairs)])
        for r in rows
    ]
    if alive:
        most = np.array(alive) / limit
        constraints.append(optimize.LinearConstraint(sparse.csr_array(most), -np.inf, 1.0))
    whole = np.zeros(len(program.costs), dtype=np.int64)
    whole[: len(leaders)] = 1
    begin = time.perf_counter()
    found = optimize.milp(
        program.costs, integrality=whole, bounds=optimize.Bounds(0, 1),
        constraints=constraints, options={"time_limit": max(time_limit, 0.0), "mip_rel_gap": gap},
    )  # fmt: skip
    status = {0: "optimal", 1: "time limit", 2: "infeasible"}.get(found.status, found.message)
    # Rounding takes care of the solver's tolerance.
    choice = None if found.x is None else program.choice(found.x)
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
    mesh, hardware = inputs.system_of(mesh, hardware)
    limit = inputs.limit_of(memory_bytes, hardware)
    if not inputs.is_number(time_limit) or not time_limit >= 0:
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
    found = SearchResult((), best.state, best.cost, priced, seconds["solver"], ())
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
    room, note, suffix, late = limit, "", "", False
    # The least room that has a solution, what that takes over the limit; the most that has none.
    accepted, over, refused = limit, 0.0, 0.0
    for attempt in range(_ATTEMPTS):
        left = end - time.perf_counter()
        if attempt and left <= 0:
            late = True
            break
        found = solve(problem, rows.values(), room, left)
        note = _note(found) + suffix
        late |= found.status == "time limit"
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
    if not candidates or late:
        end_of = "worse than" if candidates else "without a solution; this is"
        note = f"{note}, {end_of} the best state that shards one kind of dimension"
        candidates += _priced(model, _simple_states(model.space), limit, note)
    best = min(candidates, key=lambda c: c.rank)
    if late and "time limit" not in best.note:
        best = dataclasses.replace(best, note=f"{best.note}; stopped at its time limit")
    return best, len(candidates)


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
