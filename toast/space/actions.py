"""Actions (paper, section 4.2), and those on parts of colors as arrays."""

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
    """Shard all dimensions of a color along a mesh axis, resolving conflicts as told (4.2)."""

    #: Color group: a color with the colors mirrored to it.
    color: int
    #: One bit per resolution group of the color.
    resolution: tuple[int, ...]
    axis: int
    #: A part of the color, in which the action takes the axis from whatever holds it: pairs of an
    #: op class and its factor, or -1 to let go of the axis.  Empty for the whole color, where an
    #: axis that is held stays.
    part: tuple[tuple[int, int], ...] = ()


class Scope(enum.IntEnum):
    """Which op classes a refinement is of."""

    #: The op classes of a family (:class:`toast.space.Classes`).
    FAMILY = 0
    #: One op class.
    CLASS = 1
    #: Op classes of one kind, with factors of the same colors (``Space.alike``).
    ALIKE = 2
    #: The ops of a color beside some other color, or those that are not.
    COLOR = 3


class Pairs(NamedTuple):
    """Pairs of an op class and a factor of several actions, those of the first one first."""

    action: Ints
    op_class: Ints
    factor: Ints
    axis: Ints


@dataclasses.dataclass(frozen=True, eq=False)
class Refinements:
    """Actions on parts of colors, ``R`` with ``P`` pairs of an op class and a factor together.

    What colors tie together need not be sharded alike: an expert's products by expert, and the
    gates before them, which have experts too, by group.  The search tries these behind all others,
    where they take an axis from whatever holds it.
    """

    scope: Ints  # [R] :class:`Scope`
    number: Ints  # [R] of the family, the class, ...; ordered by scope and number
    color: Ints  # [R]
    axis: Ints  # [R]
    first: Ints  # [R + 1] pair that each begins with
    op_class: Ints  # [P]
    factor: Ints  # [P]

    def __len__(self) -> int:
        return len(self.axis)

    @staticmethod
    def joined(parts: Sequence[Refinements]) -> Refinements:
        """All of them, in order."""
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
        """Those of parts, each brought to each of ``axes``.

        Part ``i`` is of ``number[i]`` and has the pairs from ``first[i]`` on.
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
        """Op classes with the same ``label`` (``[K]``; -1 for none) together: factor by factor.

        A factor is for those that ``may`` (``[K, F]``) have it; behind the factors, all of them let
        go of the axis.  ``colors`` (``[K, F]``) are those of the factors.
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
        """Those of several families, classes, ..., in their order."""
        span = np.searchsorted(self.scope, [scope, scope + 1])
        here = self.number[span[0] : span[1]]
        first = np.searchsorted(here, numbers)
        return np.asarray(span[0] + ranges(first, np.searchsorted(here, numbers, "right") - first))

    def pairs(self, rows: Ints) -> Pairs:
        """The pairs of several."""
        size = self.first[rows + 1] - self.first[rows]
        place = ranges(self.first[rows], size)
        action = np.repeat(np.arange(len(rows)), size)
        return Pairs(action, self.op_class[place], self.factor[place], self.axis[rows][action])

    def actions(self, rows: Iterable[int]) -> list[Action]:
        """The actions themselves."""
        found = []
        for row in rows:
            here = slice(self.first[row], self.first[row + 1])
            part = zip(self.op_class[here].tolist(), self.factor[here].tolist(), strict=True)
            found.append(Action(int(self.color[row]), (), int(self.axis[row]), tuple(part)))
        return found


def pairs_of(actions: Sequence[Action]) -> Pairs:
    """The pairs of refinements."""
    size = [len(action.part) for action in actions]
    action = np.repeat(np.arange(len(actions)), size)
    flat = itertools.chain.from_iterable
    # Several times as fast as an array of tuples: parts have thousands of pairs.
    numbers = np.fromiter(flat(flat(action.part for action in actions)), dtype=np.int64)
    pairs = numbers.reshape(-1, 2)
    axis = np.array([a.axis for a in actions], dtype=np.int64)[action]
    return Pairs(action, pairs[:, 0], pairs[:, 1], axis)


def ranges(first: Ints, count: Ints) -> Ints:
    """``count[i]`` numbers from ``first[i]`` on, one after the other."""
    before = np.cumsum(count) - count
    return np.asarray(np.arange(count.sum()) + np.repeat(first - before, count))
