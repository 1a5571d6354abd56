"""Functions of ``flax.nnx.jit`` and ``equinox.filter_jit``, and modules that functions update.

The libraries are not imported: their objects only exist if the user has imported them.

``nnx.jit`` writes what a function changes in the ``nnx`` variables of its arguments back to the
caller's variables.  Here, the changed values are further results of the program, and
:func:`write_back` puts them into the variables of a call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import numbers
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any

import jax

from toast.errors import TargetError


@dataclasses.dataclass(frozen=True)
class ArgumentVariable:
    """A variable in the results that is a variable of an argument."""

    #: Its position among the variables and other leaves of the arguments (:func:`nodes_of`).
    node: int
    #: The position of its first array among the leaves of the arguments.
    leaf: int


@dataclasses.dataclass
class Filtered:
    """A function of a library whose arguments and results have leaves that are no arrays."""

    #: The function with ``None`` for the static leaves of its arguments and results.  If it updates
    #: variables, it returns a pair: its results, and a list of the new arrays.
    function: Callable[..., Any]
    #: Its example arguments.
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    #: Positions and names of arguments that the library donates.
    donated: Set[int | str]
    #: The tree of ``(args, kwargs)`` with all leaves, and its static leaves by position.
    in_tree: Any
    static: Mapping[str | int, Any]
    #: The position of the first leaf for each leaf of a variable that occurs again.
    repeated: Mapping[int, int]
    #: The tree of the results with all leaves, and its static leaves.  A trace sets them.
    out_tree: Any = None
    out_static: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    #: The leaves of the arguments that the function updates in place.  A trace sets them.
    updates: tuple[int, ...] = ()


def filtered(
    function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Filtered | None:
    """The function inside ``nnx.jit`` or ``equinox.filter_jit``; ``None`` for other functions."""
    name = type(function).__name__
    if is_filter_jit(function):
        rest = range(1, len(arguments)) if function.donate_rest else ()
        donated: set[int | str] = {*([0] if function.donate_first else []), *rest}
        return _filtered(function.__wrapped__, arguments, keywords, donated, set(), _is_array)
    if is_nnx_jit(function):
        info = function.trace(*arguments, **keywords).traced.args_info
        listed = getattr(function, "static_argnums", None)
        donated, static = _options(function, listed, arguments, keywords, info)
        return _filtered(function.fun, arguments, keywords, donated, static, _is_data)
    if _binds_module(function):
        bound = getattr(function, "func", function)
        raise TargetError(
            f"{getattr(bound, '__name__', name)}: some arguments of this nnx.jit function "
            "are bound (a method of a module, functools.partial, nnx.cached_partial), so a plan "
            "could not shard and update them; plan the function itself with all its arguments, "
            "as in toast.plan(Model.__call__, model, x)"
        )
    return None


def is_nnx_jit(function: Any) -> bool:
    """Whether a function is one of ``flax.nnx.jit``."""
    kind = type(function)
    names = ("JitWrapped", "SimpleJitWrapped")
    return kind.__module__.startswith("flax.nnx.") and kind.__name__ in names


def is_jitted(function: Any) -> bool:
    """Whether a function is one of ``flax.nnx.jit`` or ``equinox.filter_jit``."""
    return is_filter_jit(function) or is_nnx_jit(function)


def is_filter_jit(function: Any) -> bool:
    """Whether a function is one of ``equinox.filter_jit``."""
    kind = type(function)
    return kind.__module__.startswith("equinox.") and kind.__name__ == "_JitWrapper"


def leaf_type(function: Any, leaf: Any) -> Hashable:
    """What of a leaf of the arguments of ``function`` distinguishes its programs.

    It is the shape, the dtype and whether the type is weak, or the value of a static leaf.
    """
    if is_jitted(function):
        dynamic = _is_array if is_filter_jit(function) else _is_data
        if not dynamic(leaf):
            return leaf if isinstance(leaf, Hashable) else id(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, leaf.weak_type
    try:
        type_ = jax.typeof(leaf)
    except TypeError:
        return type(leaf).__name__  # JAX refuses it
    return type_.shape, type_.dtype, type_.weak_type


def is_weak(leaf: Any) -> bool:
    """Whether JAX gives an array or number a weak type."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return bool(leaf.weak_type)
    try:
        return bool(getattr(jax.typeof(leaf), "weak_type", False))
    except TypeError:
        return False


