"""What XLA's kernels of products for TPUs read and compute besides the product."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from toast.cost.entities import Bools, Floats, Ints
from toast.cost.kernel_kinds import products_of_vectors
from toast.cost.liveness import MATRIX_PRODUCTS, MOVING, Liveness
from toast.cost.program_loops import loops_around
from toast.program import Program
from toast.space import PRODUCTS

#: Ops that repeat the elements of an array, or only move or round them.
_REPEATING = MOVING | {"broadcast_in_dim"}


#: Ops whose result is a form or a part of their operand.
_FORMING = MOVING | {"slice"}

#: The dimensions of a matrix.
_MATRIX = 2


class RoundedArgument(NamedTuple):
    """An argument that products read in another element type, or of which they read a slice."""

    value: int
    #: The use of the argument, or of it behind barriers, from which that form follows.
    use: int
    #: The first of the products.
    first: int


def repeated(program: Program, live: Liveness) -> Mapping[int, int]:
    """Operands of products of vectors that repeat a value in memory, and this value.

    The kernel of such a product is elementwise, and repeats the only head of a device as it reads
    it.  Several heads are repeated by a kernel of their own; the moves of that kernel
    (:attr:`toast.cost.liveness.Liveness.moves`) were fitted with all reads.
    """
    found, multiplies = {}, products_of_vectors(program)
    for number, op in enumerate(program.ops):
        if multiplies[op.signature] and live.kinds[number] == "dot_general":
            for value in op.operands:
                *_, source = _sources(program, live, value)
                if _elements(program, source) < _elements(program, value):
                    found[value] = source
    return found


def read_shares(program: Program, repeats: Mapping[int, int]) -> Floats:
    """``[values]`` the share of a value that a product reads; less than 1 if it repeats another.

    ``repeats`` are those of :func:`repeated`.
    """
    shares = np.ones(len(program.values))
    for value, source in repeats.items():
        shares[value] = _elements(program, source) / _elements(program, value)
    return shares


def read_by_products(
    program: Program, live: Liveness, repeats: Mapping[int, int], use_op: Ints, use_value: Ints
) -> Bools:
    """``[uses]`` the uses whose value the kernel of a product reads or computes.

    It reads the values that it repeats, and reduces a result that nothing else uses, such as the
    logits of the next token (also if it is summed over devices, which is left out here).
    """
    maker = np.array([value.op for value in program.values], dtype=np.int64)
    reads = np.bincount(use_value, minlength=len(maker))
    chained = {
        inner for value in repeats
        for inner in _sources(program, live, value) if reads[inner] == 1
    }  # fmt: skip
    inside = np.zeros(len(program.ops), dtype=bool)  # ops of which only such products use results
    inside[[program.values[value].op for value in chained]] = True
    inside &= np.array([kind in _REPEATING for kind in live.kinds], dtype=bool)
    reduces = np.array([kind == "reduce" for kind in live.kinds], dtype=bool)
    multiplies = np.array([kind in PRODUCTS for kind in live.kinds], dtype=bool)
    alone = reads[use_value] == 1
    return np.asarray(inside[use_op] | (reduces[use_op] & multiplies[maker[use_value]] & alone))


def rounded_arguments(
    program: Program, live: Liveness, use_op: Ints, use_value: Ints
) -> dict[int, RoundedArgument]:
    """Operands of products that are slices of arguments, or arguments in another element type.

    The kernel of such a product reads the argument, and rounds what it has read.  Loops are left
    out.
    """
    rounded: dict[int, RoundedArgument] = {}
    for argument, first, products in _read_by_products_alone(program, live, use_op, use_value):
        operands = {
            value for op in products for value in program.ops[op].operands
            if argument in _forms(program, value)
        }  # fmt: skip
        # The kernel of another form serves all products of the use.
        if all(_in_another_form(program, value, argument) for value in operands):
            read = RoundedArgument(argument, first, min(products, default=-1))
            rounded |= dict.fromkeys(operands, read)
    return rounded


def turned_arguments(program: Program, live: Liveness, use_op: Ints, use_value: Ints) -> list[int]:
    """Uses of matrices that products read as they are, although the program transposes them.

    The table ``e`` of ``h @ e.T`` is one.  Loops are left out.
    """
    return [
        first
        for argument, first, products in _read_by_products_alone(program, live, use_op, use_value)
        if len(program.values[argument].type.shape) == _MATRIX and products and not any(
            _in_another_form(program, value, argument)
            for op in products for value in program.ops[op].operands
            if argument in _forms(program, value)
        )
    ]  # fmt: skip


def _read_by_products_alone(
    program: Program, live: Liveness, use_op: Ints, use_value: Ints
) -> Iterator[tuple[int, int, list[int]]]:
    """Uses of arguments by forms of which products alone read the last ones.

    Each is the argument, its use, or that of it behind barriers, and the products; none if another
    kernel writes the form for all of them.
    """
    uses: dict[int, list[int]] = defaultdict(list)
    for use, value in enumerate(use_value.tolist()):
        uses[value].append(use)
    inside = loops_around(program)
    for argument in program.argument_values:
        for first in _uses_of_forms(program, live, uses, use_op, argument):
            ops, products = [int(use_op[first])], list[int]()
            while ops:
                op = ops.pop()
                if live.kinds[op] in MATRIX_PRODUCTS and inside[op] is None:
                    products.append(op)
                elif _forms_operand(program, live, op):
                    ops += [int(use_op[use]) for use in uses[program.ops[op].results[0]]]
                else:
                    products = []  # a kernel of its own rounds it for all of them
                    break
            yield argument, first, products


def _in_another_form(program: Program, value: int, argument: int) -> bool:
    """Whether a value is an argument in another element type, or a slice of it."""
    forms = itertools.takewhile(lambda form: form != argument, _forms(program, value))
    return any(program.kinds[program.makers[form]] in ("convert", "slice") for form in forms)


def _forms_operand(program: Program, live: Liveness, op: int) -> bool:
    """Whether an op only changes the element type or the shape of an operand of products.

    It may also take a part of the leading dimension, such as the weights of a layer.
    """
    if live.kinds[op] not in _FORMING or live.exists[program.ops[op].results[0]]:
        return False
    if live.kinds[op] != "slice":
        return True
    whole, part = (
        program.values[values[0]].type.shape
        for values in (program.ops[op].operands, program.ops[op].results)
    )
    return whole[1:] == part[1:]


def _uses_of_forms(
    program: Program, live: Liveness, uses: Mapping[int, Sequence[int]], use_op: Ints, value: int
) -> Iterator[int]:
    """Uses of a value that only change its element type or shape; XLA removes barriers before."""
    behind = [value]
    while behind:
        for use in uses[behind.pop()]:
            op = int(use_op[use])
            if live.kinds[op] == "optimization_barrier":
                behind.append(program.ops[op].results[0])
            elif _forms_operand(program, live, op):
                yield use


def _forms(program: Program, value: int) -> Iterator[int]:
    """A value, those of which it is a form or a part, and the first of them."""
    yield value
    while program.kinds[program.makers[value]] in _FORMING | {"optimization_barrier"}:
        (value,) = program.ops[program.makers[value]].operands
        yield value


def _sources(program: Program, live: Liveness, value: int) -> Iterator[int]:
    """A value and those that it repeats, as far as the first one in memory."""
    while True:
        yield value
        made = program.values[value].op
        stored = live.exists[value] and value not in live.repeated
        if stored or live.kinds[made] not in _REPEATING:
            return
        (value,) = program.ops[made].operands


def _elements(program: Program, value: int) -> int:
    return math.prod(program.values[value].type.shape)


__all__ = [
    "RoundedArgument", "read_by_products", "read_shares", "repeated", "rounded_arguments",
    "turned_arguments",
]  # fmt: skip
