"""Matches of saved actions in another space, by the dimensions that they shard."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from toast.plan.files import OpKey, SavedAction, SavedPart, class_places
from toast.plan.labels import action_labels
from toast.space import NONE, Action, Space

if TYPE_CHECKING:
    from toast.analysis import Analysis


class Offered:
    """The actions of a space, by the dimensions that they shard."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._by_labels: dict[tuple[tuple[str, ...], str], list[Action]] = defaultdict(list)
        for action in space.actions:
            axis = space.mesh.names[action.axis]
            self._by_labels[action_labels(space, action), axis].append(action)

    @functools.cached_property
    def _classes(self) -> tuple[dict[OpKey, list[int]], dict[OpKey, list[int]]]:
        """Op classes by key, and by keys without source lines."""
        exact: dict[OpKey, list[int]] = defaultdict(list)
        loose: dict[OpKey, list[int]] = defaultdict(list)
        for k, (key, _, _) in class_places(self._space).items():
            exact[key.place].append(k)
            loose[key.loose].append(k)
        return exact, loose

    def exactly(self, wanted: SavedAction) -> Action | None:
        """The equal action of the space, or None."""
        if wanted.axis not in self._space.mesh.names:
            return None
        if wanted.part:
            return self._refinement(wanted)
        equal = [
            action for action in self._by_labels.get((wanted.labels, wanted.axis), [])
            if action.resolution == wanted.resolution
        ]  # fmt: skip
        # Labels contain ``*`` for layers, so dimensions of two colors can share a label.
        return min(equal, key=lambda action: action.color != wanted.color, default=None)

    def nearest(self, wanted: SavedAction) -> Action | None:
        """The action that shares the most dimensions with ``wanted``, or None.

        Of its resolutions, the result has the one closest to that of ``wanted``.  If the number of
        conflicts differs, this is the first resolution, or the last if all bits of ``wanted`` are
        1.
        """
        if wanted.part:
            return None

        def shared(labels: tuple[str, ...]) -> float:
            mine, theirs = set(map(_unplaced, wanted.labels)), set(map(_unplaced, labels))
            return len(mine & theirs) / len(mine | theirs) if mine & theirs else 0.0

        candidates = [labels for labels, axis in self._by_labels if axis == wanted.axis]
        best = max(candidates, key=shared, default=())
        if not candidates or not shared(best):
            return None

        def distance(action: Action) -> int:
            bits = wanted.resolution
            if len(bits) != len(action.resolution):
                bits = (int(bool(bits) and all(bits)),) * len(action.resolution)
            return sum(a != b for a, b in zip(bits, action.resolution, strict=True))

        return min(self._by_labels[best, wanted.axis], key=distance)

    def _refinement(self, wanted: SavedAction) -> Action | None:
        """The refinement of the ops with the same keys, or None."""
        axis = self._space.mesh.names.index(wanted.axis)
        if not wanted.part[0].of:  # version 1: by number, if the labels agree
            part = tuple(p.numbers for p in wanted.part)
            return self._numbered(Action(-1, (), axis, part), wanted.dimensions)
        matches = [match for part in wanted.part if (match := [*self._of_part(part)])]
        # A few constants or broadcasts are alike in any two programs.
        if 2 * len(matches) < len(wanted.part):
            return None
        return Action(-1, (), axis, tuple(dict.fromkeys(itertools.chain(*matches))))

    def _numbered(self, action: Action, labels: tuple[str, ...]) -> Action | None:
        classes, factors = self._space.classes.divisor.shape
        if not all(0 <= k < classes and -1 <= f < factors for k, f in action.part):
            return None
        try:
            return action if action_labels(self._space, action) == labels else None
        except IndexError:  # the op does not have this factor
            return None

    def _of_part(self, part: SavedPart) -> Iterator[tuple[int, int]]:
        exact, loose = self._classes
        classes = exact.get(part.key.place) or loose.get(part.key.loose, [])
        if len(classes) == part.of:
            classes = classes[part.place : part.place + 1]
        for k in classes:
            factor = _factor(self._space.analysis, self._space.classes.representative[k], part)
            if factor is not None:
                yield k, factor


def _unplaced(label: str) -> str:
    """A label without its source line."""
    return label.partition(" at ")[0]


def _factor(analysis: Analysis, op: int, part: SavedPart) -> int | None:
    """The factor of an op with the label of a part: NONE for no label, None if it is missing."""
    if not part.factor:
        return NONE
    labels = [f.label for f in analysis.rules[analysis.names.signature[op]].factors]
    return labels.index(part.factor) if part.factor in labels else None
