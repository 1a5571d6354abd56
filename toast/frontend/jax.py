"""JAX functions to :class:`Program`, with argument names kept from the pytree paths."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from toast.errors import TargetError
from toast.frontend import mlir, stablehlo
from toast.frontend.program import Program


@dataclasses.dataclass(frozen=True)
class Calling:
    """What a plan needs to be called like the traced function."""

    function: Callable[..., Any]
    #: Tree of ``(args, kwargs)`` and the abstract leaves, in the order of the arguments.
    in_tree: Any
    in_avals: tuple[Any, ...]
    out_tree: Any
    out_avals: tuple[Any, ...]
    donate: tuple[int, ...]


def from_function(
    function: Callable[..., Any],
    *arguments: Any,
    donate: Sequence[int] = (),
    name: str | None = None,
    **keywords: Any,
) -> Program:
    """Trace and lower ``function`` at example ``arguments``.

    Arguments are pytrees of arrays or ``jax.ShapeDtypeStruct``; no array is read.  ``donate``
    lists positions whose buffers results may reuse, as in ``jax.jit(donate_argnums=...)``.
    Raises :class:`toast.errors.TargetError` when JAX cannot trace the function.
    """
    name = name or str(getattr(function, "__name__", "function"))
    donate = tuple(donate)
    with warnings.catch_warnings():
        # "Some donated buffers were not usable" is the user's business, not an error here.
        warnings.simplefilter("ignore", UserWarning)
        try:
            jitted = jax.jit(function, donate_argnums=donate, keep_unused=True)
            traced = jitted.trace(*arguments, **keywords)
            lowered = traced.lower(_private_parameters=mlir.keeping_names())
        except TargetError:
            raise
        except Exception as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else ""
            raise TargetError(
                f"{name}: JAX cannot trace it: {type(error).__name__}: {first}"
            ) from error
    leaves, in_tree = jax.tree.flatten((arguments, keywords))
    outputs, out_tree = jax.tree.flatten(traced.out_info)
    calling = Calling(
        function=function,
        in_tree=in_tree,
        in_avals=tuple(jax.ShapeDtypeStruct(jax.numpy.shape(x), _dtype(x)) for x in leaves),
        out_tree=out_tree,
        out_avals=tuple(jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outputs),
        donate=donate,
    )
    return stablehlo.from_module(lowered.compiler_ir(), name=name, calling=calling)


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jax.numpy.result_type(leaf)
