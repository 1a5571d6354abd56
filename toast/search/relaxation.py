"""The pairwise problem as a linear program; its rounded solutions are proposals for the search.

The best choice of all leaders solves an integer linear program, as in Alpa (Zheng et al., OSDI
2022).  Its relaxation is quick to solve; the solution is rounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from toast.cost import CostModel
from toast.cost.entities import Floats, Ints
from toast.search.pairwise import Problem
from toast.search.strategies import enumerate_strategies
from toast.space import States

if TYPE_CHECKING:
    from scipy import optimize

#: Maximum number of variables: a larger program takes longer than the search.
_LARGEST = 200_000

#: Maximum number of choices of all leaders: larger programs are not built.
_MOST_CHOICES = 12_000

#: Number of roundings of a solution; the best is kept.
_ROUNDINGS = 8


@dataclasses.dataclass(frozen=True)
class LinearProgram:
    """A problem in variables between 0 and 1: one per choice of a leader, one per pair of labels.

    ``leaders`` and ``choices`` describe the first variables.  The choices of each leader add up to
    1, and the pairs of a label to the choices that have the label.
    """

    costs: Floats  # in units of the unsharded step
    matrix: sparse.csr_array
    sums: Floats  # right-hand sides of the rows
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
            # At both ends, the pairs of a label add up to the choices that have it.
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
        """The equality constraints of the variables."""
        from scipy import optimize  # slow to import

        return optimize.LinearConstraint(self.matrix, self.sums, self.sums)

    def choice(self, values: Floats) -> Ints:
        """The choice of each leader with the largest variable."""
        return np.array([np.argmax(share) for share in self.shares(values)], dtype=np.int64)

    def shares(self, values: Floats) -> list[Floats]:
        """The values of each leader's choices, out of those of all variables."""
        first = np.flatnonzero(np.diff(self.leaders, prepend=-1))
        return np.split(values[: len(self.leaders)], first[1:])


def relaxed(problem: Problem, program: LinearProgram, seconds: float | None = None) -> Ints | None:
    """``[L]`` the rounded choices of the relaxed program; ``None`` if it takes over ``seconds``."""
    from scipy import optimize

    # Presolving takes longer than it saves.
    limit = np.inf if seconds is None else seconds
    solution = optimize.milp(
        program.costs, bounds=optimize.Bounds(0, 1), constraints=[program.constraint],
        options={"presolve": False, "time_limit": limit},
    )  # fmt: skip
    return None if solution.x is None else _rounded(problem, program.shares(solution.x))


def _rounded(problem: Problem, shares: list[Floats]) -> Ints:
    """The best of several roundings, by the cost of :class:`Problem`.

    Leaders choose one after another, at the least cost given the choices so far and the shares of
    the other leaders.  Then each leader improves its choice given all others, until none changes.
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

    roundings = []
    surest = np.argsort([-share.max() for share in shares], kind="stable")
    random = np.random.default_rng(0)
    for order in (surest, *(random.permutation(len(shares)) for _ in range(_ROUNDINGS - 1))):
        choice, changed = np.full(len(shares), -1), True
        while changed:
            before = choice.copy()
            for leader in order.tolist():
                choice[leader] = best(leader, choice)
            changed = bool((choice != before).any())
        roundings.append(choice)
    return min(roundings, key=problem.seconds)


def proposing(model: CostModel) -> Callable[[float | None], tuple[States, ...]]:
    """A function that computes proposals for a search; it may return none.

    The program is built here.  The function solves it, within about the given seconds, and releases
    the interpreter lock until it rounds: it can run in another thread.
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
        if seconds is not None and seconds <= 0.0:
            return ()  # HiGHS warns of such a limit
        choice = relaxed(problem, program, seconds)
        return () if choice is None else (model.space.within(strategies.state(choice)),)

    return solve


def _nothing(_seconds: float | None = None) -> tuple[States, ...]:
    return ()


def _both(rows: int, columns: int) -> tuple[Ints, Ints]:
    """The row of each pair in the constraints of the left end, then in those of the right end."""
    return np.repeat(np.arange(rows), columns), rows + np.tile(np.arange(columns), rows)
