"""Local search: what a single change makes of a trajectory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from toast.search.ledger import REFINEMENT_LENGTH, Ledger, Trajectory, length
from toast.space import Action, States

#: Variants of a trajectory that are priced together, at least.
_BATCH = 64

_WORST = Trajectory(np.inf, ())

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
        for actions, states in _together(_neighbours(ledger, best.actions, depth)):
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
    parts of colors; the beam is as wide as ``effort`` states per step allow.
    """
    space = ledger.model.space
    family = space.classes.family
    several = np.bincount(family)[family] > 1
    beam = list(dict.fromkeys(starts))
    seen: set[bytes] = set()
    stale = most = 0
    while beam and stale < 3 and not stop():
        before = ledger.best.rank
        grown: dict[bytes, Trajectory] = {}
        for trajectory in beam:
            longer = length(trajectory.actions) + REFINEMENT_LENGTH
            if len(trajectory.actions) >= depth or ledger.beaten(longer) or stop():
                continue
            state = replay(ledger, trajectory.actions)
            seconds = ledger.model.waiting(state)
            families = np.argsort(-np.bincount(family, seconds), kind="stable")[:hottest]
            offered = [action for f in families.tolist() for action in space.of_family(f)]
            if groups:
                order = np.argsort(-np.where(several, seconds, -1.0), kind="stable")[:hottest]
                offered += [
                    action for k in order.tolist() if several[k] for action in space.single(k)
                ]
                hot = np.argsort(-np.bincount(space.alike, seconds), kind="stable")[:hottest]
                offered += [action for number in hot.tolist() for action in space.together(number)]
            promising = np.argsort(-space.worth(seconds), kind="stable")[:widest]
            offered += [space.refinements[i] for i in promising.tolist()]
            most = max(most, len(offered))
            if not offered:
                continue
            keys, _ = ledger.price(space.refine_each(state, offered))
            for key, action in zip(keys, offered, strict=True):
                found = ledger.offer(key, (*trajectory.actions, action))
                if key not in seen and found.rank < grown.get(key, _WORST).rank:
                    grown[key] = found
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
        beam = [grown[key] for key in kept]
        stale = 0 if ledger.best.rank < before - 1e-12 else stale + 1


def replay(ledger: Ledger, actions: Sequence[Action]) -> States:
    """The state that a trajectory leads to."""
    state = ledger.model.space.initial
    for action in actions:
        state = ledger.model.space.apply(state, action)
    return state


def _together(variants: Iterator[_Variants]) -> Iterator[_Variants]:
    """The variants in batches that are worth pricing."""
    waiting: list[_Variants] = []
    for variant in itertools.chain(variants, [None]):
        if variant and variant[0]:
            waiting.append(variant)
        if waiting and (variant is None or sum(len(w) for w, _ in waiting) >= _BATCH):
            yield (
                [actions for several, _ in waiting for actions in several],
                np.concatenate([states for _, states in waiting]),
            )
            waiting = []


def _neighbours(ledger: Ledger, actions: tuple[Action, ...], depth: int) -> Iterator[_Variants]:
    space = ledger.model.space
    every = range(len(space.actions))
    count = len(actions)
    before = [space.initial]
    for action in actions:
        before.append(space.apply(before[-1], action))

    def then(states: States, rest: tuple[Action, ...]) -> States:
        for action in rest:
            states = space.apply_all(states, action)
        return states

    single: list[tuple[int, tuple[Action, ...]]] = [(i, actions[i + 1 :]) for i in range(count)] + [
        (i, (actions[i + 1], actions[i], *actions[i + 2 :])) for i in range(count - 1)
    ]
    if single:
        yield (
            [actions[:i] + rest for i, rest in single],
            np.concatenate([then(before[i][None], rest) for i, rest in single]),
        )
    for skip in (1, 0):  # replace, insert
        if not skip and count >= depth:
            continue
        for i in range(count + 1 - skip):
            rest = actions[i + skip :]
            if ledger.beaten(length((*actions[:i], *rest)) + 1):
                continue
            yield (
                [(*actions[:i], other, *rest) for other in space.actions],
                then(space.apply_each(before[i], every), rest),
            )
