"""Alpa's intra-operator pass (Zheng et al., OSDI 2022) on TOAST's analysis and cost model.

An integer linear program chooses one strategy per leader op (:mod:`toast.search.strategies`).
Its cost is that of Alpa: the time of each op under its strategy, with the sums over devices that it
needs, and the time of the reshard along every def-use edge whose ends disagree, linearised with one
variable per pair of shardings.  Live values must fit into the memory limit; rows for this are added
at the program points where a solution does not fit.  HiGHS solves the program.

Like Alpa, the program ignores repeated layers and the overlap of collectives with products.  Unlike
Alpa, it contains scattered sums, and the memory of copies after resharding.  The cost model prices
the plan like any other.
"""

from __future__ import annotations

import dataclasses
import itertools
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
from toast.search import SearchResult, begin_with_fixed
from toast.search.pairwise import Problem, Row
from toast.search.relaxation import LinearProgram
from toast.space import Constraints, Space, States
from toast.units import size_text, time_text

Ints = npt.NDArray[np.int64]

#: Solutions whose cost is within this fraction of the bound count as optimal.
GAP = 1e-4

#: Maximum number of solves; each adds a memory row, or leaves more memory for copies.
_ATTEMPTS = 12

#: The memory limit is dropped if even this multiple of it is infeasible.
_MOST_ROOM = 2.0

#: The memory for what rows miss is refined down to this fraction of the limit.
_FINEST = 0.02


@dataclasses.dataclass(frozen=True)
class Solution:
    """The result of the solver: its status, and its choices if there is a solution."""

    #: ``optimal``, ``time limit``, ``infeasible``, or a message of HiGHS.
    status: str
    choice: Ints | None
    seconds: float
    #: The relative distance to the bound, if the solution is not proven optimal.
    gap: float = 0.0


def solve(
    problem: Problem, rows: Iterable[Row], limit: float, time_limit: float, *, gap: float = GAP
) -> Solution:
    """Solve the integer linear program.

    ``rows`` stay within ``limit`` bytes.  ``time_limit`` is in seconds, ``gap`` relative.
    """
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
    result = optimize.milp(
        program.costs, integrality=whole, bounds=optimize.Bounds(0, 1),
        constraints=constraints, options={"time_limit": max(time_limit, 0.0), "mip_rel_gap": gap},
    )  # fmt: skip
    status = {0: "optimal", 1: "time limit", 2: "infeasible"}.get(result.status, result.message)
    # Rounding removes the solver's tolerance.
    choice = None if result.x is None else program.choice(result.x)
    left = float(result.mip_gap) if result.x is not None and status == "time limit" else 0.0
    return Solution(status, choice, time.perf_counter() - begin, left)


