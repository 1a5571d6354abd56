"""Regions, in which two states differ, and the actions that copy the difference.

A region is a set of op classes that differ and that uses connect: all uses, or those that touch no
product.  Each region is one change, so the better parts of two states can be combined.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from toast.graphs import components
from toast.space import NONE, Action, Space, States


def region_changes(space: Space, state: States, target: States) -> Iterator[tuple[Action, ...]]:
    """Refinements that give regions the target's sharding: along each axis, and along all axes."""
    differs = state != target
    axes = range(state.shape[1])
    for links in (space.links, space.links[~space.products[space.links].any(axis=1)]):
        for axis in axes:
            for region in _regions(differs[:, axis], links):
                yield actions_to(space, region, target, axis)
        for region in _regions(differs.any(axis=1), links):
            several = [axis for axis in axes if differs[region, axis].any()]
            if len(several) > 1:
                # Remove axes first, to make room for others.
                goes = [axis for axis in several if (target[region, axis] < 0).all()]
                comes = [axis for axis in several if axis not in goes]
                yield (
                    *_unshard(space, state, target, region),
                    *(
                        action
                        for axis in (*goes, *comes)
                        for action in actions_to(space, region[differs[region, axis]], target, axis)
                    ),
                )


def _unshard(
    space: Space, state: States, target: States, region: npt.NDArray[np.int64]
) -> Iterator[Action]:
    """Refinements that remove the axes of op classes with restrictions, which ``target`` moves.

    Moved one by one, axes could be on factors that are not sharded together.
    """
    restricted = region[space.restrictions.restricted[region]]
    none = np.full_like(target, NONE)
    for axis in range(state.shape[1]):
        before, after = state[restricted, axis], target[restricted, axis]
        yield from actions_to(space, restricted[(before >= 0) & (before != after)], none, axis)


def actions_to(
    space: Space, region: npt.NDArray[np.int64], target: States, axis: int
) -> tuple[Action, ...]:
    """The refinements, one per color, that give ``axis`` in ``region`` to the target's factors."""
    parts: dict[int, list[tuple[int, int]]] = {}
    for k, factor in zip(region.tolist(), target[region, axis].tolist(), strict=True):
        parts.setdefault(space.color_of(k, factor), []).append((k, factor))
    return tuple(Action(color, (), axis, tuple(part)) for color, part in parts.items())


def _regions(
    inside: npt.NDArray[np.bool_], links: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.int64]]:
    """The op classes ``inside`` (``[K]``) that ``links`` connect, in order."""
    label = components(len(inside), links[inside[links].all(axis=1)])
    places = np.flatnonzero(inside)
    order = places[np.argsort(label[places], kind="stable")]
    return np.split(order, np.flatnonzero(np.diff(label[order])) + 1) if len(order) else []
