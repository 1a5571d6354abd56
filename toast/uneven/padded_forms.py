"""Which factors of an op can be padded, and what its padded form changes.

Elements in the padding are arbitrary.  Where an op combines the elements of a padded dimension, its
operands have the combiner's identity there first; factors for which this is not enough stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from toast.analysis import SignatureRule
from toast.frontend import mlir
from toast.program import Signature

#: Kinds whose results depend on more than the elements at the same place, or whose meaning is
#: not known.
_WHOLE = frozenset({
    "batch_norm_grad", "batch_norm_inference", "batch_norm_training", "bitcast_convert",
    "broadcast", "chlo_constant", "cholesky", "composite", "custom_call",
    "dynamic_broadcast_in_dim", "dynamic_conv", "dynamic_gather", "dynamic_iota", "dynamic_pad",
    "dynamic_reshape", "fft", "get_dimension_size", "infeed", "map", "outfeed",
    "real_dynamic_slice", "recv", "rng", "rng_bit_generator", "select_and_scatter", "send",
    "set_dimension_size", "triangular_solve",
})  # fmt: skip

#: Kinds that combine elements, whose operands can have the combiner's identity in the padding.
_MASKED = frozenset({"dot_general", "reduce"})

#: The largest numbers of element types without infinities.
_LARGEST = {
    "f8E4M3FN": 448.0, "f8E4M3FNUZ": 240.0, "f8E5M2FNUZ": 57344.0, "f8E4M3B11FNUZ": 30.0,
    "f6E2M3FN": 7.5, "f6E3M2FN": 28.0, "f4E2M1FN": 6.0,
}  # fmt: skip

#: Attributes with the size of each dimension of the first operand or of the result.
_SIZES = {"slice": "limit_indices", "gather": "slice_sizes", "dynamic_slice": "slice_sizes"}


def can_be_padded(signature: Signature, rule: SignatureRule, number: int) -> bool:
    """Whether an op has a padded form along a factor."""
    factor = rule.factors[number]
    if signature.kind in _WHOLE or factor.permutation or factor.halo or factor.need_replication:
        return False
    sides = (
        *zip(rule.operands, signature.operands, strict=True),
        *zip(rule.results, signature.results, strict=True),
    )
    for dims, type_ in sides:
        for factors, size in zip(dims, type_.shape, strict=True):
            if number in factors and (len(factors) > 1 or size != factor.size):
                return False
    everywhere = all(any(number in factors for factors in dims) for dims in rule.results)
    if signature.kind == "convolution":
        groups = (signature.attribute(f"{of}_group_count") for of in ("feature", "batch"))
        return everywhere and not factor.combiner and all(count in (None, 1) for count in groups)
    if everywhere:
        return not factor.combiner
    return signature.kind in _MASKED and factor.combiner in identities()


def identities() -> dict[str, tuple[float, float]]:
    """The identity of each combiner, for floating-point numbers and for the sign of integers."""
    return {
        "add": (0.0, 0.0), "multiply": (1.0, 1.0), "maximum": (-math.inf, -1.0),
        "minimum": (math.inf, 1.0), "or": (0.0, 0.0), "xor": (0.0, 0.0), "and": (0.0, 1.0),
    }  # fmt: skip


def identity(combiner: str, element: Any) -> float | None:
    """The identity of a combiner for an MLIR element type; ``None`` if it has none here."""
    real, sign = identities()[combiner]
    if isinstance(element, ir.IntegerType):
        width = int(element.width)
        signed = not element.is_unsigned and width > 1
        least, largest = (
            (-(2 ** (width - 1)), 2 ** (width - 1) - 1) if signed else (0, 2**width - 1)
        )
        if combiner == "and":
            return -1 if signed else largest
        if combiner in ("maximum", "minimum"):
            return least if sign < 0 else largest
        return real
    if combiner == "and" or (isinstance(element, ir.ComplexType) and math.isinf(real)):
        return None
    if math.isinf(real):
        return math.copysign(_LARGEST.get(str(element), math.inf), real)
    return real


def padded(value: Any, shape: Sequence[int]) -> Any:
    """``value`` with zeros behind its elements, in a larger shape."""
    current = list(value.type.shape)
    if current == list(shape):
        return value
    rank = len(current)
    high = [large - small for large, small in zip(shape, current, strict=True)]
    return stablehlo.pad(
        value, mlir.splat(0, [], value.type.element_type), [0] * rank, high, [0] * rank
    )


def cut(value: Any, shape: Sequence[int]) -> Any:
    """The first elements of ``value``, in a smaller shape."""
    if list(value.type.shape) == list(shape):
        return value
    rank = len(shape)
    return stablehlo.slice(value, [0] * rank, list(shape), [1] * rank)


def masked(value: Any, d: int, size: int, number: float) -> Any:
    """``value`` with ``number`` behind the first ``size`` elements of a dimension."""
    fill = mlir.splat(number, list(value.type.shape), value.type.element_type)
    return _filled(value, d, size, fill)


def _filled(value: Any, d: int, size: int, fill: Any) -> Any:
    """``value`` with elements of ``fill`` behind the first ``size`` elements of a dimension."""
    shape = list(value.type.shape)
    index = ir.RankedTensorType.get(shape, ir.IntegerType.get_signless(32))
    position = stablehlo.iota(index, d)
    end = mlir.splat(size, shape, index.element_type)
    less = stablehlo.ComparisonDirectionAttr.get("LT")
    return stablehlo.select(stablehlo.compare(position, end, less), value, fill)


def moved_slice(
    operation: Any, value: Any, whole: Sequence[int], shape: Sequence[int], moving: Sequence[int]
) -> Any:
    """A slice of a padded operand ``value``, of a padded shape.

    Dimensions ``moving`` are moved to the begin as a whole; what lies behind the slice is padding.
    ``whole`` is the shape of the operand without padding.
    """
    start, limit, steps = (
        [int(n) for n in ir.DenseI64ArrayAttr(operation.attributes[name])]
        for name in ("start_indices", "limit_indices", "strides")
    )
    low = [0] * len(start)
    for d, size in enumerate(value.type.shape):
        if d in moving:
            low[d], start[d], limit[d] = -start[d], 0, size
        elif limit[d] == whole[d]:
            limit[d] = size
    part = value
    if any(start) or limit != list(value.type.shape) or any(step != 1 for step in steps):
        part = stablehlo.slice(value, start, limit, steps)
    high = [
        after - before - first
        for after, before, first in zip(shape, part.type.shape, low, strict=True)
    ]
    if not any(low) and not any(high):
        return part
    zero = mlir.splat(0, [], value.type.element_type)
    return stablehlo.pad(part, zero, low, high, [0] * len(low))


def moved_pad(
    operation: Any, value: Any, whole: Sequence[int], shape: Sequence[int], moving: Sequence[int]
) -> Any:
    """A pad of a padded operand ``value``, of a padded shape; as :func:`moved_slice`."""
    low, interior = (
        [int(n) for n in ir.DenseI64ArrayAttr(operation.attributes[name])]
        for name in ("edge_padding_low", "interior_padding")
    )
    number = operation.operands[1]
    for d in moving:
        if value.type.shape[d] > whole[d]:
            fill = stablehlo.broadcast_in_dim(value.type, number, [])
            value = _filled(value, d, whole[d], fill)
    high = [
        after - first - size - max(0, size - 1) * holes
        for after, first, size, holes in zip(shape, low, value.type.shape, interior, strict=True)
    ]
    if not any((*low, *high, *interior)):
        return value
    return stablehlo.pad(value, number, low, high, interior)


def resize_attributes(
    operation: Any, kind: str, sizes: Sequence[int], larger: Sequence[int]
) -> None:
    """States padded sizes in an op's attributes where these state whole ones.

    ``sizes`` and ``larger`` are those of the dimensions of the first operand.
    """
    if kind not in _SIZES:
        return
    name = _SIZES[kind]
    stated = [int(n) for n in ir.DenseI64ArrayAttr(operation.attributes[name])]
    operation.attributes[name] = ir.DenseI64ArrayAttr.get([
        large if number == size else number
        for number, size, large in zip(stated, sizes, larger, strict=True)
    ])  # fmt: skip
