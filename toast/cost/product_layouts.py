"""Operands of products that XLA lays out again where libraries compute products (GPUs).

A library takes batches of matrices: the dimensions of the batch, the rows and the columns must each
follow one another in memory, and the batch must not come last.  Attention over a cache
``[batch, keys, heads, size]`` has the batch ``batch, heads``: XLA transposes the cache first.  A
device with a matrix unit of its own, whose kernels XLA generates, reads it as it is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from toast.cost.entities import Bools, Ints
from toast.cost.liveness import BARRIERS, GROUPED, dimensions_in
from toast.program import Program, Signature

#: Ops whose kernels write no other layout than that of the program, and values from outside.
_FIXED = BARRIERS | {"argument", "join", "dynamic_update_slice"}
#: Ops that a product's operand passes unchanged.
_PASSING = frozenset({"convert", "reshape", "transpose"})

#: Products of groups of rows, and the operand with the sizes of the groups.  XLA multiplies all
#: rows with the matrix of each group, after it has written them with zeros for the other rows.
_GROUPS = 2

#: Accesses of an operand: a transpose reads and writes it.  The transposed cache is copied before
#: it is updated, and transposed back if it is kept.
_TRANSPOSED, _UPDATED, _KEPT = 2, 4, 6


@dataclasses.dataclass(frozen=True)
class ProductLayouts:
    """What products of libraries cost besides."""

    #: ``[uses]`` how often kernels before a product read or write the operand to transpose it.
    again: Ints
    #: ``[values]`` whether it is updated in another layout, so not in the buffer of its operand.
    copied: Bools

    @staticmethod
    def none(program: Program, uses: int) -> ProductLayouts:
        """The layouts of devices whose kernels read operands as they are."""
        copied = np.zeros(len(program.values), dtype=bool)
        return ProductLayouts(np.zeros(uses, dtype=np.int64), copied)

    @staticmethod
    def of(program: Program, use_op: Ints, use_index: Ints) -> ProductLayouts:
        """The layouts of a program whose uses are operand ``use_index`` of op ``use_op``."""
        layouts = ProductLayouts.none(program, len(use_op))
        uses: dict[int, int] = {}
        for value in (*(v for op in program.ops for v in op.operands), *program.result_values):
            uses[value] = uses.get(value, 0) + 1
        kinds = [signature.kind for signature in program.signatures]
        for use, (number, index) in enumerate(
            zip(use_op.tolist(), use_index.tolist(), strict=True)
        ):
            op = program.ops[number]
            signature, kind = program.signatures[op.signature], kinds[op.signature]
            if kind in GROUPED and index == 0:
                layouts.again[use] = _TRANSPOSED * signature.operands[_GROUPS].shape[-1]
            if kind != "dot_general" or (groups := product_groups(signature, index)) is None:
                continue
            source, order, transposed = layout_of(program, op.operands[index])
            maker = kinds[program.ops[program.values[source].op].signature]
            if maker not in _FIXED or (fits(order, groups) and not transposed):
                continue
            layouts.again[use] = _TRANSPOSED
            if maker == "dynamic_update_slice":
                layouts.again[use] = _KEPT if uses[source] > 1 else _UPDATED
                layouts.copied[source] = True
        return layouts


def fits(order: Sequence[int], groups: Sequence[Sequence[int]]) -> bool:
    """Whether a library takes an operand as it is in memory.

    :param order: the dimensions from the outermost to the innermost one in memory, without those of
        size 1.
    :param groups: the dimensions of the batch, and two more groups: those of rows and columns.
    """
    runs = [key for key, _ in itertools.groupby(
        next(g for g, dims in enumerate(groups) if dimension in dims) for dimension in order
    )]  # fmt: skip
    return len(runs) == len(set(runs)) and (len(runs) < 2 or runs[-1] != 0)


def product_groups(
    signature: Signature, index: int, *, single: bool = False
) -> tuple[Sequence[int], ...] | None:
    """The dimensions of an operand by group; ``None`` for products with a ``single`` vector.

    XLA for GPUs computes these as sums, in any layout.
    """
    batch, contracted = (
        [dimensions_in(signature, f"{side}_{name}_dimensions") for side in ("lhs", "rhs")]
        for name in ("batching", "contracting")
    )
    free = [
        [d for d in range(len(operand.shape)) if d not in (*batch[side], *contracted[side])]
        for side, operand in enumerate(signature.operands)
    ]
    sizes = [
        int(np.prod([operand.shape[d] for d in dims], dtype=np.float64))
        for operand, dims in zip(signature.operands, free, strict=True)
    ]
    return (
        None if min(sizes) == 1 and not single else (batch[index], free[index], contracted[index])
    )


def layout_of(program: Program, value: int) -> tuple[int, list[int], bool]:
    """The value in memory that becomes an operand, the operand's layout, and whether it is new.

    The layout has the operand's dimensions from the outermost to the innermost one, without those
    of size 1.  It is new if dimensions are merged or split that are not next to one another.
    """
    chain = []
    while program.kinds[program.makers[value]] in _PASSING:
        chain.append(program.ops[program.makers[value]])
        value = chain[-1].operands[0]
    shape = program.values[value].type.shape
    order, transposed = list(range(len(shape))), False
    for op in reversed(chain):
        signature = program.signatures[op.signature]
        shape = signature.results[0].shape
        if signature.kind == "transpose":
            place = {d: i for i, d in enumerate(dimensions_in(signature, "permutation"))}
            order = [place[d] for d in order]
        elif signature.kind == "reshape":
            order, apart = _reshaped(order, signature.operands[0].shape, shape)
            transposed |= apart
    return value, [d for d in order if shape[d] > 1], transposed


def _reshaped(
    order: Sequence[int], before: Sequence[int], after: Sequence[int]
) -> tuple[list[int], bool]:
    """The layout after a reshape, and whether it joins dimensions that are apart in memory."""
    order = [d for d in order if before[d] > 1]
    old = [d for d in range(len(before)) if before[d] > 1]
    new = [d for d in range(len(after)) if after[d] > 1]
    pieces: dict[int, list[int]] = {}  # the new dimensions, by the first old one that they replace
    while old or new:
        olds, news = [old.pop(0)] if old else [], [new.pop(0)] if new else []
        while (left := math.prod(before[d] for d in olds)) != (
            right := math.prod(after[d] for d in news)
        ):
            (olds if left < right else news).append((old if left < right else new).pop(0))
        place = order.index(olds[0])
        if order[place : place + len(olds)] != olds:
            return list(range(len(after))), True
        del order[place + 1 : place + len(olds)]
        pieces[olds[0]] = news
    return [d for first in order for d in pieces[first]], False