def alpa(
    analysis: Analysis,
    mesh: AnyMesh,
    hardware: AnyHardware,
    *,
    memory_bytes: float | None = None,
    safety: float | None = None,
    time_limit: float = 60.0,
    overlap: Overlap = "partial",
    constraints: Constraints | None = None,
    collapse: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The plan of Alpa's integer linear program.

    ``time_limit`` is in seconds from the call: the solver gets the time that remains after building
    the program, and runs at least once.  ``memory_bytes`` is the limit per device (default: the
    hardware's), and ``safety`` the odds with which a plan must fit.  ``constraints`` hold: a
    constrained op chooses among the strategies that they allow; ``fix`` means the dimension, not
    its color.  With ``collapse``, the program has one op per class of
    :class:`toast.space.Space`, unlike Alpa's.  ``Plan.note`` has the status of the solver.
    ``progress`` is called with messages.

    Raises :class:`toast.errors.SearchError` for an invalid time limit.
    """
    called = time.perf_counter()
    mesh, hardware = inputs.system_of(mesh, hardware)
    limit = inputs.limit_of(memory_bytes, hardware)
    if not inputs.is_number(time_limit) or not time_limit >= 0:
        raise SearchError(f"time limit {time_limit!r}: must be a number that is not negative")
    report_stage = progress or (lambda _stage: None)
    seconds = dict(analysis.seconds)
    begin = time.perf_counter()
    report_stage("decision space")
    space = Space(analysis, mesh, constraints=constraints, collapse=collapse)
    model = CostModel(space, hardware, overlap=overlap, safety=safety)
    begin_with_fixed(model)
    seconds["decision space"] = time.perf_counter() - begin
    begin = time.perf_counter()
    report_stage("integer linear program")
    problem = Problem(model)
    seconds["integer linear program"] = time.perf_counter() - begin
    begin = time.perf_counter()
    report_stage("solver")
    best, priced = _best(problem, limit, called + time_limit, report_stage)
    seconds["solver"] = time.perf_counter() - begin
    result = SearchResult((), best.state, best.cost, priced, seconds["solver"], ())
    return make_plan(
        model, result, memory_bytes=limit, seed=0, seconds=seconds, method="alpa", note=best.note
    )


@dataclasses.dataclass(frozen=True)
class _Candidate:
    state: States
    note: str
    cost: float
    #: Bytes to compare with the limit.
    needed: float
    fits: bool

    @property
    def rank(self) -> tuple[bool, float]:
        """The rank of a candidate: plans that fit come first."""
        return not self.fits, self.cost


def _priced(model: CostModel, states: States, limit: float, note: str) -> list[_Candidate]:
    prices = model.price(states)
    costs = model.cost(prices, limit).tolist()
    needed = model.needed_bytes(prices.argument_bytes, prices.peak_bytes).tolist()
    return [
        _Candidate(state, note, cost, size, size <= limit)
        for state, cost, size in zip(states, costs, needed, strict=True)
    ]


def _best(
    problem: Problem, limit: float, end: float, report_stage: Callable[[str], None]
) -> tuple[_Candidate, int]:
    """The best state, and the number of priced states; ``end`` is the end of the solver's time."""
    model = problem.model
    moments = {-1, problem.worst(np.zeros_like(problem.strategies.sizes))}
    rows = {moment: problem.memory(moment) for moment in sorted(moments)}  # by local peak
    candidates: list[_Candidate] = []
    room, note, suffix, late = limit, "", "", False
    # The least feasible memory, its excess over the limit, and the largest infeasible memory.
    accepted, over, refused = limit, 0.0, 0.0
    for attempt in range(_ATTEMPTS):
        left = end - time.perf_counter()
        if attempt and left <= 0:
            late = True
            break
        solution = solve(problem, [*itertools.chain(*rows.values())], room, left)
        note = _note(solution) + suffix
        late |= solution.status == "time limit"
        report_stage(
            f"solver: {note}, {len(rows)} memory rows of {size_text(room)}, "
            f"{time_text(solution.seconds)}"
        )
        if solution.status == "infeasible" and not candidates and rows:
            # The rows overestimate memory, so a solution with more memory may fit.
            refused, room = room, 1.5 * room
            if room > _MOST_ROOM * limit:
                rows, suffix = {}, "; without the memory limit, which is infeasible"
            continue
        if solution.status == "infeasible":
            refused = room
        elif solution.choice is None:
            break
        else:
            state = problem.strategies.state(solution.choice)
            candidates += _priced(model, state[None], limit, note)
            if not rows or candidates[-1].fits:
                break
            moment = problem.worst(solution.choice)
            if moment not in rows:
                rows[moment] = problem.memory(moment)
                continue
            # Leave memory for what the rows miss.
            accepted, over = room, candidates[-1].needed - limit
        room = max(accepted - over, (accepted + refused) / 2)
        if accepted - room < _FINEST * limit:
            break
    if not candidates or late:
        relation = "worse than" if candidates else "without a solution; this is"
        note = f"{note}, {relation} the best state that shards one kind of dimension"
        candidates += _priced(model, _simple_states(model.space), limit, note)
    best = min(candidates, key=lambda c: c.rank)
    if late and "time limit" not in best.note:
        best = dataclasses.replace(best, note=f"{best.note}; stopped at its time limit")
    return best, len(candidates)


def _note(solution: Solution) -> str:
    return f"{solution.status}, gap {solution.gap:.1%}" if solution.gap else solution.status


def _simple_states(space: Space) -> States:
    """The unsharded state, and each color on all axes, such as data parallelism."""
    states = [space.initial]
    for color in dict.fromkeys((a.color, a.resolution) for a in space.actions):
        state = space.initial
        for action in space.actions:
            if (action.color, action.resolution) == color:
                state = space.apply(state, action)
        states.append(state)
    return np.stack(states)
