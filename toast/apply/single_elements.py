"""Ops that access a single element of a shard, which XLA needs a barrier for.

On a device, a gather, a scatter or a dynamic update of one element along a sharded dimension is a
slice of one element.  XLA's algebraic simplifier merges such a slice wrongly with the slice that
reshards the array: it does not clamp the index (openxla/xla issue 49121), and it drops products of
integers between the two.
"""

from __future__ import annotations

import math
from typing import Any

from toast.program import Program, Shardings

#: Ops that read or write at indices, and the attribute with the dimensions that they index.
_INDEXED = {
    "gather": "start_index_map",
    "scatter": "scattered_dims_to_operand_dims",
    "dynamic_update_slice": "",
}


def single_elements(program: Program, shardings: Shardings) -> list[tuple[int, int]]:
    """The operands ``(op, operand)`` of which a device reads or writes one element of a shard.

    Arguments and values that a loop carries are left out if they are not resharded: a device has
    their shards, and does not slice them.
    """
    places = []
    for number, op in enumerate(program.ops):
        kind = program.kind(number)
        if kind not in _INDEXED:
            continue
        attributes = dict(program.signatures[op.signature].attributes)
        targets = len(op.results) if kind == "scatter" else 1
        for index in range(targets):
            spec = shardings.at(program, number, index)
            if kind == "dynamic_update_slice":
                shapes = [program.values[v].type.shape for v in op.operands[:2]]
                indexed: Any = [d for d, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b]
                elements = 1
            else:
                indexed = attributes.get(_INDEXED[kind], ())
                elements = _local_elements(program, shardings, number, targets)
            source = program.kind(program.values[op.operands[index]].op)
            sliced = (number, index) in shardings.uses or source not in ("argument", "carry")
            if sliced and elements == 1 and any(spec[dimension] for dimension in indexed):
                places.append((number, index))
    return places


def _local_elements(program: Program, shardings: Shardings, op: int, indices: int) -> int:
    """The number of index vectors on a device, in the operand ``indices`` of an op."""
    shape = program.values[program.ops[op].operands[indices]].type.shape
    vector = program.signatures[program.ops[op].signature].attribute("index_vector_dim")
    sizes = dict(shardings.mesh.axes)
    spec = shardings.at(program, op, indices)
    return math.prod(
        size // math.prod(sizes[axis] for axis in spec[dimension])
        for dimension, size in enumerate(shape)
        if dimension != vector
    )
