"""Callbacks into Python in the programs of plans.

A callback in a module names its Python function by number.  The functions of a traced function are
kept with it (:class:`toast.frontend.jax.Calling`); JAX passes those of a module to its compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir as jax_mlir

from toast.errors import PlanError
from toast.program import Program, callback_ops


def callbacks_in(program: Program) -> tuple[Callable[..., Any], ...]:
    """The Python functions that a program calls, in the order of their numbers.

    Raises :class:`toast.errors.PlanError` if it calls functions of another process, or if its
    effects are ordered.
    """
    for value, name in zip(program.argument_values, program.arguments, strict=True):
        if program.values[value].type.dtype == "token":
            raise PlanError(
                f"{program.name}: argument {name} is a token: its effects are ordered, and JAX "
                "runs those on one device only; lower it with ordered=False"
            )
    known: tuple[Callable[..., Any], ...]
    known = getattr(getattr(program.source, "calling", None), "callbacks", ())
    if (ops := callback_ops(program)) and not known:
        raise PlanError(
            f"{program.name}: {program.describe(ops[0])} calls a Python function of the process "
            "that lowered it; plan the function itself, or remove debug prints and callbacks"
        )
    if known and not program.results:
        raise PlanError(
            f"{program.name}: plans run callbacks only in programs with results; return a value"
        )
    return known


def calling(results: Sequence[Any], callbacks: Sequence[Callable[..., Any]]) -> list[Any]:
    """The results of a module that calls Python functions, in a traced function.

    No op of the function may call Python otherwise: the numbers in the module start at 0.
    """
    if not callbacks or not results:
        return list(results)
    return list(_registering.bind(*results, callbacks=tuple(callbacks)))


def _register(context: Any, *results: Any, callbacks: Sequence[Callable[..., Any]]) -> Any:
    for function in callbacks:
        context.module_context.add_host_callback(function)
        context.module_context.add_keepalive(function)
    return results


_registering = Primitive("toast_callbacks")
_registering.multiple_results = True
_registering.def_abstract_eval(lambda *results, callbacks: list(results))
jax_mlir.register_lowering(_registering, _register, cacheable=False)
