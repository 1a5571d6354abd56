"""The collectives of reshards in a batch of states, where a formula does not state them.

A reshard of which no dimension both loses an axis and gets another one is an all-to-all and an
all-gather (:class:`toast.cost.terms.Reshards`).  Others, and all collective-permutes, are looked up
in the sequence that the lowering emits (:func:`toast.cost.reshard_steps.reshard_steps`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from toast.cost.entities import Bools, Dims, Ints
from toast.cost.reshard_steps import (
    RESTORED,
    crowded_dimensions,
    exchanged_dimensions,
    reshard_steps,
)
from toast.distinct import distinct_rows
from toast.hardware import COLLECTIVES
from toast.program import Spec

#: Sets of mesh axes, as in :class:`toast.cost.layout.Layout`.
Axes = npt.NDArray[np.uint8]

#: A collective: its kind, its axes, and the axes that shard the value which its bytes are those of.
Step = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Routes:
    """The collectives of some reshards: ``[rows, steps]``, without axes for none."""

    kind: npt.NDArray[np.int64]
    axes: Axes
    shards: Axes

    def of_kind(self, kind: int) -> Iterator[tuple[Axes, Axes]]:
        """The axes and the shards (``[rows]``) of each step that is of this kind in some row."""
        for step in range(self.kind.shape[1]):
            here = self.kind[:, step] == kind
            if here.any():
                yield np.where(here, self.axes[:, step], np.uint8(0)), self.shards[:, step]


def trading(before: Dims, after: Dims) -> Bools:
    """``[...]`` whether some dimension loses an axis and gets another one.

    ``before`` and ``after`` are ``[..., A]``, the dimension that each axis shards, or -1.
    """
    trades = np.zeros(before.shape[:-1], dtype=bool)
    lost, taken = (before >= 0) & (before != after), (after >= 0) & (before != after)
    for a, b in itertools.permutations(range(before.shape[-1]), 2):
        trades |= lost[..., a] & taken[..., b] & (before[..., a] == after[..., b])
    return trades


def routes(
    before: Dims, after: Dims, shapes: Ints, axis_sizes: Sequence[int], order: Ints | None
) -> Routes:
    """The collectives of reshards.

    :param before: ``[rows, A]`` the dimension that each axis shards, or -1.
    :param after: the same, after the reshard.
    :param shapes: ``[rows, R]`` the sizes of the whole values.
    :param axis_sizes: the devices along each axis.
    :param order: ``[rows, A]`` the axes, the major one first; without it, collective-permutes,
        which depend on it, are left out.
    """
    columns = (before, after, shapes) if order is None else (before, after, shapes, order)
    rows = np.concatenate([column.astype(np.int64) for column in columns], axis=1)
    distinct, _, place, _ = distinct_rows(rows)
    axes, rank, sizes = before.shape[1], shapes.shape[1], tuple(axis_sizes)
    found = [
        _steps(
            tuple(row[:axes]), tuple(row[axes : 2 * axes]), tuple(row[2 * axes : 2 * axes + rank]),
            sizes, tuple(row[2 * axes + rank :]),
        )
        for row in distinct.tolist()
    ]  # fmt: skip
    table = np.zeros((len(found), max(map(len, found), default=0), 3), dtype=np.int64)
    table[..., 0] = -1
    for number, steps in enumerate(found):
        table[number, : len(steps)] = steps or np.zeros((0, 3))
    chosen = table[place]
    return Routes(
        chosen[..., 0], chosen[..., 1].astype(np.uint8), chosen[..., 2].astype(np.uint8)
    )  # fmt: skip


@functools.lru_cache(maxsize=2**16)
def _steps(
    before: tuple[int, ...],
    after: tuple[int, ...],
    shape: tuple[int, ...],
    axis_sizes: tuple[int, ...],
    order: tuple[int, ...],
) -> tuple[Step, ...]:
    """The collectives of one reshard; without ``order``, those that do not depend on it."""

    def spec(dims: tuple[int, ...]) -> Spec:
        return tuple(
            tuple(str(axis) for axis in order or range(len(dims)) if dims[axis] == d)
            for d in range(len(shape))
        )

    sizes = {str(axis): size for axis, size in enumerate(axis_sizes)}
    ends = spec(before), spec(after)
    steps = []
    crowded = crowded_dimensions(shape, *ends, sizes)
    for step in reshard_steps(*ends, crowded, exchanged_dimensions(*ends, sizes)):
        if step.kind == "slice" or (step.kind == "collective_permute" and not order):
            continue
        held = [axis for axes in step.after for axis in axes if not axis.startswith(RESTORED)]
        steps.append((COLLECTIVES.index(step.kind), _mask(step.axes), _mask(held)))
    return tuple(steps)


def _mask(axes: Sequence[str] | frozenset[str]) -> int:
    return sum(1 << int(axis) for axis in axes)


__all__ = ["Routes", "routes", "trading"]
