"""JAX functions as functions of a module: the body of a local form that is written in JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from toast.apply.module_functions import aval
from toast.frontend import mlir
from toast.program import TensorType


class JaxFunctions:
    """The functions of one module; calls with the same types share one."""

    def __init__(self, module: ir.Module) -> None:
        self._module = module
        self._read_type = mlir.TypeReader()
        #: By the function, its static arguments and the types of its operands: name and results.
        self._functions: dict[Any, tuple[str, list[Any]]] = {}

    def call(
        self, function: Callable[..., Any], operands: Sequence[Any], static: Mapping[str, Any]
    ) -> list[Any]:
        """The flat results of ``function`` of flat operands, at the current point of the module."""
        types = tuple(self._read_type(operand.type) for operand in operands)
        key = function, types, tuple(sorted(static.items()))
        if key not in self._functions:
            self._functions[key] = self._add(*key)
        name, results = self._functions[key]
        return list(func.CallOp(results, ir.FlatSymbolRefAttr.get(name), list(operands)).results)

    def _add(
        self, function: Callable[..., Any], types: tuple[TensorType, ...], static: Any
    ) -> tuple[str, list[Any]]:
        """Adds a function to the module; its name, and the types of its results."""
        name = f"local.{function.__name__.strip('_')}.{len(self._functions)}"
        lowered = ir.Module.parse(_text(function, types, static), self._module.context)
        mlir.inline_calls(lowered, name)
        main = mlir.main_function(lowered, name).operation
        main.attributes["sym_name"] = ir.StringAttr.get(name)
        main.attributes["sym_visibility"] = ir.StringAttr.get("private")
        for attribute in ("arg_attrs", "res_attrs"):
            if attribute in main.attributes:
                del main.attributes[attribute]
        results = [*ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).results]
        main.detach_from_parent()
        self._module.body.append(main)
        return name, results


@functools.lru_cache(maxsize=256)
def _text(function: Callable[..., Any], types: tuple[TensorType, ...], static: Any) -> str:
    """The StableHLO of a function of operands of these types."""
    with jax.enable_x64(any(type_.dtype in ("f64", "i64") for type_ in types)):
        lowered = jax.jit(functools.partial(function, **dict(static)), keep_unused=True).lower(
            *map(aval, types)
        )
        return str(lowered.as_text())
