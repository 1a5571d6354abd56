"""Results of products that reductions follow, and the kernels that read them.

Such are the scores of a token that attends to a cache, with their tiles, and the logits of a loss.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from toast.cost.entities import Bools, Floats, Ints
from toast.cost.kernel_kinds import of_vectors, products_of_vectors
from toast.cost.liveness import (
    BARRIERS,
    MOVING,
    Liveness,
    dimensions_in,
    of_difference,
    op_before,
)
from toast.program import Program, Signature
from toast.space import PRODUCTS

#: Ops that start another array: they have no dimension of their operand's tiles.
_OTHERS = BARRIERS | {"gather", "concatenate", "slice", "dynamic_slice", "return"}


def headed_scores(
    program: Program, kinds: Sequence[str], lanes: int, repeated_operands: Collection[int]
) -> Mapping[int, int]:
    """Scores whose layout follows that of a cache, and the dimension of their heads.

    A token attends to a cache ``[batch, keys, heads, size]``.  If a head is whole rows of tiles,
    which have ``lanes`` elements, the sum over ``size`` leaves the heads in the lanes, and so do
    the elementwise ops up to the next product.  Devices whose heads fill no rows of tiles have
    another layout (:meth:`toast.cost.machine.Machine.lane_padding`).
    ``repeated_operands`` are in tiles of another array.
    """
    found: dict[int, int] = {}
    for number, op in enumerate(program.ops):
        if len(op.results) != 1:
            continue
        (result,), signature = op.results, program.signatures[op.signature]
        if kinds[number] == "dot_general":
            heads = _heads(signature, lanes)
            if heads is not None and not any(value in repeated_operands for value in op.operands):
                found[result] = heads
        elif kinds[number] not in _OTHERS:
            for value in op.operands:
                if value in found and result not in found:
                    place = _place(signature, op.operands.index(value), found[value])
                    if place is not None:
                        found[result] = place
    return found


#: Reductions of a softmax that the kernel of the product computes: the maximum.
_IN_PRODUCT = 1

#: The longest rows of which the kernel of the product also adds up the exponentials.
_LONGEST = 3072

#: Ops that move or repeat elements.
_REPEATING = MOVING | {"broadcast_in_dim"}

#: Ops that move or scale elements.
_SCALING = frozenset({"multiply", "reshape", "transpose"})


def score_passes(
    program: Program, live: Liveness, use_op: Ints, use_value: Ints, read: Bools
) -> Floats:
    """``[uses]`` how many kernels read the value of each use, if a product computes it.

    It is 1 elsewhere.  Kernels of products of vectors compute nothing else: a softmax reads the
    scores for the maximum, for the sum, and for the result.  The last kernel writes as much as it
    reads, and the price of its write contains both.  Kernels of other products compute the maximum
    of a softmax, too; each reduction of the same pass that needs the result of another one reads
    their result again, such as the sum of exponentials, and then that of the logarithms of labels'
    probabilities.  These count at the first use that a kernel ``read`` (``[uses]``).
    """
    computed, vectors = set[int](), set[int]()
    multiplies = products_of_vectors(program)
    for number, op in enumerate(program.ops):
        if live.kinds[number] == "dot_general":
            computed.update(op.results)
            if multiplies[op.signature]:
                vectors.update(op.results)
    passes = np.ones(len(use_op))
    uses: dict[int, list[int]] = defaultdict(list)
    for use, value in enumerate(use_value.tolist()):
        if value in computed:
            uses[value].append(use)
    if not uses:
        return passes
    kernels = _reductions(program, live, {int(use_op[use]) for at in uses.values() for use in at})
    for value, at in uses.items():
        if value in vectors:
            for use in at:
                passes[use] = max(len(kernels[use_op[use]]), 1)
            continue
        reducing = frozenset[int]().union(*(kernels[use_op[use]] for use in at))
        counted = [use for use in at if read[use]]
        if counted and len(reducing) > _IN_PRODUCT + 1:
            alike = program.passes[min(reducing)]
            chained = [op for op in reducing if program.passes[op] == alike]
            passes[counted[0]] = max(_levels(program, chained) - _IN_PRODUCT, 1)
    return passes


def _reductions(
    program: Program, live: Liveness, ops: Collection[int]
) -> Mapping[int, frozenset[int]]:
    """The reductions whose kernels compute each of some ops; none if kernels of products do."""
    fused, pending = set[int](), [*ops]
    kernels: dict[int, frozenset[int]] = {}
    while pending:
        number = pending.pop()
        results = program.ops[number].results
        if number in fused or number in kernels:
            continue
        if live.kinds[number] in PRODUCTS:
            kernels[number] = frozenset()
        elif not results or live.exists[results[0]]:
            kernels[number] = frozenset([number] if live.kinds[number] == "reduce" else [])
        else:
            fused.add(number)
            pending += [user for value in results for user in program.users[value]]
    for number in sorted(fused, reverse=True):
        users = (user for value in program.ops[number].results for user in program.users[value])
        kernels[number] = frozenset().union(*(kernels[user] for user in users))
    return kernels


def sums_in_products(program: Program, live: Liveness) -> list[int]:
    """Sums of exponentials that the kernel of the product of queries and keys computes.

    It computes them with the maximum if the exponentials are those of the very values that it
    reduces, the rows are short, and each query has a key of its own.  If a transpose is between
    the maximum and the exponentials, as in ``jax.nn.dot_product_attention``, the keys are
    repeated for several queries, or the maximum is that of all blocks of keys up to this one,
    which a loop carries, another kernel adds.
    """
    sums: list[int] = []
    for number, op in enumerate(program.ops):
        if program.kinds[number] != "reduce" or program.passes[number] == "backward":
            continue
        summed = op.operands[0]
        product = int(live.fused_product[summed])
        scores = of_difference(program, live.kinds, program.makers[summed])
        if scores is None or product < 0:
            continue
        short = program.values[summed].type.shape[-1:] <= (_LONGEST,)
        reduced = any(program.kinds[user] == "reduce" for user in program.users[scores])
        operands = program.ops[program.makers[product]].operands
        if not short or not reduced or _is_of_blocks(program, program.makers[summed]):
            continue
        if not any(_is_repeated(program, value) for value in operands):
            sums.append(number)
    return sums


def gradients_in_products(program: Program, live: Liveness) -> list[int]:
    """Gradients of attention's scores that the kernels of the products that read them compute.

    They are in float32, for products that round them.  If the program rounds them itself, a kernel
    of its own does.
    """
    gradients: list[int] = []
    for number, op in enumerate(program.ops):
        if program.kinds[number] != "multiply" or program.passes[number] != "backward":
            continue
        (result,) = op.results
        exponentials = any(
            program.kinds[program.makers[value]] == "exponential" and live.fused_product[value] >= 0
            for value in op.operands
        )
        if exponentials and live.exists[result] and _only_for_products(program, result):
            gradients.append(result)
    return gradients


def _only_for_products(program: Program, value: int) -> bool:
    """Whether only products read a value, or what moves or scales it."""
    for user in program.users[value]:
        if program.kinds[user] == "dot_general":
            continue
        scaled = program.kinds[user] in _SCALING and len(program.ops[user].results) == 1
        if not scaled or not _only_for_products(program, program.ops[user].results[0]):
            return False
    return True


def _is_repeated(program: Program, value: int) -> bool:
    """Whether heads are repeated for an operand of a product."""
    maker = op_before(program, program.makers[value], MOVING | {"reduce_precision"})
    return program.kinds[maker] == "broadcast_in_dim"


def _is_of_blocks(program: Program, exponential: int) -> bool:
    """Whether an exponential subtracts a maximum that a loop over blocks of keys carries."""
    difference = program.ops[program.makers[program.ops[exponential].operands[0]]]
    most = op_before(program, program.makers[difference.operands[1]], _REPEATING)
    return program.kinds[most] == "maximum" and any(
        _is_carried(program, value) for value in program.ops[most].operands
    )


def _is_carried(program: Program, value: int) -> bool:
    """Whether a loop carries a value, before barriers and what moves or repeats it."""
    while program.kinds[maker := program.makers[value]] in _REPEATING | {"optimization_barrier"}:
        op = program.ops[maker]
        value = op.operands[op.results.index(value) if len(op.results) > 1 else 0]
    return program.kinds[maker] == "carry"


def _levels(program: Program, ops: Collection[int]) -> int:
    """The longest chain of ``ops`` of which each needs the result of the one before."""
    level: dict[int, int] = {}  # by op: those up to it
    for number in range(min(ops), max(ops) + 1):
        before = max(
            (level.get(program.makers[value], 0) for value in program.ops[number].operands),
            default=0,
        )
        level[number] = before + (number in ops)
    return max(level[number] for number in ops)


def _heads(signature: Signature, lanes: int) -> int | None:
    """The dimension of heads in the result of a product of vectors that sums over their size."""
    if not of_vectors(signature):
        return None
    shapes = [operand.shape for operand in signature.operands[:2]]
    side = max((0, 1), key=lambda n: math.prod(shapes[n]))
    name, last = ("lhs", "rhs")[side], len(shapes[side]) - 1
    batch = dimensions_in(signature, f"{name}_batching_dimensions")
    summed = dimensions_in(signature, f"{name}_contracting_dimensions")
    whole = shapes[side][last] % lanes == 0
    return batch.index(last - 1) if summed == (last,) and last - 1 in batch and whole else None


def _place(signature: Signature, operand: int, place: int) -> int | None:
    """Where an op has a dimension of an operand in its result; ``None`` if nowhere."""
    before, after = signature.operands[operand].shape, signature.results[0].shape
    if signature.kind == "transpose":
        return dimensions_in(signature, "permutation").index(place)
    if signature.kind == "reshape":
        kept = [d for d in range(len(before)) if before[d] > 1]
        left = [d for d in range(len(after)) if after[d] > 1]
        alike = [before[d] for d in kept] == [after[d] for d in left]
        return left[kept.index(place)] if alike and place in kept else None
    return place if before == after else None


__all__ = ["gradients_in_products", "headed_scores", "score_passes", "sums_in_products"]
