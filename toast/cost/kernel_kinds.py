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


def _of_product(signature: Signature) -> str:
    left, right = (operand.shape for operand in signature.operands[:2])
    summed, batch = (
        _size(left, signature.attribute(f"lhs_{name}_dimensions"))
        for name in ("contracting", "batching")
    )
    if not summed or not batch:  # of no elements, or dimensions are unknown
        return signature.kind
    if summed == 1:
        return "multiply"
    vectors = math.prod(left) == math.prod(right) == summed * batch
    return "reduce" if vectors and batch > 1 else signature.kind


def _size(shape: tuple[int, ...], dims: object) -> int:
    return math.prod(shape[int(d)] for d in dims) if isinstance(dims, tuple) else 0


__all__ = ["kernel_kinds"]
