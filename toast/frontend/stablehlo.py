"""StableHLO to :class:`Program`: text, bytecode or a portable artifact."""

from __future__ import annotations

import pathlib
from typing import Any

from jaxlib.mlir import ir

from toast.errors import TargetError
from toast.frontend import mlir
from toast.frontend.program import Builder, Program


def from_file(path: str | pathlib.Path) -> Program:
    """Read a ``.mlir`` file (text, bytecode or portable artifact).

    Raises :class:`toast.errors.TargetError` when the file is missing or not StableHLO.
    """
    path = pathlib.Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TargetError(f"{path}: cannot read: {error.strerror}; check the path") from None
    return from_module(mlir.parse(data, str(path)), name=path.stem, origin=str(path))


def from_module(
    module: ir.Module, *, name: str, origin: str | None = None, calling: Any = None
) -> Program:
    """The program of a parsed module; ``module`` is inlined in place and kept as its source."""
    origin = origin or name
    with module.context:
        mlir.inline_calls(module, origin)
        function = mlir.main_function(module, origin)
        mlir.drop_dead_ops(function)
        return _read_function(module, function, name, origin, calling)


def _read_function(
    module: ir.Module, function: Any, name: str, origin: str, calling: Any
) -> Program:
    builder = Builder()
    read_type, read_attributes = mlir.TypeReader(), mlir.AttributeReader()
    block = function.operation.regions[0].blocks[0]
    numbers: dict[Any, int] = {}
    operations: list[Any] = []
    arguments = []
    for index, argument in enumerate(block.arguments):
        try:
            type_ = read_type(argument.type)
        except TargetError as error:
            raise TargetError(f"{origin}: argument {index}: {error}") from None
        (numbers[argument],) = builder.add("argument", (), (type_,))
        operations.append(None)
        place = argument.location
        arguments.append(place.name_str if isinstance(place, ir.NameLoc) else f"arg{index}")
    returned: list[int] = []
    for op in block.operations:
        operation = op.operation
        if operation.name == "func.return":
            returned = [numbers[value] for value in operation.operands]
            break
        try:
            types = [read_type(result.type) for result in operation.results]
        except TargetError as error:
            raise TargetError(f"{origin}: {mlir.location(operation)}: {error}") from None
        values = builder.add(
            mlir.kind(operation),
            [numbers[value] for value in operation.operands],
            types,
            read_attributes(operation),
        )
        numbers.update(zip(operation.results, values, strict=True))
        operations.append(operation)
    for value in returned:
        builder.add("return", (value,), ())
        operations.append(None)
    aliases = [-1] * len(returned)
    attributes = function.operation.attributes
    if "arg_attrs" in attributes:
        for index, entry in enumerate(attributes["arg_attrs"]):
            if "tf.aliasing_output" in entry:
                aliases[entry["tf.aliasing_output"].value] = index
    results = [f"result[{index}]" for index in range(len(returned))]
    if "res_attrs" in attributes:
        for index, entry in enumerate(attributes["res_attrs"]):
            if "jax.result_info" in entry:
                results[index] = entry["jax.result_info"].value or "result"
    return builder.build(
        name,
        arguments,
        results,
        aliases,
        source=mlir.Source(module, tuple(operations), calling),
    )
