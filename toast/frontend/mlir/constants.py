"""Constants of equal elements."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from toast.frontend.mlir.modules import clone, walk


def splat(number: float, shape: Sequence[int], element: Any) -> Any:
    """A constant of equal elements of an MLIR element type, at the current insertion point."""
    if isinstance(element, ir.ComplexType):  # Python cannot hold attributes of complex elements
        parts = (splat(part, shape, element.element_type) for part in (number, 0))
        return stablehlo.complex(*parts)
    return stablehlo.ConstantOp(_splat_attribute(number, shape, element)).result


#: Marks a constant of which every element is set later: what it holds does not matter.
UNSET = "toast.unset"


def without_unset(module: ir.Module) -> ir.Module:
    """``module``, with buffers in place of the constants that are marked as :data:`UNSET`.

    XLA allocates such a buffer on TPUs without writing it.  The module is copied if it has any.
    """
    if not any(UNSET in op.attributes for op in walk(module.body)):
        return module
    module = clone(module)
    with module.context:
        for op in [op for op in walk(module.body) if UNSET in op.attributes]:
            (value,) = op.results
            with op.location, ir.InsertionPoint(op):
                buffer = stablehlo.CustomCallOp([value.type], [], "AllocateBuffer")
            value.replace_all_uses_with(buffer.results[0])
            op.erase()
    return module


def _splat_attribute(number: float, shape: Sequence[int], element: Any) -> Any:
    """The attribute of a constant of equal elements."""
    type_ = ir.RankedTensorType.get(list(shape), element)
    if isinstance(element, ir.IntegerType):
        # MLIR takes the bits of a large unsigned number as a negative one.
        value = int(number) - (2**64 if number >= 2**63 else 0)
        scalar: Any = ir.IntegerAttr.get(element, value)
    else:
        scalar = ir.FloatAttr.get(element, number)
    return ir.DenseElementsAttr.get_splat(type_, scalar)


def is_splat(operation: Any, number: float) -> bool:
    """Whether a constant has equal elements of this number; false for complex numbers."""
    type_ = operation.results[0].type
    if isinstance(type_.element_type, ir.ComplexType):
        return False
    splat_ = str(_splat_attribute(number, type_.shape, type_.element_type))
    return splat_.rsplit(" : ", 1)[0] == _splat_text(operation)


def _splat_text(operation: Any) -> str:
    """The elements of a constant, as ``dense<0>``, if all are equal, else nothing.

    They are text, because Python has no view of the elements of all types.
    """
    text = operation.get_asm(
        large_elements_limit=1, print_generic_op_form=True, use_local_scope=True
    )
    elements = re.search(r"value = (dense<[^\[\">]+>)", text)
    return elements[1] if elements else ""


def resize_splat(operation: Any, shape: Sequence[int]) -> bool:
    """Gives a constant of equal elements another shape.

    Returns whether it has: not if its elements differ, or are complex.
    """
    if isinstance(operation.results[0].type.element_type, ir.ComplexType):
        return False
    elements = _splat_text(operation)
    if elements:
        type_ = ir.RankedTensorType.get(list(shape), operation.results[0].type.element_type)
        operation.attributes["value"] = ir.Attribute.parse(f"{elements} : {type_}")
    return bool(elements)
