"""Path relinking: what another state does better, region by region.

Where a trajectory's state differs from another one the op classes form regions: those that uses tie
together, whole or between products.  Each region is taken over as a refinement, alone and with
others, if that is worth it; so two states that are good in different places make a better one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from toast.graphs import components
from toast.search.ledger import REFINEMENT_LENGTH, Ledger, Trajectory, length
from toast.search.local import replay
from toast.space import Action, Space, States

#: Regions that are tried together, the best ones first.
_TOGETHER = 32

#: Times that all regions are tried anew.
_ROUNDS = 4

#: What makes a region the other's.
_Change = tuple[Action, ...]


def relink(
    ledger: Ledger, start: Trajectory, target: States, *, depth: int, stop: Callable[[], bool]
) -> Trajectory:
    """The trajectory behind ``start`` with the regions of ``target`` that improve it.

    ``target`` is ``[classes, axes]``.
    """
    space, best = ledger.model.space, start
    for _ in range(_ROUNDS):
        if stop() or ledger.beaten(length(best.actions) + REFINEMENT_LENGTH):
            break
        state = replay(ledger, best.actions)
        changes = list(dict.fromkeys(_changes(space, state, target)))
        if not changes:
            break
        tried: list[tuple[_Change, States]] = []
        for change in changes:
            after = state
            for action in change:
                after = space.apply(after, action)
            if (after != state).any():
                tried.append((change, after))
        if not tried:
            break
        keys, costs = ledger.price(np.stack([after for _, after in tried]))
        order = np.argsort(costs, kind="stable")[:_TOGETHER].tolist()
        offered = [(keys[i], (*best.actions, *tried[i][0])) for i in order]
        # The best together: each where it still changes something.
        together, after, several = [*best.actions], state, []
        for i in order:
            for action in tried[i][0]:
                then = space.apply(after, action)
                if (then != after).any():
                    together.append(action)
                    after = then
            several.append((tuple(together), after))
        keys, _ = ledger.price(np.stack([after for _, after in several]))
        offered += zip(keys, (actions for actions, _ in several), strict=True)
        found = [ledger.offer(*each) for each in offered if len(each[1]) <= depth]
        better = min(found, key=lambda f: f.rank, default=best)
        if not better.rank < best.rank - 1e-9:
            break
        best = better
    return best


def _changes(space: Space, state: States, target: States) -> Iterator[_Change]:
    """Refinements that make regions the target's: along each axis, and along all of them."""
    differs = state != target
    axes = range(state.shape[1])
    for links in (space.links, space.links[~space.products[space.links].any(axis=1)]):
        for axis in axes:
            for region in _regions(differs[:, axis], links):
                yield _takes(space, region, target, axis)
        for region in _regions(differs.any(axis=1), links):
            several = [axis for axis in axes if differs[region, axis].any()]
            if len(several) > 1:
                # Axes that go make room for those that come.
                goes = [axis for axis in several if (target[region, axis] < 0).all()]
                comes = [axis for axis in several if axis not in goes]
                yield tuple(
                    action
                    for axis in (*goes, *comes)
                    for action in _takes(space, region[differs[region, axis]], target, axis)
                )


def _takes(
    space: Space, region: npt.NDArray[np.int64], target: States, axis: int
) -> tuple[Action, ...]:
    """The refinements that give an axis to what holds it in the target, one for each color."""
    parts: dict[int, list[tuple[int, int]]] = {}
    for k, factor in zip(region.tolist(), target[region, axis].tolist(), strict=True):
        parts.setdefault(space.color_of(k, factor), []).append((k, factor))
    return tuple(Action(color, (), axis, tuple(part)) for color, part in parts.items())


def _regions(
    inside: npt.NDArray[np.bool_], links: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.int64]]:
    """The op classes ``inside`` (``[K]``) that ``links`` tie together, in order."""
    label = components(len(inside), links[inside[links].all(axis=1)])
    places = np.flatnonzero(inside)
    order = places[np.argsort(label[places], kind="stable")]
    return np.split(order, np.flatnonzero(np.diff(label[order])) + 1) if len(order) else []
