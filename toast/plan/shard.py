"""From a state to shardings: every value, every resharded use, every result."""

from __future__ import annotations

import numpy as np

from toast.apply import Shardings, Spec
from toast.cost import CostModel
from toast.space import States


def shardings_of(model: CostModel, state: States) -> Shardings:
    """The shardings that ``state`` (``[classes, axes]``) gives to the program.

    A dimension's axes are listed in the order of the mesh, major to minor.
    """
    layout, tables = model.layout(state[None]), model.tables
    program, names = model.space.analysis.program, model.space.analysis.names
    mesh = model.space.mesh
    settled = layout.settled[0][tables.value_class]  # [values, axes]
    used = layout.used[0][tables.use_class]  # [uses, axes]
    differs = (settled[names.use_value] != used).any(axis=1)

    def spec(dims: np.ndarray, rank: int) -> Spec:
        return tuple(
            tuple(axis for axis, on in zip(mesh.names, dims.tolist(), strict=True) if on == d)
            for d in range(rank)
        )

    ranks = np.diff(names.value_dim).tolist()
    values = {
        v: spec(settled[v], ranks[v]) for v in np.flatnonzero((settled >= 0).any(axis=1)).tolist()
    }
    first_return = len(program.ops) - len(program.results)
    uses = {}
    results: list[Spec] = [()] * len(program.results)
    for u in np.flatnonzero(differs | (names.use_op >= first_return)).tolist():
        op = int(names.use_op[u])
        wanted = spec(used[u], ranks[int(names.use_value[u])])
        if op >= first_return:
            results[op - first_return] = wanted
        else:
            uses[op, int(names.use_index[u])] = wanted
    return Shardings(mesh, values, uses, tuple(results))
