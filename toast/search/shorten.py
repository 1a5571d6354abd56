"""Shorter trajectories to the state of the best one.

A search makes detours: it shards a color, then undoes most of it by refinements.  Only the last
state matters; a plan with fewer actions is easier to read and ranks better (4.1).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from toast.search.ledger import REFINEMENT_LENGTH, Ledger, Trajectory, length, state_key
from toast.search.regions import actions_to
from toast.search.stage import Budget
from toast.space import NONE, Action, Space, States

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Shortening:
    """A stage: looks for fewer or shorter actions that lead to the state of the best trajectory."""

    #: Width of the beam search over actions on whole colors.
    beam: int = 8

    def __call__(self, ledger: Ledger, budget: Budget) -> list[Trajectory]:
        """The starting trajectories, and the best one."""
        actions = ledger.best.actions
        if ledger.memory.get(Shortening) == actions:  # unchanged since the last time
            return [*ledger.starts, ledger.best]
        state = ledger.replay(actions)
        shorter = shortest(ledger.model.space, state, self.beam)
        if length(shorter) < length(actions) and (ledger.replay(shorter) == state).all():
            ledger.offer(state_key(state), shorter)
        ledger.memory[Shortening] = ledger.best.actions
        return [*ledger.starts, ledger.best]


class _ColorPrefix(NamedTuple):
    """Actions on whole colors, which refinements complete; the smallest prefix is the best."""

    length: int  # of the whole trajectory
    classes: int  # op classes that refinements change
    actions: tuple[int, ...]
    state: States


def shortest(space: Space, target: States, beam: int = 8) -> tuple[Action, ...]:
    """Actions on whole colors, then refinements, that lead to ``target`` (``[classes, axes]``).

    A beam search of this width for the shortest such trajectory.  One refinement covers all op
    classes that give an axis to the same color, or remove it.  Where axes change places within an
    op, the refinements may miss the target.
    """
    every = range(len(space.actions))
    groups = _Groups(space, target)
    (start,) = groups.prefixes([()], space.initial[None])
    best, prefixes, known = start, [start], {state_key(space.initial)}
    while prefixes and len(prefixes[0].actions) + 1 < best.length:
        children: list[_ColorPrefix] = []
        for prefix in prefixes:
            after = space.apply_each(prefix.state, every)
            some = np.flatnonzero((after != prefix.state).any(axis=(1, 2)))
            longer = [(*prefix.actions, number) for number in some.tolist()]
            for child in groups.prefixes(longer, after[some]):
                key = state_key(child.state)
                if key not in known:
                    known.add(key)
                    children.append(child)
        prefixes = sorted(children, key=lambda child: child[:3])[:beam]
        best = min([best, *prefixes[:1]], key=lambda prefix: prefix[:3])
    return (
        *(space.actions[number] for number in best.actions),
        *groups.refinements(space, best.state),
    )


class _Groups:
    """The op classes of a state by axis and by the color that holds it: one refinement each."""

    def __init__(self, space: Space, target: States) -> None:
        self._target = target
        classes, axes = target.shape
        color = [
            [space.color_of(k, factor) for factor in row] for k, row in enumerate(target.tolist())
        ]
        color_and_axis = np.array(color).reshape(classes, axes) * axes + np.arange(axes)
        self._order = np.argsort(color_and_axis, axis=None, kind="stable")
        ordered = color_and_axis.ravel()[self._order]
        self._first = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))

    def prefixes(self, actions: list[tuple[int, ...]], states: States) -> list[_ColorPrefix]:
        """Prefixes that lead to ``states`` (``[prefixes, classes, axes]``)."""
        differs = (states != self._target).reshape(len(states), self._target.size)[:, self._order]
        counts = np.add.reduceat(differs, self._first, axis=1, dtype=np.int64)
        lengths = REFINEMENT_LENGTH * (counts > 0).sum(axis=1)
        return [
            _ColorPrefix(len(taken) + rest, number, taken, state)
            for taken, rest, number, state in zip(
                actions, lengths.tolist(), counts.sum(axis=1).tolist(), states, strict=True
            )
        ]

    def refinements(self, space: Space, state: States) -> list[Action]:
        """The refinements from ``state`` to the target; those that remove axes come first."""
        differs = state != self._target
        actions = [
            action
            for axis in range(state.shape[1])
            for action in actions_to(space, np.flatnonzero(differs[:, axis]), self._target, axis)
        ]
        return sorted(actions, key=lambda action: action.part[0][1] != NONE)
