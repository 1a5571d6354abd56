"""Local search: single changes to the actions of a trajectory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from toast.search.ledger import Ledger, Trajectory, length
from toast.search.stage import Budget
from toast.space import Action, Space, States

Ints = npt.NDArray[np.int64]

#: Minimum number of variants priced in one batch.
_BATCH = 64

#: Later rounds polish trajectories whose cost is at most this multiple of the best cost.
_FAR = 1.5


@dataclasses.dataclass(frozen=True)
class Polishing:
    """A stage: single changes to the actions of trajectories, until none improves them."""

    def __call__(self, ledger: Ledger, budget: Budget) -> list[Trajectory]:
        """The starting trajectories, polished unless they cost far too much, and the empty one."""
        # Later rounds begin anew: most of their trajectories end where those of the first one did.
        most = np.inf if not budget.round else _FAR * ledger.best.cost
        polished = [
            polish(ledger, start) if start.cost <= most else start for start in ledger.starts
        ]
        return [*polished, ledger.begin()]


class _Variants(NamedTuple):
    """Trajectories with the states that they lead to."""

    actions: list[tuple[Action, ...]]
    lengths: Ints
    states: States


class _Prefix(NamedTuple):
    """The beginnings of variants; the trajectory's remaining actions follow."""

    actions: list[tuple[Action, ...]]
    lengths: Ints  # of the whole variants
    states: States
    rest: int  # index of the first remaining action of the trajectory


def polish(ledger: Ledger, start: Trajectory) -> Trajectory:
    """Change a trajectory as long as it improves.

    In this order: drop an action, swap two neighbours, insert an action, replace one (also by
    another resolution or axis).  Changes are priced in batches; the best variant of the first batch
    with an improvement is taken.  Insertions and replacements begin at the end.  The ledger keeps
    the results, so a search polishes a trajectory only once.
    """
    ends: dict[tuple[Action, ...], Trajectory] = ledger.memory.setdefault(polish, {})
    path, best, improved = [start.actions], start, True
    while improved and best.actions not in ends:
        improved = False
        prefixes = _neighbours(ledger, best.actions)
        for variants in _together(ledger.model.space, best.actions, prefixes):
            keys, _ = ledger.price(variants.states)
            ranks = ledger.ranks(keys, variants.lengths)
            place = int(np.argmin(ranks))
            variant = ledger.offer(keys[place], variants.actions[place])
            if variant.rank < best.rank - 1e-9:
                best, improved = variant, True
                path.append(best.actions)
                break
    best = ends.get(best.actions, best)
    ends.update(dict.fromkeys(path, best))
    return best


def _together(
    space: Space, actions: tuple[Action, ...], variants: Iterator[_Prefix]
) -> Iterator[_Variants]:
    """The variants of a trajectory, in batches that are worth pricing."""
    waiting: list[_Prefix] = []
    for variant in itertools.chain(variants, [None]):
        if variant and variant.actions:
            waiting.append(variant)
        if waiting and (variant is None or sum(len(w.actions) for w in waiting) >= _BATCH):
            yield _Variants(
                [prefix + actions[w.rest :] for w in waiting for prefix in w.actions],
                np.concatenate([w.lengths for w in waiting]),
                _finished(space, actions, waiting),
            )
            waiting = []


def _finished(space: Space, actions: tuple[Action, ...], variants: Sequence[_Prefix]) -> States:
    """The final states of variants, in order; variants take common actions together."""
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


def _neighbours(ledger: Ledger, actions: tuple[Action, ...]) -> Iterator[_Prefix]:
    space = ledger.model.space
    every = range(len(space.actions))
    count, whole = len(actions), length(actions)
    before = [space.initial]
    for action in actions:
        before.append(space.apply(before[-1], action))
    for i in range(count):
        shorter = whole - length(actions[i : i + 1])
        yield _Prefix([actions[:i]], np.array([shorter]), before[i][None], i + 1)
    for i in range(count - 1):
        one, other = actions[i : i + 2]
        state = space.apply(space.apply(before[i], other), one)
        yield _Prefix([(*actions[:i], other, one)], np.array([whole]), state[None], i + 2)
    for skip in (0, 1):  # insert, replace
        if not skip and count >= ledger.depth:
            continue
        later: States | None = None
        for i in range(count - skip, -1, -1):
            longer = whole - length(actions[i : i + skip]) + 1
            if ledger.beaten(longer):
                later = None
                continue
            states = space.apply_each(before[i], every)
            # An action without effect is no improvement, nor is one that only replaces its like.
            new = (states != before[i]).any(axis=(1, 2))
            if skip:
                new &= (states != before[i + 1]).any(axis=(1, 2))
            elif later is not None:
                # Most actions have the same effect one place later, which was tried before.
                new &= (space.apply_all(states, actions[i]) != later).any(axis=(1, 2))
            later = states
            some = np.flatnonzero(new)
            yield _Prefix(
                [(*actions[:i], space.actions[number]) for number in some.tolist()],
                np.full(len(some), longer),
                states[some],
                i + skip,
            )
