"""The shardings of a program: the result of the search and the input of backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from toast.errors import PlanError
from toast.hardware import Mesh
from toast.program.program import Program

#: The mesh axes of each dimension, major to minor; ``()`` for an unsharded dimension.
Spec = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Shardings:
    """The shardings of all values of a program, and the uses that need another sharding."""

    #: The mesh whose axes the shardings name.
    mesh: Mesh
    #: The sharding of each value at its definition; missing values are replicated.
    values: Mapping[int, Spec]
    #: The sharding that ``(op, operand)`` needs if it differs from that of the value: a reshard.
    uses: Mapping[tuple[int, int], Spec]
    #: The sharding of each result of the function.
    results: tuple[Spec, ...]
    #: The sharding in which an op computes a partial sum, if the sum is stored with another
    #: sharding: a reduce-scatter.
    sums: Mapping[int, Spec] = dataclasses.field(default_factory=dict)
    #: The axis of the mesh for each axis that manual regions of the program take; by default, axes
    #: are matched by name and size.
    manual_axes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"<Shardings on mesh {self.mesh}: {len(self.values):,} values, "
            f"{len(self.uses):,} reshards>"
        )

    def of(self, program: Program, value: int) -> Spec:
        """The sharding of a value of ``program``, one entry per dimension."""
        rank = len(program.values[value].type.shape)
        return self.values.get(value, ((),) * rank)

    def at(self, program: Program, op: int, operand: int) -> Spec:
        """The sharding in which op number ``op`` uses its operand."""
        value = program.ops[op].operands[operand]
        return self.uses.get((op, operand), self.of(program, value))

    def _check_places(self, program: Program) -> None:
        """Checks that every sharding belongs to a value, operand or result of the program."""
        if len(self.results) != len(program.results):
            raise PlanError(
                f"{program.name} has {len(program.results)} results, but the plan shards "
                f"{len(self.results)}; use one sharding per result"
            )
        for value in (*self.values, *self.sums):
            if not 0 <= value < len(program.values):
                raise PlanError(
                    f"{program.name} has no value {value} to shard: it has {len(program.values)} "
                    "values; check that the plan is for this program"
                )
        for op, index in self.uses:
            if not 0 <= op < len(program.ops) or not 0 <= index < len(program.ops[op].operands):
                raise PlanError(
                    f"{program.name} has no operand {index} of op {op} to shard; "
                    "check that the plan is for this program"
                )

    def check(self, program: Program) -> None:
        """Checks that every sharding uses mesh axes once and divides its dimensions.

        Raises :class:`toast.errors.PlanError`, which names the value and the axis.
        """
        self._check_places(program)
        everywhere = [(v, spec, "") for v, spec in (*self.values.items(), *self.sums.items())]
        everywhere += [
            (program.ops[op].operands[index], spec, f" as operand {index} of {program.kind(op)}")
            for (op, index), spec in self.uses.items()
        ]
        everywhere += [
            (v, spec, " as a result")
            for v, spec in zip(program.result_values, self.results, strict=True)
        ]
        sizes = dict(self.mesh.axes)
        for value, spec, where in everywhere:
            type_ = program.values[value].type
            what = f"value {value} ({type_}){where}"
            if len(spec) != len(type_.shape):
                raise PlanError(
                    f"{what}: sharding {spec} has {len(spec)} dimensions, but the value has "
                    f"{len(type_.shape)}; use one entry per dimension"
                )
            seen: set[str] = set()
            for size, axes in zip(type_.shape, spec, strict=True):
                shards = 1
                for axis in axes:
                    if axis not in sizes:
                        raise PlanError(
                            f"{what}: mesh {self.mesh} has no axis {axis}; use "
                            f"{', '.join(self.mesh.names)}"
                        )
                    if axis in seen:
                        raise PlanError(f"{what}: axis {axis} shards it twice; use it once")
                    seen.add(axis)
                    shards *= sizes[axis]
                if size % shards:
                    raise PlanError(
                        f"{what}: {shards} shards along {' x '.join(axes)} do not divide {size}; "
                        "choose another dimension"
                    )
