"""The sharding of the body of an op that is a function, such as a composite.

The op's rule says how its operands and results are sharded.  In the body, every dimension of the
same color is sharded alike; no value may need another sharding at a use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from toast.analysis import Analysis
from toast.hardware import Mesh
from toast.lower.op_sharding import OpFactors, OpSharding
from toast.program import Shardings, Spec


class BodySharding(NamedTuple):
    """The sharding of a body."""

    shardings: Shardings
    factors: OpFactors


@dataclasses.dataclass(frozen=True)
class _Colors:
    """The axes of each color of a body."""

    analysis: Analysis
    mesh: Mesh
    axes: dict[int, tuple[str, ...]]

    def spec(self, names: Sequence[int]) -> Spec:
        """The sharding of a value whose dimensions have these names."""
        return tuple(self.axes.get(int(self.analysis.color[name]), ()) for name in names)

    def held(self) -> npt.NDArray[np.int8]:
        """``[ops, axes]`` the factor of each op that holds each axis, or -1."""
        names, program = self.analysis.names, self.analysis.program
        held = np.full((len(program.ops), len(self.mesh.names)), -1, dtype=np.int8)
        colors = self.analysis.color
        for color, axes in self.axes.items():
            for name in np.flatnonzero(colors == color)[::-1].tolist():  # the first one wins
                op = int(names.name_op[name])
                for axis in axes:
                    held[op, self.mesh.names.index(axis)] = name - int(names.first_name[op])
        return held


def body_sharding(body: Analysis, mesh: Mesh, op: OpSharding) -> BodySharding | None:
    """The sharding of the body of ``op``; ``None`` if values in it need more than one.

    :param body: the analysis of the body as a program.
    :param mesh: the mesh.
    :param op: the op; its operands are the arguments of the body.
    """
    names, program = body.names, body.program
    sides = [
        *zip(program.argument_values, op.operands, strict=True),
        *zip(program.result_values, op.results, strict=True),
    ]
    colors = _Colors(body, mesh, {})
    for value, spec in sides:
        first = int(names.value_dim[value])
        for d, axes in enumerate(spec):
            color = int(body.color[names.def_name[first + d]])
            if colors.axes.setdefault(color, axes) != axes:
                return None
    for color in [color for color, axes in colors.axes.items() if not axes]:
        del colors.axes[color]
    sharded = np.isin(body.color, [*colors.axes])
    if not names.shardable[sharded].all() or not _divide(body, mesh, colors, sharded):
        return None
    held = colors.held()
    values = {
        value: colors.spec(names.def_name[slice(*names.value_dim[value : value + 2])].tolist())
        for value in range(len(program.values))
    }
    for use, value in enumerate(names.use_value.tolist()):
        rows = slice(*names.use_dim[use : use + 2])
        if colors.spec(names.use_name[rows].tolist()) != values[value]:
            return None
    for spec in values.values():
        used = [axis for axes in spec for axis in axes]
        if len(used) != len({*used}):
            return None
    results = tuple(values[value] for value in program.result_values)
    steps = np.zeros(held.shape, dtype=np.int64)
    return BodySharding(
        Shardings(mesh, values, {}, results), OpFactors(mesh.names, held, steps)
    )  # fmt: skip


def _divide(body: Analysis, mesh: Mesh, colors: _Colors, sharded: npt.NDArray[np.bool_]) -> bool:
    """Whether the axes of each color divide all its dimensions."""
    sizes = dict(mesh.axes)
    for name in np.flatnonzero(sharded).tolist():
        shards = int(np.prod([sizes[axis] for axis in colors.axes[int(body.color[name])]]))
        if body.names.divisor[name] % shards:
            return False
    return True


__all__ = ["BodySharding", "body_sharding"]
