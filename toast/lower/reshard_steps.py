"""The collectives that turn one sharding of a value into another one, step by step.

A reshard slices along the axes that come, exchanges the axes that change dimensions, and gathers
those that go; this keeps every step as small as possible.  Shards change places where the order of
the axes of a dimension requires it.  A partial sum is scattered along the axes that its stored
sharding has, and reduced along the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from toast.program import Spec

StepKind = Literal[
    "slice", "collective_permute", "all_to_all", "all_gather", "reduce_scatter", "all_reduce"
]


@dataclasses.dataclass(frozen=True)
class ReshardStep:
    """One step between two shardings.

    A slice and a reduce-scatter append axes to dimensions, an all-gather removes the last ones, an
    all-to-all moves the last axes of dimensions to the end of others, and a collective-permute
    changes the order of the axes of dimensions.
    """

    kind: StepKind
    #: The axes between whose devices data moves, or along which a device takes its part.
    axes: frozenset[str]
    before: Spec
    after: Spec


def reshard_steps(before: Spec, after: Spec) -> list[ReshardStep]:
    """The steps from the sharding ``before`` to ``after``, without communication where possible."""
    home, goal = _dims(before), _dims(after)
    coming, going = goal.keys() - home.keys(), home.keys() - goal.keys()
    leaving = {axis for axis in home.keys() & goal.keys() if home[axis] != goal[axis]}
    steps: list[ReshardStep] = []
    spec = before

    def step(kind: StepKind, axes: frozenset[str], new: Spec) -> Spec:
        if new != spec:
            steps.append(ReshardStep(kind, axes, spec, new))
        return new

    sliced = tuple(
        (*axes, *(axis for axis in after[d] if axis in coming)) for d, axes in enumerate(spec)
    )
    spec = step("slice", frozenset(coming), sliced)
    if any(_not_last(axes, leaving) for axes in spec):
        ordered = tuple(_last(_last(_like(axes, after[d]), going), leaving)
                        for d, axes in enumerate(spec))  # fmt: skip
        spec = step("collective_permute", _reordered(spec, ordered), ordered)
    exchanged = tuple(
        (*(a for a in axes if a not in leaving), *(a for a in after[d] if a in leaving))
        for d, axes in enumerate(spec)
    )
    spec = step("all_to_all", frozenset(leaving), exchanged)
    ordered = tuple(
        (*after[d], *(axis for axis in axes if axis in going)) for d, axes in enumerate(spec)
    )
    spec = step("collective_permute", _reordered(spec, ordered), ordered)
    step("all_gather", frozenset(going), after)
    return steps


def sum_steps(computed: Spec, stored: Spec, partial: frozenset[str]) -> list[ReshardStep]:
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
    return steps + reshard_steps(parts, stored)


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
