"""Refinements: parts of colors sharded otherwise than the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from toast.search.ledger import REFINEMENT_LENGTH, Ledger, Trajectory, length
from toast.search.stage import Budget
from toast.space import Action, Scope, Space, States

Ints = npt.NDArray[np.int64]

#: Op classes up to which a program is small: with half as many, twice the effort goes into it; and
#: refinements begin even with what is far from the best.
_SMALL = 24


@dataclasses.dataclass(frozen=True)
class Refining:
    """A stage: a beam search of refinements behind the trajectories that it begins with."""

    #: Op classes whose sharding is changed alone: those that the step spends most time on; and
    #: groups of classes that differ in sizes only.
    hottest: int = 24
    #: Parts of colors that are sharded apart from the rest.
    widest: int = 256
    #: States that are priced in one step from the best trajectories; of small programs more.
    effort: int = 1024
    #: Whether single classes of larger families, and groups of classes, are tried as well.
    groups: bool = False
    #: Whether the families of arguments are changed alone, in place of all others: they take
    #: hardly any time themselves, and users ask why an argument is not sharded otherwise.
    arguments: bool = False

    def __call__(self, ledger: Ledger, budget: Budget) -> list[Trajectory]:
        """What the stage begins with, and the best trajectory."""
        # States of a few op classes cost next to nothing.
        times = _SMALL / max(1, len(ledger.model.space.initial))
        starts = sorted(start for start in ledger.starts if times >= 1 or not ledger.far(start))
        refine(ledger, starts, self, effort=max(1, int(times)) * self.effort)
        return [*ledger.starts, ledger.best]


def refine(
    ledger: Ledger, starts: Sequence[Trajectory], settings: Refining, *, effort: int
) -> None:
    """Put refinements behind trajectories, one after the other; the ledger knows the best.

    A beam search: of all that one more refinement makes of the beam's trajectories the best stay,
    even if they are no better, until three steps bring nothing.  Tried are the ``hottest`` families
    of op classes, by what the step spends on them, with ``groups`` the ``hottest`` classes of
    larger families and the ``hottest`` groups of classes that are alike as well, and the ``widest``
    parts of colors, and those that change something are priced; the beam is as wide as ``effort``
    tries per step allow.
    """
    space = ledger.model.space
    beam = [(start, ledger.replay(start.actions)) for start in dict.fromkeys(starts)]
    seen: set[bytes] = set()
    stale = most = 0
    while beam and stale < 3:
        before = ledger.best.rank
        grown: dict[bytes, _Child] = {}
        for trajectory, state in beam:
            longer = length(trajectory.actions) + REFINEMENT_LENGTH
            if len(trajectory.actions) >= ledger.depth or ledger.beaten(longer):
                continue
            offered = _promising(ledger, state, settings)
            most = max(most, len(offered))
            rows, states = space.refine(state, offered)
            if not len(rows):
                continue
            keys, _ = ledger.price(states)
            ranks = ledger.ranks(keys, longer).tolist()
            for place, (key, rank) in enumerate(zip(keys, ranks, strict=True)):
                if key not in seen and (key not in grown or rank < grown[key].rank):
                    grown[key] = _Child(rank, trajectory, int(rows[place]), states[place])
            best = int(np.argmin(ranks))
            if ranks[best] < ledger.best.rank:
                ledger.offer(keys[best], _longer(space, trajectory, rows[best]))
            if len(grown) >= effort:
                break
        width = max(1, effort // max(1, most))
        ranked = sorted(grown, key=lambda key: grown[key].rank)
        # Half for what does not fit, or all that is left: the way to what does may lead through it.
        fitting = [key for key in ranked if ledger.fits(key)]
        over = [key for key in ranked if not ledger.fits(key)]
        over = over[: max(width // 2, width - len(fitting))]
        chosen = [*fitting[: width - len(over)], *over]
        seen.update(chosen)
        beam = []
        for key in chosen:
            child = grown[key]
            actions = _longer(space, child.parent, child.row)
            beam.append((Trajectory(child.rank, actions, ledger.cost(key)), child.state))
        stale = 0 if ledger.best.rank < before - 1e-12 else stale + 1


class _Child(NamedTuple):
    """What a refinement makes of a trajectory."""

    rank: float
    parent: Trajectory
    row: int  # of ``Space.refinements``
    state: States


def _longer(space: Space, trajectory: Trajectory, row: int) -> tuple[Action, ...]:
    return (*trajectory.actions, *space.refinements.actions([row]))


def _promising(ledger: Ledger, state: States, settings: Refining) -> Ints:
    """The refinements that are tried behind a state, as :func:`refine` says."""
    space, seconds = ledger.model.space, ledger.model.waiting(state)
    family, refinements = space.classes.family, space.refinements

    def most(weights: npt.NDArray[Any]) -> Ints:
        return np.argsort(-weights, kind="stable")[: settings.hottest]

    if settings.arguments:
        return refinements.rows(Scope.FAMILY, np.unique(family[space.arguments]))
    offered = [refinements.rows(Scope.FAMILY, most(np.bincount(family, seconds)))]
    if settings.groups:
        several = np.bincount(family)[family] > 1
        classes = most(np.where(several, seconds, -1.0))
        alike = most(np.bincount(space.alike, seconds))
        offered.append(refinements.rows(Scope.CLASS, classes[several[classes]]))
        offered.append(refinements.rows(Scope.ALIKE, alike))
    return np.concatenate([*offered, space.parts_by(seconds)[: settings.widest]])
