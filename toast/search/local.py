"""Local search: what a single change makes of a trajectory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from toast.search.ledger import REFINEMENT_LENGTH, Ledger, Trajectory, length
from toast.space import Action, Scope, Space, States

Ints = npt.NDArray[np.int64]

#: Variants of a trajectory that are priced together, at least.
_BATCH = 128


class _Variants(NamedTuple):
    """Trajectories with the states that they lead to."""

    actions: list[tuple[Action, ...]]
    lengths: Ints
    states: States


class _Begun(NamedTuple):
    """Variants of a trajectory as far as they differ from it."""

    actions: list[tuple[Action, ...]]
    lengths: Ints  # with what is still to come
    states: States
    rest: int  # the number of the trajectory's action with which they go on


def polish(
    ledger: Ledger, start: Trajectory, *, depth: int, stop: Callable[[], bool]
) -> Trajectory:
    """The trajectory after the changes that improve it, until none does or ``stop()``.

    Tried in this order, in batches, of which the first with an improvement gives its best: drop an
    action, swap two neighbours, insert one, put another one (or another resolution, or axis) in its
    place.  Those two begin at the end, where what comes before stands as it is.
    """
    best, improved = start, True
    while improved:
        improved = False
        begun = _neighbours(ledger, best.actions, depth)
        for variants in _together(ledger.model.space, best.actions, begun):
            if stop():
                return best
            keys, _ = ledger.price(variants.states)
            ranks = ledger.ranks(keys, variants.lengths)
            place = int(np.argmin(ranks))
            found = ledger.offer(keys[place], variants.actions[place])
            if found.rank < best.rank - 1e-9:
                best, improved = found, True
                break
    return best


def refine(
    ledger: Ledger,
    starts: Sequence[Trajectory],
    *,
    depth: int,
    hottest: int,
    widest: int,
    groups: bool,
    effort: int,
    stop: Callable[[], bool],
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
    beam = [(start, replay(ledger, start.actions)) for start in dict.fromkeys(starts)]
    seen: set[bytes] = set()
    stale = most = 0
    while beam and stale < 3 and not stop():
        before = ledger.best.rank
        grown: dict[bytes, _Grown] = {}
        for trajectory, state in beam:
            longer = length(trajectory.actions) + REFINEMENT_LENGTH
            if len(trajectory.actions) >= depth or ledger.beaten(longer) or stop():
                continue
            offered = _promising(ledger, state, hottest, widest, groups)
            most = max(most, len(offered))
            rows, states = space.refine(state, offered)
            if not len(rows):
                continue
            keys, _ = ledger.price(states)
            ranks = ledger.ranks(keys, longer).tolist()
            for place, (key, rank) in enumerate(zip(keys, ranks, strict=True)):
                if key not in seen and (key not in grown or rank < grown[key].rank):
                    grown[key] = _Grown(rank, trajectory, int(rows[place]), states[place])
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
        kept = [*fitting[: width - len(over)], *over]
        seen.update(kept)
        beam = []
        for key in kept:
            found = grown[key]
            actions = _longer(space, found.parent, found.row)
            beam.append((Trajectory(found.rank, actions, ledger.cost(key)), found.state))
        stale = 0 if ledger.best.rank < before - 1e-12 else stale + 1


class _Grown(NamedTuple):
    """What a refinement makes of a trajectory."""

    rank: float
    parent: Trajectory
    row: int  # of ``Space.refinements``
    state: States


def _longer(space: Space, trajectory: Trajectory, row: int) -> tuple[Action, ...]:
    return (*trajectory.actions, *space.refinements.actions([row]))


def _promising(ledger: Ledger, state: States, hottest: int, widest: int, groups: bool) -> Ints:
    """The refinements that are tried behind a state, as :func:`refine` says."""
    space, seconds = ledger.model.space, ledger.model.waiting(state)
    family, refinements = space.classes.family, space.refinements

    def most(weights: npt.NDArray[Any]) -> Ints:
        return np.argsort(-weights, kind="stable")[:hottest]

    offered = [refinements.rows(Scope.FAMILY, most(np.bincount(family, seconds)))]
    if groups:
        several = np.bincount(family)[family] > 1
        classes = most(np.where(several, seconds, -1.0))
        alike = most(np.bincount(space.alike, seconds))
        offered.append(refinements.rows(Scope.CLASS, classes[several[classes]]))
        offered.append(refinements.rows(Scope.ALIKE, alike))
    return np.concatenate([*offered, space.parts_by(seconds)[:widest]])


def replay(ledger: Ledger, actions: Sequence[Action]) -> States:
    """The state that a trajectory leads to."""
    state = ledger.model.space.initial
    for action in actions:
        state = ledger.model.space.apply(state, action)
    return state


def _together(
    space: Space, actions: tuple[Action, ...], variants: Iterator[_Begun]
) -> Iterator[_Variants]:
    """The variants of a trajectory in batches that are worth pricing."""
    waiting: list[_Begun] = []
    for variant in itertools.chain(variants, [None]):
        if variant and variant.actions:
            waiting.append(variant)
        if waiting and (variant is None or sum(len(w.actions) for w in waiting) >= _BATCH):
            yield _Variants(
                [begun + actions[w.rest :] for w in waiting for begun in w.actions],
                np.concatenate([w.lengths for w in waiting]),
                _finished(space, actions, waiting),
            )
            waiting = []


def _finished(space: Space, actions: tuple[Action, ...], variants: Sequence[_Begun]) -> States:
    """What variants of a trajectory lead to, in order: they take its actions together."""
    order = sorted(range(len(variants)), key=lambda number: variants[number].rest)
    states = variants[order[0]].states[:0]
    for place in range(variants[order[0]].rest, len(actions) + 1):
        joining = [variants[number].states for number in order if variants[number].rest == place]
        if joining:
            states = np.concatenate([states, *joining])
        if place < len(actions):
            states = space.apply_all(states, actions[place])
    ends = np.cumsum([len(variants[number].states) for number in order])
    parts = dict(zip(order, np.split(states, ends[:-1]), strict=True))
    return np.concatenate([parts[number] for number in range(len(variants))])


def _neighbours(ledger: Ledger, actions: tuple[Action, ...], depth: int) -> Iterator[_Begun]:
    space = ledger.model.space
    every = range(len(space.actions))
    count, whole = len(actions), length(actions)
    before = [space.initial]
    for action in actions:
        before.append(space.apply(before[-1], action))
    for i in range(count):
        shorter = whole - length(actions[i : i + 1])
        yield _Begun([actions[:i]], np.array([shorter]), before[i][None], i + 1)
    for i in range(count - 1):
        one, other = actions[i : i + 2]
        state = space.apply(space.apply(before[i], other), one)
        yield _Begun([(*actions[:i], other, one)], np.array([whole]), state[None], i + 2)
    for skip in (0, 1):  # insert, replace
        if not skip and count >= depth:
            continue
        for i in range(count - skip, -1, -1):
            longer = whole - length(actions[i : i + skip]) + 1
            if ledger.beaten(longer):
                continue
            states = space.apply_each(before[i], every)
            # What changes nothing is no better than what is there without it.
            some = np.flatnonzero((states != before[i]).any(axis=(1, 2)))
            yield _Begun(
                [(*actions[:i], space.actions[number]) for number in some.tolist()],
                np.full(len(some), longer),
                states[some],
                i + skip,
            )