def _binds_module(function: Any) -> bool:
    """Whether calls reach a ``nnx.jit`` function with more arguments than they pass.

    To trace it would raise an error and leave the module that it binds without its attributes.
    """
    if isinstance(function, functools.partial):
        return is_nnx_jit(function.func)
    code = getattr(function, "__code__", None)
    cached = "cached_partial." in getattr(code, "co_qualname", "")
    return cached or is_nnx_jit(vars(type(function)).get("__call__"))


def _options(
    function: Any,
    listed: int | Sequence[int] | None,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    info: Any,
) -> tuple[set[int | str], set[int | str]]:
    """The donated and the static positions and names of a jitted function's arguments.

    ``listed`` are the positions that it says are static; ``info`` has its traced arguments
    (``args_info``): those that are not static.  Raises :class:`toast.errors.TargetError` if this
    version of JAX does not say which arguments are static.
    """
    listed = (listed,) if isinstance(listed, int) else tuple(listed or ())
    static = {number % len(arguments) for number in listed if number < len(arguments)}
    dynamic = [number for number in range(len(arguments)) if number not in static]
    positional, named = info
    if len(positional) != len(dynamic):
        raise TargetError(f"{function.__name__}: pass static arguments by name, as in n=3")
    donated = {
        key for key, leaves in [*zip(dynamic, positional, strict=True), *named.items()]
        if all_donated(leaves)
    }  # fmt: skip
    return donated, {*static, *(key for key in keywords if key not in named)}


def all_donated(info: Any) -> bool:
    """Whether all arrays of an argument are donated, and it has any."""
    leaves = jax.tree.leaves(info)
    return bool(leaves) and all(leaf.donated for leaf in leaves)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_data(leaf: Any) -> bool:
    return _is_array(leaf) or isinstance(leaf, numbers.Number)


def _is_variable(node: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Variable)


def nodes_of(tree: Any) -> tuple[list[Any], Any]:
    """The ``nnx`` variables of a tree and its other leaves, in order, and the tree without them."""
    nodes, outline = jax.tree.flatten(tree, is_leaf=_is_variable)
    return nodes, outline


def _places(nodes: Sequence[Any]) -> list[range]:
    """The positions of the arrays of each node among all leaves."""
    ends = [0, *itertools.accumulate(len(jax.tree.leaves(node)) for node in nodes)]
    return [range(*pair) for pair in itertools.pairwise(ends)]


def write_back(nodes: Sequence[Any], updates: Mapping[int, Any]) -> None:
    """Puts new arrays into the variables of a call.

    :param nodes: the variables and other leaves of the arguments (:func:`nodes_of`).
    :param updates: the new arrays, by their positions among the leaves of the arguments.
    """
    for node, places in zip(nodes, _places(nodes), strict=True):
        if _is_variable(node) and any(place in updates for place in places):
            leaves, tree = jax.tree.flatten(node)
            new = [updates.get(place, leaf) for place, leaf in zip(places, leaves, strict=True)]
            node.update_from_state(jax.tree.unflatten(tree, new))


