"""Functions of ``flax.nnx.jit`` and ``equinox.filter_jit``, and modules that functions update.

The libraries are not imported: their objects only exist if the user has imported them.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import sys
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax

from toast.errors import TargetError


@dataclasses.dataclass
class Filtered:
    """A function of a library whose arguments and results have leaves that are no arrays."""

    #: The function with ``None`` for the static leaves of its arguments and results.
    function: Callable[..., Any]
    #: Its example arguments.
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    #: Positions of arguments that the library donates.
    donated: Set[int]
    #: The tree of ``(args, kwargs)`` with all leaves, and its static leaves by position.
    in_tree: Any
    static: Mapping[str | int, Any]
    #: The tree of the results with all leaves, and its static leaves.  A trace sets them.
    out_tree: Any = None
    out_static: Mapping[int, Any] = dataclasses.field(default_factory=dict)


def filtered(
    function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Filtered | None:
    """The function inside ``nnx.jit`` or ``equinox.filter_jit``; ``None`` for other functions."""
    module, name = type(function).__module__, type(function).__name__
    if module.startswith("equinox.") and name == "_JitWrapper":
        rest = range(1, len(arguments)) if function.donate_rest else ()
        donated = {*([0] if function.donate_first else []), *rest}
        return _filtered(function.__wrapped__, arguments, keywords, donated, set(), _is_array)
    if module.startswith("flax.nnx.") and name == "JitWrapped":
        donated, static = _nnx_options(function, arguments, keywords)
        return _filtered(function.fun, arguments, keywords, donated, static, _is_data)
    return None


def _nnx_options(
    function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[set[int], set[int | str]]:
    """The donated positions, and the static positions and names, of a ``nnx.jit`` function."""
    positional, named = function.trace(*arguments, **keywords).traced.args_info
    listed = function.static_argnums
    listed = (listed,) if isinstance(listed, int) else tuple(listed or ())
    static = {number % len(arguments) for number in listed if number < len(arguments)}
    dynamic = [number for number in range(len(arguments)) if number not in static]
    if len(positional) != len(dynamic):
        raise TargetError(f"{function.__name__}: pass static arguments by name, as in n=3")
    donated = set()
    for number, info in zip(dynamic, positional, strict=True):
        leaves = jax.tree.leaves(info)
        if leaves and all(leaf.donated for leaf in leaves):
            donated.add(number)
    return donated, {*static, *(key for key in keywords if key not in named)}


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_data(leaf: Any) -> bool:
    return _is_array(leaf) or isinstance(leaf, numbers.Number)


def _filtered(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    donated: Set[int],
    constant: Set[int | str],
    dynamic: Callable[[Any], bool],
) -> Filtered:
    """``constant`` are the positions and names of arguments of which all leaves are static."""
    leaves, in_tree = jax.tree.flatten((arguments, dict(keywords)))
    keys = [
        key
        for key, argument in [*enumerate(arguments), *sorted(keywords.items())]
        for _ in jax.tree.leaves(argument)
    ]
    static: dict[str | int, Any] = {
        number: leaf
        for number, (key, leaf) in enumerate(zip(keys, leaves, strict=True))
        if key in constant or not dynamic(leaf)
    }

    @functools.wraps(function)
    def pure(*positional: Any, **named: Any) -> Any:
        arrays = iter(jax.tree.leaves((positional, named)))
        whole = [static[n] if n in static else next(arrays) for n in range(len(leaves))]
        inside = jax.tree.unflatten(in_tree, whole)
        returned = updating_nothing(function)(*inside[0], **inside[1])
        outputs, result.out_tree = jax.tree.flatten(returned)
        result.out_static = {n: leaf for n, leaf in enumerate(outputs) if not _is_data(leaf)}
        return jax.tree.map(lambda leaf: leaf if _is_data(leaf) else None, returned)

    masked = [None if n in static else leaf for n, leaf in enumerate(leaves)]
    positional, named = jax.tree.unflatten(in_tree, masked)
    result = Filtered(pure, positional, named, donated, in_tree, static)
    return result


def updating_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which refuses to lose updates of the ``nnx`` modules in its arguments.

    JAX gives a function copies of its arguments, so modules that it updates in place and does not
    return would be lost.  Raises :class:`toast.errors.TargetError` in that case.
    """
    nnx = sys.modules.get("flax.nnx")
    kinds = tuple(getattr(nnx, kind) for kind in ("Pytree", "Object") if hasattr(nnx, kind))
    if not kinds:
        return function

    def leaves(arguments: Any) -> dict[str, Any]:
        """The leaves of modules by path."""
        modules = jax.tree_util.tree_leaves_with_path(
            arguments, is_leaf=lambda node: isinstance(node, kinds)
        )
        return {
            jax.tree_util.keystr((*path, *inner)): leaf
            for path, module in modules
            if isinstance(module, kinds)
            for inner, leaf in jax.tree_util.tree_leaves_with_path(module)
        }

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        before = leaves((arguments, keywords))
        returned = function(*arguments, **keywords)
        results = {id(leaf) for leaf in jax.tree.leaves(returned)}
        lost = [
            path
            for path, leaf in leaves((arguments, keywords)).items()
            if leaf is not before.get(path) and id(leaf) not in results
        ]
        if lost:
            name = getattr(function, "__name__", "function")
            raise TargetError(
                f"{name}: it updates {len(lost)} arrays of its modules in place, such as "
                f"{_shown(lost[0])}, and a plan only returns results; return the updated modules, "
                "as in return loss, model, optimizer"
            )
        return returned

    return checked


def _shown(path: str) -> str:
    """``argument 0.l.kernel.value`` for the path ``[0][0].l.kernel.value``."""
    part, _, rest = path.removeprefix("[0][").removeprefix("[1]['").partition("]")
    return f"argument {part.rstrip(chr(39))}{rest}"
