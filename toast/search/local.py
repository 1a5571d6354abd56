"""Local search: what a single change makes of a trajectory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from toast.search.ledger import Ledger, Trajectory
from toast.space import Action, States

Floats = npt.NDArray[np.float64]

#: Trajectories with the states that they lead to.
_Variants = tuple[list[tuple[Action, ...]], States]


def polish(
    ledger: Ledger, start: Trajectory, *, depth: int, stop: Callable[[], bool]
) -> Trajectory:
    """The trajectory after the changes that improve it, until none does or ``stop()``.

    Tried in this order, first improvement first: drop an action, swap two neighbours, put another
    one (or another resolution, or axis) in its place, insert one.
    """
    best, improved = start, True
    while improved:
        improved = False
        for actions, states in _neighbours(ledger, best.actions, depth):
            if stop():
                return best
            keys, _ = ledger.price(states)
            found = min(
                map(ledger.offer, keys, actions),
                key=lambda trajectory: trajectory.rank,
            )
            if found.rank < best.rank - 1e-9:
                best, improved = found, True
                break
    return best


def refine(
    ledger: Ledger,
    start: Trajectory,
    *,
    depth: int,
    hottest: int,
    widest: int,
    stop: Callable[[], bool],
) -> Trajectory:
    """The trajectory behind which refinements stand that improve it, the best first.

    Tried are the ``hottest`` single op classes and the ``widest`` parts of colors: those that the
    step spends most time on.
    """
    space = ledger.model.space
    best = start
    while len(best.actions) < depth and not stop():
        state = replay(ledger, best.actions)
        seconds = ledger.model.waiting(state)
        order = np.argsort(-seconds, kind="stable")[:hottest]
        offered = [a for k in order[seconds[order] > 0].tolist() for a in space.single(k)]
        offered += _promising(space.refinements, seconds, widest)
        if not offered:
            break
        states = np.concatenate([space.apply_all(state[None], action) for action in offered])
        keys, _ = ledger.price(states)
        variants = [(*best.actions, action) for action in offered]
        found = min(map(ledger.offer, keys, variants), key=lambda trajectory: trajectory.rank)
        if found.rank >= best.rank - 1e-12:
            break
        best = found
    return best


def _promising(refinements: Sequence[Action], seconds: Floats, count: int) -> list[Action]:
    """The refinements of the parts that ``seconds`` (of each op class) say are most worth it."""
    worth = np.array([
        sum(seconds[k] for k, _ in action.part) for action in refinements
    ])  # fmt: skip
    order = np.argsort(-worth, kind="stable")[:count]
    return [refinements[i] for i in order.tolist()]


def replay(ledger: Ledger, actions: Sequence[Action]) -> States:
    """The state that a trajectory leads to."""
    state = ledger.model.space.initial
    for action in actions:
        state = ledger.model.space.apply(state, action)
    return state


def _neighbours(ledger: Ledger, actions: tuple[Action, ...], depth: int) -> Iterator[_Variants]:
    space = ledger.model.space
    every = range(len(space.actions))
    length = len(actions)
    before = [space.initial]
    for action in actions:
        before.append(space.apply(before[-1], action))

    def then(states: States, rest: tuple[Action, ...]) -> States:
        for action in rest:
            states = space.apply_all(states, action)
        return states

    single: list[tuple[int, tuple[Action, ...]]] = [
        (i, actions[i + 1 :]) for i in range(length)
    ] + [(i, (actions[i + 1], actions[i], *actions[i + 2 :])) for i in range(length - 1)]
    if single:
        yield (
            [actions[:i] + rest for i, rest in single],
            np.concatenate([then(before[i][None], rest) for i, rest in single]),
        )
    for skip in (1, 0):  # replace, insert
        if not skip and length >= depth:
            continue
        for i in range(length + 1 - skip):
            rest = actions[i + skip :]
            yield (
                [(*actions[:i], other, *rest) for other in space.actions],
                then(space.apply_each(before[i], every), rest),
            )