def _filtered(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    donated: Set[int | str],
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
    nodes, outline = nodes_of((arguments, dict(keywords)))
    places = _places(nodes)
    #: The first node that is the same variable, by node.
    first = {id(node): number for number, node in reversed([*enumerate(nodes)])}
    same = [first[id(node)] if _is_variable(node) else n for n, node in enumerate(nodes)]
    repeated = {
        place: earlier
        for number, original in enumerate(same) if original != number
        for place, earlier in zip(places[number], places[original], strict=True)
    }  # fmt: skip
    static: dict[str | int, Any] = {
        number: leaf
        for number, (key, leaf) in enumerate(zip(keys, leaves, strict=True))
        if number not in repeated and (key in constant or not dynamic(leaf))
    }

    @functools.wraps(function)
    def pure(*positional: Any, **named: Any) -> Any:
        arrays = iter(jax.tree.leaves((positional, named)))
        whole: list[Any] = []
        for number in range(len(leaves)):
            if number in repeated:
                whole.append(whole[repeated[number]])
            else:
                whole.append(static[number] if number in static else next(arrays))
        own, _ = nodes_of(jax.tree.unflatten(in_tree, whole))
        inside = jax.tree.unflatten(outline, [own[number] for number in same])
        returned = function(*inside[0], **inside[1])
        changed = _changed(function, inside, outline, same, whole)
        kept = {place for place, key in enumerate(keys) if key in donated}
        updates = {
            place: value
            for number, node in enumerate(changed)
            if _is_variable(node) and same[number] == number
            for place, value in zip(places[number], jax.tree.leaves(node), strict=True)
            if (place in kept or value is not whole[place]) and place not in static
        }
        ours = {
            id(node): ArgumentVariable(same[number], places[same[number]].start)
            for number, node in enumerate(changed) if _is_variable(node)
        }  # fmt: skip
        outputs, result.out_tree = jax.tree.flatten(returned, is_leaf=lambda n: id(n) in ours)
        result.out_static = {
            number: ours.get(id(leaf), leaf)
            for number, leaf in enumerate(outputs)
            if id(leaf) in ours or not _is_data(leaf)
        }
        result.updates = tuple(updates)
        masked = jax.tree.unflatten(
            result.out_tree,
            [None if n in result.out_static else leaf for n, leaf in enumerate(outputs)],
        )
        return (masked, list(updates.values())) if updates else masked

    masked = [None if n in static or n in repeated else leaf for n, leaf in enumerate(leaves)]
    positional, named = jax.tree.unflatten(in_tree, masked)
    result = Filtered(pure, positional, named, donated, in_tree, static, repeated)
    return result


def _changed(
    function: Callable[..., Any], inside: Any, outline: Any, same: Sequence[int], whole: Any
) -> list[Any]:
    """The variables and other leaves of the arguments after a call.

    ``inside`` are the arguments, ``outline`` their tree, ``same`` the first node of each variable,
    ``whole`` the leaves before the call.  Raises :class:`toast.errors.TargetError` if the function
    changed anything but the values of variables.
    """
    nodes, after = nodes_of(inside)
    name = getattr(function, "__name__", "function")
    if after != outline or any(nodes[n] is not nodes[first] for n, first in enumerate(same)):
        raise TargetError(
            f"{name}: it adds, removes or replaces parts of its modules, and a plan only updates "
            "the values of their variables; make the parts before the step, or pop them inside it "
            "(nnx.pop)"
        )
    for node, place in zip(nodes, _places(nodes), strict=True):
        if not _is_variable(node) and len(place) == 1 and node is not whole[place.start]:
            path, _ = jax.tree_util.tree_leaves_with_path(inside)[place.start]
            raise TargetError(
                f"{name}: it replaces the array {_shown(jax.tree_util.keystr(path))} in place; "
                "make it an nnx.Variable, whose updates a plan writes back, or return it"
            )
    return nodes


def updating_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which refuses to lose updates of the ``nnx`` modules in its arguments.

    JAX gives a function copies of its arguments, so modules that it updates in place and does not
    return would be lost.  Raises :class:`toast.errors.TargetError` in that case.
    """
    nnx = sys.modules.get("flax.nnx")
    kinds = tuple(getattr(nnx, kind) for kind in ("Pytree", "Object") if hasattr(nnx, kind))
    if not kinds:
        return _hashable(function)

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
                f"{_shown(lost[0])}, which would be lost as in jax.jit; use nnx.jit, or return the "
                "updated modules, as in return loss, model, optimizer"
            )
        return returned

    return checked


def _hashable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, as one that ``jax.jit`` takes: a bound method of an equinox module has no hash.

    The arrays of its module are those that it closes over.
    """
    try:
        hash(function)
    except TypeError:
        name = getattr(function, "__name__", type(function).__name__)

        def call(*arguments: Any, **keywords: Any) -> Any:
            return function(*arguments, **keywords)

        call.__name__ = name
        with contextlib.suppress(TypeError, ValueError):  # for the names of its arguments
            call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return call
    return function


def with_static_positions(
    function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any], info: Any
) -> Filtered:
    """A ``jax.jit`` function with static arguments that are passed by position.

    ``info`` has its traced arguments (:func:`_options`).
    """
    listed = getattr(getattr(function, "_jit_info", None), "static_argnums", None)
    donated, static = _options(function, listed, arguments, keywords, info)
    return _filtered(function, arguments, keywords, donated, static, lambda _leaf: True)


def _shown(path: str) -> str:
    """``argument 0.l.kernel.value`` for the path ``[0][0].l.kernel.value``."""
    part, _, rest = path.removeprefix("[0][").removeprefix("[1]['").partition("]")
    return f"argument {part.rstrip(chr(39))}{rest}"
