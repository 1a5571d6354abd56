"""The shardings of a state: of every value, every resharded use and every result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from toast.cost import CostModel, Layout
from toast.program import Shardings, Spec
from toast.space import States

if TYPE_CHECKING:
    from toast.lower import LocalProgram, OpFactors

Ints = npt.NDArray[np.int64]


def lowered_state(model: CostModel, state: States) -> LocalProgram:
    """The device-local program of ``state`` (``[classes, axes]``), whose collectives name no steps.

    Raises :class:`toast.errors.PlanError` as :func:`toast.lower.lower`, and for an array that is no
    state of the program.
    """
    from toast import lower

    state = model.space.checked(state)
    held = model.space.of_ops(state)
    steps = np.zeros(held.shape, dtype=np.int64)
    plain = lower.OpFactors(model.space.mesh.names, held, steps)
    plain.check(model.space.analysis, model.space.full_mesh)  # before it has a layout
    factors = op_factors(model, state, steps)
    return lower.lower(model.space.analysis, shardings_of(model, state), factors)


def op_factors(model: CostModel, state: States, steps: Ints) -> OpFactors:
    """What the lowering of ``state`` (``[classes, axes]``) needs besides the shardings.

    ``steps`` (``[ops, axes]``) has the number of the plan's step that gave each op each axis.
    """
    from toast import lower

    layout, tables, names = model.exact_layout(state), model.tables, model.space.analysis.names
    uses = np.flatnonzero(layout.looped_gathers.axes[0][tables.use_class])
    values = np.flatnonzero(layout.looped_sums.axes[0][tables.value_class])
    ops = [model.space.analysis.program.values[value].op for value in values.tolist()]
    return lower.OpFactors(
        model.space.mesh.names, model.space.of_ops(state), steps,
        frozenset(zip(names.use_op[uses].tolist(), names.use_index[uses].tolist(), strict=True)),
        frozenset(ops),
        model.joint_sums(state),
    )  # fmt: skip


def shardings_of(model: CostModel, state: States) -> Shardings:
    """The shardings of a program in ``state`` (``[classes, axes]``)."""
    layout, tables = model.layout(state[None]), model.tables
    program, names = model.space.analysis.program, model.space.analysis.names
    axes, written = model.space.mesh.names, model.space.resolved.written
    settled = layout.settled[0][tables.value_class].astype(np.int64)  # [values, axes]
    defined = layout.defined[0][tables.value_class].astype(np.int64)
    used = layout.used[0][tables.use_class].astype(np.int64)  # [uses, axes]
    before = settled[names.use_value]
    differs = (before != used).any(axis=1)
    major = major_ranks(layout)
    first_row = names.value_dim

    known: dict[tuple[int, bytes], Spec] = {}

    def spec(value: int, dims: Ints) -> Spec:
        rank = int(first_row[value + 1] - first_row[value])
        if 0 in program.values[value].type.shape:
            return ((),) * rank  # XLA does not shard empty arrays
        key = rank, dims.tobytes()
        if key not in known:
            known[key] = spec_of(dims, rank, axes, major)
        return known[key]

    def as_written(value: int, chosen: Spec) -> Spec:
        """The sharding of a pinned value with the axes of one device that its pin names."""
        pin = written.get(value, ())
        return tuple(
            wanted if wanted and tuple(axis for axis in wanted if axis in axes) == here else here
            for wanted, here in zip(pin, chosen, strict=True)
        ) if pin else chosen  # fmt: skip

    values = {v: spec(v, settled[v]) for v in np.flatnonzero((settled >= 0).any(axis=1)).tolist()}
    scattered = np.flatnonzero((settled != defined).any(axis=1)).tolist()
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
    sums = {v: spec(v, defined[v]) for v in scattered}
    for v in written:
        values[v] = as_written(v, values.get(v) or spec(v, settled[v]))
    for result, alias in enumerate(program.aliases):
        if alias >= 0:
            results[result] = as_written(program.argument_values[alias], results[result])
    matched = dict(model.space.resolved.regions.matched)
    return Shardings(model.space.full_mesh, values, uses, tuple(results), sums, matched)


def major_ranks(layout: Layout) -> list[int]:
    """``[axes]`` the rank of each mesh axis among axes of one dimension, major to minor."""
    return [*map(int, np.argsort(-layout.major[0], kind="stable").argsort())]


def spec_of(dims: npt.NDArray[Any], rank: int, axes: Sequence[str], major: Sequence[int]) -> Spec:
    """The sharding of a value of a rank, from the dimension that each mesh axis shards.

    ``dims`` is ``[axes]``, with -1 for none; ``axes`` has the names of the axes and ``major`` their
    ranks (:func:`major_ranks`).
    """
    held: list[list[int]] = [[] for _ in range(rank)]
    for axis, d in enumerate(dims.tolist()):
        if d >= 0:
            held[d].append(axis)
    return tuple(tuple(axes[axis] for axis in sorted(on, key=major.__getitem__)) for on in held)
