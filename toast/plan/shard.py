"""From a state to shardings: every value, every resharded use, every result."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from toast.apply import Shardings, Spec
from toast.cost import CostModel
from toast.space import States

Ints = npt.NDArray[np.int64]


def shardings_of(model: CostModel, state: States) -> Shardings:
    """The shardings that ``state`` (``[classes, axes]``) gives to the program."""
    layout, tables = model.layout(state[None]), model.tables
    program, names = model.space.analysis.program, model.space.analysis.names
    axes = model.space.mesh.names
    settled = layout.settled[0][tables.value_class].astype(np.int64)  # [values, axes]
    used = layout.used[0][tables.use_class].astype(np.int64)  # [uses, axes]
    before = settled[names.use_value]
    differs = (before != used).any(axis=1)
    major = _major_axes(model, before, used, differs)
    first_row = names.value_dim

    def spec(value: int, dims: Ints) -> Spec:
        held: list[list[int]] = [[] for _ in range(first_row[value + 1] - first_row[value])]
        if 0 in program.values[value].type.shape:
            return ((),) * len(held)  # XLA does not shard what has no elements
        for axis, d in enumerate(dims.tolist()):
            if d >= 0:
                held[d].append(axis)
        for d, on in enumerate(held):
            if len(on) > 1:
                color = model.space.color_group_of(int(names.def_name[first_row[value] + d]))
                rank = major[color].tolist()
                on.sort(key=[-count for count in rank].__getitem__)
        return tuple(tuple(axes[axis] for axis in on) for on in held)

    values = {v: spec(v, settled[v]) for v in np.flatnonzero((settled >= 0).any(axis=1)).tolist()}
    first_return = len(program.ops) - len(program.results)
    uses = {}
    results: list[Spec] = [()] * len(program.results)
    for u in np.flatnonzero(differs | (names.use_op >= first_return)).tolist():
        op = int(names.use_op[u])
        wanted = spec(int(names.use_value[u]), used[u])
        if op >= first_return:
            results[op - first_return] = wanted
        else:
            uses[op, int(names.use_index[u])] = wanted
    return Shardings(model.space.mesh, values, uses, tuple(results))


def _major_axes(model: CostModel, before: Ints, used: Ints, differs: npt.NDArray[np.bool_]) -> Ints:
    """How often each axis of a color stays while another is gathered: ``[color groups, axes]``.

    Where several axes shard one dimension their order decides what a gather costs: shards that
    stay must be the major ones, or they have to change places first.  The order is chosen per
    color, so that it is the same along every chain of ops.
    """
    space = model.space
    names = space.analysis.names
    kept = np.zeros((len(space.color_groups), len(space.axis_sizes)), dtype=np.int64)
    stays = (before == used) & (before >= 0) & differs[:, None]
    for axis, other in np.ndindex(kept.shape[1], kept.shape[1]):
        if axis == other:
            continue
        gathered = (before[:, other] == before[:, axis]) & (used[:, other] != before[:, other])
        where = np.flatnonzero(stays[:, axis] & gathered)
        rows = names.value_dim[names.use_value[where]] + before[where, axis]
        groups = space.color_group_of(names.def_name[rows])
        np.add.at(kept, (groups, axis), 1)
    return kept
