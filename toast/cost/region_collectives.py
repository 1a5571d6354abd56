"""The collectives of manual regions (``jax.shard_map``): those that the program states in them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from toast.cost.entities import Ints
from toast.cost.tables import Tables
from toast.hardware import COLLECTIVES
from toast.program import Signature
from toast.space import BOUNDARY, Space, split_axes

#: Kinds of ops and targets of custom calls, and the collective that has their price.
_PRICED_AS = {
    **{kind: kind for kind in COLLECTIVES},
    "collective_broadcast": "collective_permute",
    "ragged_all_to_all": "all_to_all",
}


def stated_collectives(space: Space, tables: Tables) -> tuple[Ints, Ints]:
    """The columns ``collective`` and ``group`` of value classes, on the mesh of a space.

    A value at the boundary of a region is permuted if two axes split one of its dimensions in
    another order than that of the plan, which other regions determine.
    """
    program = space.analysis.program
    kinds, groups = np.zeros((2, len(program.signatures)), dtype=np.int64)
    kinds -= 1
    bits = {name: 1 << axis for axis, name in enumerate(space.mesh.names)}
    for number, signature in enumerate(program.signatures):
        kind, axes = _collective(space, signature)
        if axes:
            kinds[number] = COLLECTIVES.index(kind)
            groups[number] = sum(bits[axis] for axis in axes)
    _, first = np.unique(tables.value_class, return_index=True)
    signature_of = np.array(
        [program.ops[program.values[value].op].signature for value in first.tolist()],
        dtype=np.int64,
    )
    return kinds[signature_of], groups[signature_of]


def _collective(space: Space, signature: Signature) -> tuple[str, set[str]]:
    """The collective of an op, and its axes of the mesh; no axes for other ops."""
    matched, order = space.resolved.regions.matched, space.resolved.order
    kind = str(signature.attribute("call_target_name") or signature.kind)
    if kind in _PRICED_AS:
        axes = signature.attribute("axes")
        stated = axes if isinstance(axes, tuple) else ()
        return _PRICED_AS[kind], {matched[str(axis)] for axis in stated}
    turned: set[str] = set()
    if signature.kind in BOUNDARY and order:
        for (axis, d), (other, e) in pairwise(split_axes(signature)):
            if d == e and order.index(matched[axis]) > order.index(matched[other]):
                turned |= {matched[axis], matched[other]}
    return "collective_permute", turned
