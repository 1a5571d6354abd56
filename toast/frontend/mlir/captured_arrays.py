"""Large constants of a module as arguments of its main function.

They are arrays that a JAX function closes over.  As constants, every device holds them whole; as
arguments they have names, prices and shardings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from toast.frontend.mlir.ops import captured


def open_captured_arrays(function: Any) -> list[np.ndarray[Any, Any]]:
    """Makes the large constants of a function its last arguments, in place; returns their values.

    Equal constants become one argument.  Constants in manual regions, which cannot use arguments of
    the function, and those of element types that numpy lacks stay constants.
    """
    block = function.operation.regions[0].blocks[0]
    values: list[np.ndarray[Any, Any]] = []
    arguments: dict[Any, Any] = {}
    for constant in list(_large_constants(block)):
        content = constant.attributes["value"]
        if content not in arguments:
            try:
                value = np.array(content)
            except (TypeError, ValueError, BufferError):
                continue
            place = ir.Location.name(f"captured[{len(values)}]", constant.location)
            arguments[content] = block.add_argument(constant.results[0].type, place)
            values.append(value)
        constant.results[0].replace_all_uses_with(arguments[content])
        constant.erase()
    if values:
        _extend_type(function, block, len(values))
    return values


def _large_constants(block: Any) -> Iterator[Any]:
    for op in block.operations:
        operation = op.operation
        if captured(operation):
            yield operation
        elif operation.name != "sdy.manual_computation":
            for region in operation.regions:
                for inner in region.blocks:
                    yield from _large_constants(inner)


def _extend_type(function: Any, block: Any, count: int) -> None:
    """The type and the attributes of a function whose last ``count`` arguments are new."""
    attributes = function.operation.attributes
    results = ir.FunctionType(ir.TypeAttr(attributes["function_type"]).value).results
    inputs = [argument.type for argument in block.arguments]
    attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, results))
    if "arg_attrs" in attributes:
        more = [ir.DictAttr.get({})] * count
        attributes["arg_attrs"] = ir.ArrayAttr.get([*attributes["arg_attrs"], *more])
