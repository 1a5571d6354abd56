"""JAX functions to :class:`Program`, with argument names kept from the pytree paths."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from toast.errors import TargetError
from toast.frontend import mlir, stablehlo
from toast.program import Program

#: What becomes of functions on the way to an executable.
_STAGES = (jax.stages.Traced, jax.stages.Lowered, jax.stages.Compiled)


@dataclasses.dataclass(frozen=True)
class Calling:
    """What a plan needs to be called like the traced function."""

    #: Tree of ``(args, kwargs)`` and the abstract leaves, in the order of the arguments.
    in_tree: Any
    in_avals: tuple[Any, ...]
    out_tree: Any
    out_avals: tuple[Any, ...]


def from_function(
    function: Callable[..., Any],
    *arguments: Any,
    donate: int | Sequence[int] | None = (),
    name: str | None = None,
    **keywords: Any,
) -> Program:
    """Trace and lower ``function`` at example ``arguments``.

    Arguments are pytrees of arrays or ``jax.ShapeDtypeStruct``; no array is read.  ``donate``
    lists positions whose buffers results may reuse, as in ``jax.jit(donate_argnums=...)``; what a
    function that is jitted donates, and which keywords are static, it says itself.
    Raises :class:`toast.errors.TargetError` when JAX cannot trace the function.
    """
    name = name or str(getattr(function, "__name__", "function"))
    listed = donate is None or isinstance(donate, int | Iterable)
    places: set[Any] = {donate} if isinstance(donate, int) else {*((listed and donate) or ())}
    if not listed or not all(isinstance(place, int) for place in places):
        raise TargetError(f"{name}: donate={donate!r}: use positions of arguments")
    if not callable(function) or isinstance(function, _STAGES):
        raise TargetError(
            f"{name}: {type(function).__name__} is not a function; pass the function itself"
        )
    names: set[str] = set()
    with warnings.catch_warnings():
        # "Some donated buffers were not usable" is the user's business, not an error here.
        warnings.simplefilter("ignore", UserWarning)
        try:
            if isinstance(function, jax.stages.Wrapped):
                named = function.trace(*arguments, **keywords).args_info
                if len(named[0]) < len(arguments):
                    raise TargetError(f"{name}: pass static arguments by name, as in n=3")
                static = {key: keywords.pop(key) for key in [*keywords] if key not in named[1]}
                function = functools.partial(function, **static) if static else function
                places |= {i for i, info in enumerate(named[0]) if _donated(info)}
                names = {key for key, info in named[1].items() if _donated(info)}
            jitted = jax.jit(
                function, donate_argnums=sorted(places), donate_argnames=sorted(names),
                keep_unused=True,
            )  # fmt: skip
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
        in_tree=in_tree,
        in_avals=tuple(jax.ShapeDtypeStruct(jax.numpy.shape(x), _dtype(x)) for x in leaves),
        out_tree=out_tree,
        out_avals=tuple(jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outputs),
    )
    return stablehlo.from_module(lowered.compiler_ir(), name=name, calling=calling)


def _donated(info: Any) -> bool:
    """Whether an argument, of whatever tree, is donated."""
    leaves = jax.tree.leaves(info)
    return bool(leaves) and all(leaf.donated for leaf in leaves)


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jax.numpy.result_type(leaf)
