"""Actions (paper, section 4.2); those on parts of colors are arrays."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: No factor holds the axis.
NONE = -1


class Action(NamedTuple):
    """Shards all dimensions of a color along a mesh axis (section 4.2), or a part of a color."""

    #: The color group: a color and its mirror images.
    color: int
    #: The resolution of conflicts: one bit per resolution group of the color.
    resolution: tuple[int, ...]
    #: The number of the mesh axis.
    axis: int
    #: The part of the color: pairs of an op class and its factor, to which the axis moves from any
    #: other factor; factor -1 removes the axis.  Empty for the whole color; then an op that already
    #: uses the axis does not change.
    part: tuple[tuple[int, int], ...] = ()


class Scope(enum.IntEnum):
    """The op classes that a refinement changes."""

    #: The op classes of a family (:class:`toast.space.Classes`).
    FAMILY = 0
    #: One op class.
    CLASS = 1
    #: Op classes of one kind, with factors of the same colors (``Space.alike``).
    ALIKE = 2
    #: The ops of a color that also have another color, or those that do not have it.
    COLOR = 3


class Pairs(NamedTuple):
    """The pairs of an op class and a factor of several actions, in the order of the actions."""

    action: Ints
    op_class: Ints
    factor: Ints
    axis: Ints


@dataclasses.dataclass(frozen=True, eq=False)
class Refinements:
    """``R`` actions on parts of colors, with ``P`` pairs of an op class and a factor in total.

    Dimensions of one color may have different best shardings: for example, the products of experts
    are sharded by expert, and the gates before them, which also have an expert dimension, by group.
    A refinement moves an axis to its factors from any other factor.
    """

    scope: Ints  # [R] :class:`Scope`
    number: Ints  # [R] number of the family, class and so on; rows are sorted by scope and number
    color: Ints  # [R]
    axis: Ints  # [R]
    first: Ints  # [R + 1] the first pair of each
    op_class: Ints  # [P]
    factor: Ints  # [P]

    def __len__(self) -> int:
        return len(self.axis)

    @staticmethod
    def joined(parts: Sequence[Refinements]) -> Refinements:
        """The refinements of several tables, in order."""
        last = np.cumsum([0, *(len(part.op_class) for part in parts)])
        first = [part.first[:-1] + start for part, start in zip(parts, last, strict=False)]
        return Refinements(
            scope=np.concatenate([part.scope for part in parts]),
            number=np.concatenate([part.number for part in parts]),
            color=np.concatenate([part.color for part in parts]),
            axis=np.concatenate([part.axis for part in parts]),
            first=np.append(np.concatenate(first), last[-1]),
            op_class=np.concatenate([part.op_class for part in parts]),
            factor=np.concatenate([part.factor for part in parts]),
        )

    @staticmethod
    def table(
        scope: Scope,
        number: Ints,
        color: Ints,
        first: Ints,
        op_class: Ints,
        factor: Ints,
        axes: Ints,
    ) -> Refinements:
        """The refinements that move each of ``axes`` to each part.

        Part ``i`` has ``number[i]``, ``color[i]``, and the pairs from ``first[i]`` to the next part
        in ``op_class`` and ``factor``.
        """
        parts, times = len(number), len(axes)
        size = np.diff(np.append(first, len(op_class)))
        place = ranges(np.repeat(first, times), np.repeat(size, times))
        return Refinements(
            np.full(parts * times, int(scope), dtype=np.int64),
            np.repeat(number, times),
            np.repeat(color, times),
            np.tile(axes, parts),
            np.concatenate([[0], np.cumsum(np.repeat(size, times))]).astype(np.int64),
            op_class[place],
            factor[place],
        )

    @staticmethod
    def of_labels(scope: Scope, label: Ints, may: Bools, colors: Ints, axes: Ints) -> Refinements:
        """The refinements of all op classes with one label: one per factor, and one that unshards.

        :param label: ``[K]`` the label of each op class; -1 for none.
        :param may: ``[K, F]`` whether a factor may hold an axis.
        :param colors: ``[K, F]`` the color of each factor.
        :param axes: the axes.
        """
        may = np.pad(may, ((0, 0), (0, 1)), constant_values=True)
        colors = np.pad(colors, ((0, 0), (0, 1)), constant_values=NONE)
        op_class, factor = np.nonzero(may & (label >= 0)[:, None])
        order = np.lexsort((op_class, factor, label[op_class]))
        op_class, factor = op_class[order], factor[order]
        key = label[op_class] * may.shape[1] + factor
        first = np.flatnonzero(np.diff(key, prepend=-1))
        color = colors[op_class[first], factor[first]]
        factor = np.where(factor < may.shape[1] - 1, factor, NONE)
        number = label[op_class[first]]
        return Refinements.table(scope, number, color, first, op_class, factor, axes)

    def rows(self, scope: Scope, numbers: Ints) -> Ints:
        """The rows of several families, classes and so on, in the order of ``numbers``."""
        span = np.searchsorted(self.scope, [scope, scope + 1])
        here = self.number[span[0] : span[1]]
        first = np.searchsorted(here, numbers)
        return np.asarray(span[0] + ranges(first, np.searchsorted(here, numbers, "right") - first))

    def pairs(self, rows: Ints) -> Pairs:
        """The pairs of several rows."""
        size = self.first[rows + 1] - self.first[rows]
        place = ranges(self.first[rows], size)
        action = np.repeat(np.arange(len(rows)), size)
        return Pairs(action, self.op_class[place], self.factor[place], self.axis[rows][action])

    def actions(self, rows: Iterable[int]) -> list[Action]:
        """The actions of several rows."""
        actions = []
        for row in rows:
            here = slice(self.first[row], self.first[row + 1])
            part = zip(self.op_class[here].tolist(), self.factor[here].tolist(), strict=True)
            actions.append(Action(int(self.color[row]), (), int(self.axis[row]), tuple(part)))
        return actions


def pairs_of(actions: Sequence[Action]) -> Pairs:
    """The pairs of several actions on parts of colors."""
    size = [len(action.part) for action in actions]
    action = np.repeat(np.arange(len(actions)), size)
    flat = itertools.chain.from_iterable
    # Several times faster than an array of tuples: parts have thousands of pairs.
    numbers = np.fromiter(flat(flat(action.part for action in actions)), dtype=np.int64)
    pairs = numbers.reshape(-1, 2)
    axis = np.array([a.axis for a in actions], dtype=np.int64)[action]
    return Pairs(action, pairs[:, 0], pairs[:, 1], axis)


def ranges(first: Ints, count: Ints) -> Ints:
    """The concatenation of ranges of ``count[i]`` numbers that start at ``first[i]``."""
    before = np.cumsum(count) - count
    return np.asarray(np.arange(count.sum()) + np.repeat(first - before, count))
