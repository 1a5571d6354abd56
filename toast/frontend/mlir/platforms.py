"""Modules that JAX lowered for several platforms: their first argument is the platform's number."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from toast.frontend.mlir.inline import inline_calls
from toast.frontend.mlir.manual_computation import REGION
from toast.frontend.mlir.modules import main_function, walk


def has_platform_argument(attributes: Any) -> bool:
    """Whether the first argument of a function with these attributes is the platform's number."""
    if "arg_attrs" not in attributes or not len(attributes["arg_attrs"]):
        return False
    first = attributes["arg_attrs"][0]
    name = "jax.global_constant"
    return name in first and "_platform_index" in str(first[name])


def choose_platform(module: ir.Module, number: int, origin: str) -> bool:
    """Makes a module for several platforms one for the platform ``number``, in place.

    Its calls are inlined.  ``origin`` names the module in errors; those of :func:`inline_calls` are
    raised.  Returns whether that was possible: manual regions take the number of the platform as an
    operand, and stay as they are.
    """
    inline_calls(module, origin)
    main = main_function(module, origin)
    attributes = main.operation.attributes
    if not has_platform_argument(attributes):  # nothing depends on the platform
        return True
    if any(op.name == REGION for op in walk(main.operation.regions[0].blocks[0])):
        return False
    block = main.operation.regions[0].blocks[0]
    with module.context, ir.Location.unknown(), ir.InsertionPoint.at_block_begin(block):
        index = ir.DenseElementsAttr.get(np.array(number, dtype=np.int32))
        block.arguments[0].replace_all_uses_with(stablehlo.ConstantOp(index).result)
        block.erase_argument(0)
        types = ir.FunctionType(ir.TypeAttr(attributes["function_type"]).value)
        attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get(types.inputs[1:], types.results)
        )
        attributes["arg_attrs"] = ir.ArrayAttr.get([*attributes["arg_attrs"]][1:])
        _take_branches(block)
    module.operation.verify()
    return True


def _take_branches(block: Any) -> None:
    """Replaces each ``case`` of a constant by the ops of its branch."""
    for op in list(block.operations):
        operation = op.operation
        number = _constant(operation.operands[0]) if operation.name == "stablehlo.case" else None
        for region in operation.regions:
            for inner in region.blocks:
                _take_branches(inner)
        if number is None:
            continue
        count = len(operation.regions)
        branch = operation.regions[number if 0 <= number < count else count - 1].blocks[0]
        *body, terminator = [inner.operation for inner in branch.operations]
        for inner in body:
            inner.move_before(operation)
        for old, new in zip(operation.results, terminator.operands, strict=True):
            old.replace_all_uses_with(new)
        operation.erase()


def _constant(value: Any) -> int | None:
    """The number that a value always is, if its op is a constant."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "stablehlo.constant":
        return None
    return int(np.array(ir.DenseIntElementsAttr(owner.attributes["value"]))[()])
