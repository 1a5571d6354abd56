"""Modules that JAX lowered for several platforms: their first argument is the platform's number."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from toast.frontend.mlir.inline import inline_calls
from toast.frontend.mlir.modules import main_function


def has_platform_argument(attributes: Any) -> bool:
    """Whether the first argument of a function with these attributes is the platform's number."""
    if "arg_attrs" not in attributes or not len(attributes["arg_attrs"]):
        return False
    first = attributes["arg_attrs"][0]
    name = "jax.global_constant"
    return name in first and "_platform_index" in str(first[name])


def choose_platform(module: ir.Module, number: int, origin: str) -> None:
    """Makes a module for several platforms one for the platform ``number``, in place.

    Its calls are inlined.  Manual regions and composites, which take the number of the platform as
    an operand, are not supported.  ``origin`` names the module in errors; those of
    :func:`inline_calls` are raised.
    """
    inline_calls(module, origin)
    main = main_function(module, origin)
    attributes = main.operation.attributes
    if not has_platform_argument(attributes):  # nothing depends on the platform
        return
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


def differs(module: ir.Module, origin: str) -> bool:
    """Whether the forms of a module for its first two platforms have different ops.

    Its calls must be inlined.  ``origin`` names the module in errors.
    """
    main = main_function(module, origin)
    block = main.operation.regions[0].blocks[0]
    return _differs(block, {block.arguments[0]: (0, 1)})


def _differs(block: Any, numbers: dict[Any, tuple[int, int]]) -> bool:
    """``numbers`` are those that values have on the two platforms."""
    for op in block.operations:
        operation = op.operation
        pair = numbers.get(operation.operands[0]) if operation.name == "stablehlo.case" else None
        if pair is None:
            bodies = [inner for region in operation.regions for inner in region.blocks]
        else:
            last = len(operation.regions) - 1
            one, other = (operation.regions[min(number, last)].blocks[0] for number in pair)
            first, second = _returned_number(one), _returned_number(other)
            if first is not None and second is not None:
                numbers[operation.results[0]] = (first, second)
                continue
            if not _same(one, other, {}):
                return True
            bodies = [one]
        if any(_differs(body, numbers) for body in bodies):
            return True
    return False


def _returned_number(block: Any) -> int | None:
    """The number that a branch returns, if it computes nothing else."""
    *body, terminator = [op.operation for op in block.operations]
    if len(body) != 1 or len(terminator.operands) != 1 or body[0].name != "stablehlo.constant":
        return None
    type_ = ir.RankedTensorType(body[0].results[0].type)
    is_number = not type_.shape and str(type_.element_type).lstrip("ui").isdigit()
    return _constant(terminator.operands[0]) if is_number else None


def _same(one: Any, other: Any, values: dict[Any, Any]) -> bool:
    """Whether two blocks have the same ops; ``values`` of ``other`` by those of ``one``."""
    ops, others = ([op.operation for op in block.operations] for block in (one, other))
    if len(ops) != len(others) or len(one.arguments) != len(other.arguments):
        return False
    values.update(zip(one.arguments, other.arguments, strict=True))
    for a, b in zip(ops, others, strict=True):
        alike = (
            a.name == b.name
            and [values.get(value, value) for value in a.operands] == [*b.operands]
            and [result.type for result in a.results] == [result.type for result in b.results]
            and {*a.attributes} == {*b.attributes}
            and all(a.attributes[name] == b.attributes[name] for name in a.attributes)
            and len(a.regions) == len(b.regions)
        )
        if not alike:
            return False
        values.update(zip(a.results, b.results, strict=True))
        for region, counterpart in zip(a.regions, b.regions, strict=True):
            if len(region.blocks) != len(counterpart.blocks):
                return False
            if not all(
                _same(x, y, values) for x, y in zip(region.blocks, counterpart.blocks, strict=True)
            ):
                return False
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
