"""The collectives that a program states itself, in manual regions (``jax.shard_map``)."""

from __future__ import annotations

import numpy as np

from toast.cost.entities import Ints
from toast.cost.tables import Tables
from toast.hardware import COLLECTIVES
from toast.space import Space

#: Kinds of ops, and the collective that has their price.
_PRICED_AS = {
    **{kind: kind for kind in COLLECTIVES},
    "collective_broadcast": "collective_permute",
}


def stated_collectives(space: Space, tables: Tables) -> tuple[Ints, Ints]:
    """The columns ``collective`` and ``group`` of value classes, on the mesh of a space."""
    program, matched = space.analysis.program, space.resolved.regions.matched
    kinds, groups = np.zeros((2, len(program.signatures)), dtype=np.int64)
    kinds -= 1
    for number, signature in enumerate(program.signatures):
        axes = signature.attribute("axes")
        if signature.kind in _PRICED_AS and isinstance(axes, tuple) and axes:
            kinds[number] = COLLECTIVES.index(_PRICED_AS[signature.kind])
            here = {matched[str(axis)] for axis in axes}
            groups[number] = sum(1 << a for a, name in enumerate(space.mesh.names) if name in here)
    _, first = np.unique(tables.value_class, return_index=True)
    signature_of = np.array(
        [program.ops[program.values[value].op].signature for value in first.tolist()],
        dtype=np.int64,
    )
    return kinds[signature_of], groups[signature_of]
