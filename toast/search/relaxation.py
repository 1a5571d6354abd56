"""The pairwise problem as a linear program, whose rounded solutions are proposals for the search.

The best choice of all leaders is an integer linear program, as in Alpa (Zheng et al., OSDI 2022).
Its relaxation is solved in a moment, and rounded.
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

#: Variables of a program beyond which it is not solved: it would take longer than the search.
_LARGEST = 200_000

#: Choices of all leaders beyond which the program is not even written: three axes have many.
_MOST_CHOICES = 12_000

#: Roundings of a solution, of which the best is kept.
_ROUNDINGS = 8


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
        choice = relaxed(problem, program, seconds)
        return () if choice is None else (model.space.within(strategies.state(choice)),)

    return solve


def _nothing(_seconds: float | None = None) -> tuple[States, ...]:
    return ()


def _both(rows: int, columns: int) -> tuple[Ints, Ints]:
    """Row of each pair in the constraints of the left end, and of the right end behind them."""
    return np.repeat(np.arange(rows), columns), rows + np.tile(np.arange(columns), rows)
