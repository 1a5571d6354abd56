"""The kinds of ops as XLA's TPU compiler computes them."""

from __future__ import annotations

import math

from toast.program import Program, Signature


def kernel_kinds(program: Program, lanes: int) -> list[str]:
    """``[ops]`` the kind of each op, as its kernel has it.

    ``lanes`` are the elements of a row of the device's tiles, 1 for none.  With tiles, products
    that need no matrix unit are other ops: without a sum, an elementwise ``multiply``, and of two
    vectors, a ``reduce``.  State spaces have both.  XLA fuses many of them into products; their
    results count as stored all the same, which makes up for copies without a price.
    """
    kinds = [signature.kind for signature in program.signatures]
    if lanes > 1:
        kinds = [
            _of_product(signature) if kind == "dot_general" else kind
            for signature, kind in zip(program.signatures, kinds, strict=True)
        ]
    return [kinds[op.signature] for op in program.ops]


def of_vectors(signature: Signature) -> bool:
    """Whether a ``dot_general`` is a batch of products of a vector and a matrix.

    They run on the vector unit: a token of each sequence that attends to a cache.
    """
    left, right = (math.prod(operand.shape) for operand in signature.operands[:2])
    summed, batch = _summed_and_batch(signature)
    return batch > 1 and summed > 1 and min(left, right) == summed * batch < max(left, right)


def products_of_vectors(program: Program) -> list[bool]:
    """``[signatures]`` whether ops are :func:`of_vectors`; not those of other kinds."""
    return [each.kind == "dot_general" and of_vectors(each) for each in program.signatures]


def _of_product(signature: Signature) -> str:
    left, right = (math.prod(operand.shape) for operand in signature.operands[:2])
    summed, batch = _summed_and_batch(signature)
    if not summed or not batch:  # of no elements, or dimensions are unknown
        return signature.kind
    if summed == 1:
        return "multiply"
    vectors = left == right == summed * batch
    return "reduce" if vectors and batch > 1 else signature.kind


def _summed_and_batch(signature: Signature) -> tuple[int, int]:
    """The terms of the sum of each element, and the products in a batch; 0 if unknown."""
    left = signature.operands[0].shape
    summed, batch = (
        _size(left, signature.attribute(f"lhs_{name}_dimensions"))
        for name in ("contracting", "batching")
    )
    return summed, batch


def _size(shape: tuple[int, ...], dims: object) -> int:
    return math.prod(shape[int(d)] for d in dims) if isinstance(dims, tuple) else 0


__all__ = ["kernel_kinds", "of_vectors", "products_of_vectors"]
