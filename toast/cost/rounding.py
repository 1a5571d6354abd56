"""What products round: XLA keeps float32 values in the element type of products where it can.

Products on a TPU's matrix unit round float32 operands to bfloat16.  A value that only products read
is rounded by the kernel that computes it, and takes half of the memory.  Convolutions are products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from toast.cost.entities import Bools, Ints
from toast.cost.liveness import BARRIERS, ROOTS, Liveness
from toast.cost.program_loops import loop_ties, loops_of
from toast.program import Program, element_bytes
from toast.space import PRODUCTS

#: Ops that change no element.
_MOVING = frozenset({"reshape", "transpose", "optimization_barrier"})

#: Ops between a value and a product whose kernel computes them.
_FUSED = frozenset({
    "reshape", "transpose", "broadcast_in_dim", "slice", "reduce_precision",
    "sdy_sharding_constraint",
})  # fmt: skip

#: Ops that begin and end the iterations of a loop, and those through which values are in a stack.
_LOOPED = frozenset({"carry", "yield"})
_STACKING = _LOOPED | {"dynamic_slice", "dynamic_update_slice"}

#: Ops through which only products may read a value.  XLA rounds across barriers.
_THROUGH = _FUSED | _STACKING | {"optimization_barrier"}

#: Ops whose results another kernel reduces.
_PASSED = _STACKING | {"optimization_barrier", "gather"}

#: Ops whose results have the element type of the program.
_WHOLE = (
    ((BARRIERS - PRODUCTS) | (ROOTS - {"reduce", "concatenate", "gather"}) | {"argument"})
    - _STACKING - {"optimization_barrier"}
)  # fmt: skip


def stored_rounded(program: Program, live: Liveness) -> Bools:
    """``[values]`` whether a float32 value is in memory in the element type of products.

    It is if only products read the value, directly or through ops that move elements, or through a
    stack that a loop fills and another reads.  The kernel that computes the value also reduces it,
    as for the gradient of a bias, unless the value is looked up, in a stack or behind a barrier.
    """
    uses, kinds = program.users, live.kinds
    rounded = [
        value.type.dtype == "f32" and bool(users) and kinds[value.op] not in _WHOLE
        for value, users in zip(program.values, uses, strict=True)
    ]
    results = [op.results[0] if op.results else -1 for op in program.ops]
    source = [*program.makers]  # of each value, before it is moved
    for number, maker in enumerate(source):
        if kinds[maker] in _FUSED:
            source[number] = source[program.ops[maker].operands[0]]
    # The values at the beginning and at the end of an iteration are in one buffer.
    other = {results[one]: results[two] for pair in program.ties for one, two in (pair, pair[::-1])}
    changed = True
    while changed:
        changed = False
        for number in np.flatnonzero(rounded)[::-1].tolist():
            kept = all(
                kinds[op] in PRODUCTS
                or (kinds[op] in _THROUGH and rounded[results[op]])
                or (kinds[op] == "reduce" and kinds[source[number]] not in _PASSED)
                for op in uses[number]
            )
            if not kept or (
                kinds[program.makers[number]] in _LOOPED and not rounded[other[number]]
            ):
                rounded[number], changed = False, True
    return np.asarray(live.exists & np.array(rounded, dtype=bool))


def operands_rounded(program: Program, live: Liveness, use_op: Ints, use_value: Ints) -> Bools:
    """``[values]`` whether a float32 value that kernels compute is an operand of a product.

    If the product needs its operand in memory, the operand is rounded for it.
    """
    kinds = live.kinds
    of_product = np.zeros(len(program.values), dtype=bool)
    of_product[use_value[[kinds[op] in PRODUCTS for op in use_op.tolist()]]] = True
    wide = [value.type.dtype == "f32" for value in program.values]
    computed = [kinds[value.op] not in PRODUCTS for value in program.values]
    found = of_product & ~live.exists & np.array(wide, dtype=bool)
    return np.asarray(found & np.array(computed, dtype=bool))


def rounded_stacks(program: Program) -> list[tuple[int, int, int]]:
    """Stacked float32 arguments of which loops only use slices that they round to bfloat16.

    Products round their operands, too.  XLA rounds the whole stack before the first such loop,
    instead of each slice.  Each entry has the argument's value and the first and the last op
    between which it has the copy.
    """
    copies: dict[int, tuple[int, int]] = {}
    if not (loops := loops_of(program)):
        return []
    arguments = {*program.argument_values}
    for begin, _, end in loops:
        for number in range(begin, end):
            op = program.ops[number]
            if program.kind(number) != "dynamic_slice" or op.operands[0] not in arguments:
                continue
            value = op.operands[0]
            if program.values[value].type.dtype == "f32" and _rounded(program, number):
                first, last = copies.get(value, (begin, end))
                copies[value] = min(first, begin), max(last, end)
    return [(value, first, last) for value, (first, last) in copies.items()]


def _rounded(program: Program, number: int) -> bool:
    """Whether an op's result, of type float32, has no use but rounded to bfloat16."""
    users = program.users[program.ops[number].results[0]]
    for user in users:
        kind = program.kind(user)
        if kind == "convert":
            rounded = program.values[program.ops[user].results[0]].type.dtype == "bf16"
        else:
            rounded = kind in PRODUCTS or (kind in _MOVING and _rounded(program, user))
        if not rounded:
            return False
    return len(users) > 0


def lookups_rounded(program: Program) -> dict[int, float]:
    """By table of ``gather`` ops: bytes of its element over those before, if it is rounded first.

    XLA rounds the shards of a table, and gathers these, if all that is looked up in it is rounded
    at once.
    """
    shares: dict[int, float] = {}
    for number, op in enumerate(program.ops):
        if program.kinds[number] == "gather":
            table = op.operands[0]
            share = _rounded_bytes(program, op.results[0])
            share /= element_bytes(program.values[table].type.dtype)
            shares[table] = max(share, shares.get(table, 0.0))
    return {table: share for table, share in shares.items() if share < 1.0}


def carries_rounded(program: Program, products: Mapping[str, float]) -> dict[int, float]:
    """By ``yield``: bytes of an element as the next iteration needs it, over those of its own.

    A recurrence keeps its state in float32, and its product rounds it: XLA gathers the rounded one.
    ``products`` are the bytes to which products round elements of float32, by kind.
    """
    shares: dict[int, float] = {}
    for end, begin in loop_ties(program):
        (carried,), results = program.ops[begin].results, program.ops[end].results
        if not any(program.users[value] for value in results):
            share = _rounded_bytes(program, carried, products)
            share /= element_bytes(program.values[carried].type.dtype)
            if share < 1.0:
                shares[end] = share
    return shares


def _rounded_bytes(
    program: Program,
    value: int,
    products: Mapping[str, float] = MappingProxyType({}),
) -> float:
    """The bytes of an element when all users of a value, such as products, have rounded it."""

    def by(user: int) -> float:
        kind, op = program.kinds[user], program.ops[user]
        if kind in _MOVING:
            return _rounded_bytes(program, op.results[0], products)
        if kind == "convert":
            return element_bytes(program.values[op.results[0]].type.dtype)
        rounds = program.values[value].type.dtype == "f32"
        return products.get(kind, math.inf) if rounds else math.inf

    return max(map(by, program.users[value]), default=math.inf)
