"""The sharding of the body of an op that is a function, such as a composite.

The op's rule says how its operands and results are sharded.  In the body, every dimension of the
same color is sharded alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from toast.analysis import Decomposition
from toast.hardware import Mesh
from toast.lower.op_sharding import OpFactors, OpSharding
from toast.program import Shardings, Spec


class BodySharding(NamedTuple):
    """The sharding of a body."""

    shardings: Shardings
    factors: OpFactors


def body_sharding(body: Decomposition, mesh: Mesh, op: OpSharding) -> BodySharding | None:
    """The sharding of the body of ``op``; ``None`` if axes do not divide a dimension in it.

    :param body: the body as a program.
    :param mesh: the mesh.
    :param op: the op, which is not sharded along factors of :meth:`Decomposition.whole`.
    """
    names, program, sizes = body.names, body.program, dict(mesh.axes)
    shards = {n: math.prod(sizes[axis] for axis in axes) for n, axes in op.axes.items()}
    divisors = body.divisors(op.rule)
    if any(divisors[factor] % count for factor, count in shards.items()):
        return None
    factor = body.factors(op.rule)

    def spec(of_value: Sequence[int]) -> Spec:
        axes = [op.axes.get(int(factor[name]), frozenset()) for name in of_value]
        return tuple(tuple(axis for axis in mesh.names if axis in each) for each in axes)

    values = {
        value: spec(names.def_name[slice(*names.value_dim[value : value + 2])].tolist())
        for value in range(len(program.values))
    }
    held = np.full((len(program.ops), len(mesh.names)), -1, dtype=np.int8)
    for name in np.flatnonzero(np.isin(factor, [*op.axes])).tolist():
        of_op = int(names.name_op[name])
        for axis in op.axes[int(factor[name])]:
            held[of_op, mesh.names.index(axis)] = name - int(names.first_name[of_op])
    results = tuple(values[value] for value in program.result_values)
    steps = np.zeros(held.shape, dtype=np.int64)
    return BodySharding(
        Shardings(mesh, values, {}, results), OpFactors(mesh.names, held, steps)
    )  # fmt: skip


__all__ = ["BodySharding", "body_sharding"]
