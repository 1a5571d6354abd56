"""The collectives that turn one sharding of a value into another one, step by step.

A reshard slices along the axes that come, exchanges the axes that change dimensions, and gathers
those that go; this keeps every step as small as possible.  Shards change places where dimensions
have as many of them on other axes, or where the order of the axes of a dimension requires it.  A
partial sum is scattered along the axes that its stored sharding has, and reduced along the others.

The cost model prices these steps, and the lowering emits them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Literal

from toast.program import Spec

StepKind = Literal[
    "slice", "collective_permute", "all_to_all", "all_gather", "reduce_scatter", "all_reduce"
]


#: In front of an axis of a dimension in the middle of a reshard: a device has all parts along this
#: axis, and each lacks what other devices have along the axes that follow.
RESTORED = "*"


@dataclasses.dataclass(frozen=True)
class ReshardStep:
    """One step between two shardings.

    A slice and a reduce-scatter append axes to dimensions, an all-gather removes the last ones, an
    all-to-all moves the last axes of dimensions to the end of others, and a collective-permute
    changes the order of the axes of dimensions, or replaces them by others of the same sizes.
    """

    kind: StepKind
    #: The axes between whose devices data moves, or along which a device takes its part.
    axes: frozenset[str]
    before: Spec
    after: Spec


def crowded_dimensions(
    shape: Sequence[int], before: Spec, after: Spec, sizes: Mapping[str, int]
) -> frozenset[int]:
    """The dimensions that the axes of both shardings together do not divide.

    ``sizes`` has the devices along each axis.
    """
    return frozenset(
        d for d, size in enumerate(shape)
        if size % math.prod(sizes[axis] for axis in {*before[d], *after[d]} if axis in sizes)
    )  # fmt: skip


def exchanged_dimensions(before: Spec, after: Spec, sizes: Mapping[str, int]) -> frozenset[int]:
    """The dimensions whose shards can stay as they are, on the devices of other axes.

    A dimension has as many shards before as after.  Its new axes shard no other dimension before,
    and its old ones none after, but for dimensions that are exchanged, too.  ``sizes`` has the
    devices along each axis.
    """

    def shards(axes: Sequence[str]) -> int:
        return math.prod(sizes.get(axis, 1) for axis in axes)

    home, goal = _dims(before), _dims(after)
    exchanged = {
        d for d, (old, new) in enumerate(zip(before, after, strict=True))
        if old and {*old} != {*new} and shards(old) == shards(new)
    }  # fmt: skip
    while apart := {
        d for d in exchanged
        if any(axis in home and home[axis] not in exchanged for axis in after[d])
        or any(axis in goal and goal[axis] not in exchanged for axis in before[d])
    }:  # fmt: skip
        exchanged -= apart
    return frozenset(exchanged)


@functools.lru_cache(maxsize=4096)
def reshard_steps(
    before: Spec,
    after: Spec,
    crowded: frozenset[int] = frozenset(),
    exchanged: frozenset[int] = frozenset(),
) -> tuple[ReshardStep, ...]:
    """The steps from the sharding ``before`` to ``after``, without communication where possible.

    Shards of the dimensions ``exchanged`` (:func:`exchanged_dimensions`) change places at once.
    Axes that leave another dimension of ``crowded`` (:func:`crowded_dimensions`) are gathered
    first.  Only collective-permutes depend on the order of the axes of a dimension.
    """
    if before == after:
        return ()
    if exchanged:
        spec = tuple(after[d] if d in exchanged else own for d, own in enumerate(before))
        places = frozenset(axis for d in exchanged for axis in {*before[d], *after[d]})
        move = ReshardStep("collective_permute", places, before, spec)
        return (move, *reshard_steps(spec, after, crowded))
    released = tuple(
        tuple(axis for axis in axes if axis in after[d]) if d in crowded else axes
        for d, axes in enumerate(before)
    )
    if released != before:
        return (*reshard_steps(before, released), *reshard_steps(released, after))
    home, goal = _dims(before), _dims(after)
    coming, going = goal.keys() - home.keys(), home.keys() - goal.keys()
    leaving = sorted(
        (axis for axes in before for axis in axes if goal.get(axis, home[axis]) != home[axis]),
        key=lambda axis: (home[axis], goal[axis]),
    )
    steps: list[ReshardStep] = []
    spec = before

    def step(kind: StepKind, axes: Iterable[str], new: Spec) -> Spec:
        if new != spec:
            steps.append(ReshardStep(kind, frozenset(axes), spec, new))
        return new

    first = _exchangeable(leaving, home, goal)
    sliced = tuple(
        _apart(axes, after[d], first, coming) or (*axes, *(a for a in after[d] if a in coming))
        for d, axes in enumerate(spec)
    )
    spec = step("slice", coming, sliced)
    while leaving:
        batch = _exchangeable(leaving, home, goal)
        gives, takes = {home[axis] for axis in batch}, {goal[axis] for axis in batch}
        strided = {
            d for d in gives
            if not _not_last(spec[d], {*batch} | going)
            and all(goal[a] != d for a in leaving)
            and tuple(a for a in spec[d] if a not in batch and a not in going) == after[d]
        }  # fmt: skip
        ordered = tuple(
            axes if d not in gives or d in strided or not _not_last(axes, {*batch})
            else _last(_last(_like(axes, after[d]), going), {*batch})
            for d, axes in enumerate(spec)
        )  # fmt: skip
        spec = step("collective_permute", _reordered(spec, ordered), ordered)
        traded = tuple(
            _restored(axes, batch, going) if d in strided
            else after[d] if d in takes and any(a.startswith(RESTORED) for a in axes)
            else (*(a for a in axes if a not in batch), *(a for a in after[d] if a in batch))
            for d, axes in enumerate(spec)
        )  # fmt: skip
        spec = step("all_to_all", batch, traded)
        leaving = [axis for axis in leaving if axis not in batch]
    ordered = tuple(
        axes if any(a.startswith(RESTORED) for a in axes)
        else (*after[d], *(axis for axis in axes if axis in going))
        for d, axes in enumerate(spec)
    )  # fmt: skip
    spec = step("collective_permute", _reordered(spec, ordered), ordered)
    step("all_gather", going, after)
    return tuple(steps)


def _exchangeable(
    leaving: Sequence[str], home: Mapping[str, int], goal: Mapping[str, int]
) -> list[str]:
    """The axes that one all-to-all can move: no dimension gives axes and takes others."""
    batch: list[str] = []
    for axis in leaving:
        gives = {home[a] for a in (*batch, axis)}
        takes = {goal[a] for a in (*batch, axis)}
        if gives.isdisjoint(takes):
            batch.append(axis)
    return batch


def _apart(
    axes: tuple[str, ...], goal: tuple[str, ...], batch: Sequence[str], coming: Set[str]
) -> tuple[str, ...]:
    """``axes`` of a dimension sliced along ``coming`` axes before an all-to-all adds ``batch``.

    Empty if no axis that comes is minor to one that the all-to-all adds.
    """
    added = goal[len(axes) :]
    here = [axis in batch for axis in added]
    if (
        goal[: len(axes)] != axes
        or not all(axis in batch or axis in coming for axis in added)
        or here == sorted(here)
    ):
        return ()
    return (*axes, *(axis if axis in coming else RESTORED + axis for axis in added))


def _restored(axes: tuple[str, ...], batch: Sequence[str], going: Set[str]) -> tuple[str, ...]:
    """``axes`` of a dimension after an all-to-all moved those of ``batch`` away.

    Where an axis that is still to be gathered follows, the parts along a moved axis remain apart.
    """
    last = max((n for n, axis in enumerate(axes) if axis in going), default=-1)
    return tuple(
        RESTORED + axis if axis in batch else axis
        for n, axis in enumerate(axes) if axis not in batch or n < last
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def sum_steps(computed: Spec, stored: Spec, partial: frozenset[str]) -> tuple[ReshardStep, ...]:
    """The steps from partial sums over the axes ``partial`` to a stored value.

    ``computed`` is the sharding of the partial sums.  The axes that ``stored`` has in addition are
    among ``partial``.
    """
    goal = _dims(stored)
    scattered = partial & goal.keys()
    steps = []
    parts = tuple(
        (*axes, *(axis for axis in stored[d] if axis in scattered))
        for d, axes in enumerate(computed)
    )
    if scattered:
        steps.append(ReshardStep("reduce_scatter", scattered, computed, parts))
    if rest := partial - scattered:
        steps.append(ReshardStep("all_reduce", rest, parts, parts))
    return (*steps, *reshard_steps(parts, stored))


def _dims(spec: Spec) -> dict[str, int]:
    return {axis: d for d, axes in enumerate(spec) for axis in axes}


def _not_last(axes: tuple[str, ...], some: set[str]) -> bool:
    """Whether one of ``some`` comes before another axis."""
    inside = [axis in some for axis in axes]
    return inside != sorted(inside)


def _last(axes: tuple[str, ...], some: set[str]) -> tuple[str, ...]:
    return tuple(sorted(axes, key=lambda axis: axis in some))


def _like(axes: tuple[str, ...], order: tuple[str, ...]) -> tuple[str, ...]:
    """``axes``, with those of ``order`` first and in this order."""
    return (*(a for a in order if a in axes), *(a for a in axes if a not in order))


def _reordered(before: Spec, after: Spec) -> frozenset[str]:
    """The axes of the dimensions whose axes have another order."""
    return frozenset(_changed(before, after))


def _changed(before: Spec, after: Spec) -> Iterator[str]:
    for axes, others in zip(before, after, strict=True):
        differs = [axis != other for axis, other in zip(axes, others, strict=True)]
        if True in differs:
            yield from axes[differs.index(True) : len(differs) - differs[::-1].index(True)]
