"""Makes the arguments of a plan, such as parameters, on their devices: sharded from birth."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from toast.apply.device_meshes import Devices, on_devices
from toast.apply.hosts import check_hosts
from toast.apply.partition_specs import jit_shardings
from toast.errors import PlanError
from toast.program import Program, Shardings


def initial(
    program: Program,
    shardings: Shardings,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    devices: Devices | None,
    argument: int | str | None,
) -> Any:
    """The result of ``function(*arguments)``, computed with the shardings of the plan's arguments.

    Leaves that are no arrays stay as they are.  Parameters and errors are those of
    :meth:`toast.Plan.init`.
    """
    calling = getattr(program.source, "calling", None)
    name = getattr(function, "__name__", "function")
    if calling is None:
        raise PlanError(
            f"init {name}: {program.name} is a program from a file, without pytrees; plan its "
            "function, or use shardings_for(mesh).in_shardings"
        )
    other: list[Any] = []
    trees: list[Any] = []

    def arrays(*values: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(function(*values))
        other[:] = [None if is_array(leaf) else leaf for leaf in leaves]
        trees[:] = [tree]
        return [leaf for leaf in leaves if is_array(leaf)]

    shapes = iter(jax.eval_shape(arrays, *arguments))
    types = [next(shapes) if leaf is None else leaf for leaf in other]
    mesh, on_mesh = on_devices(shardings, devices)
    check_hosts(program, mesh, on_mesh)
    shown = in_shardings_by_name(program, shardings, devices)
    avals = avals_by_name(calling)
    wanted = _matching(program, name, jax.tree.unflatten(trees[0], types), avals, argument)
    leaves = [leaf for key in wanted for leaf in jax.tree.leaves(shown[key])]
    chosen = [leaf for leaf, fixed in zip(leaves, other, strict=True) if fixed is None]
    made = iter(jax.jit(arrays, out_shardings=chosen)(*arguments))
    whole = [next(made) if leaf is None else leaf for leaf in other]
    return jax.tree.unflatten(trees[0], whole)


def in_shardings_by_name(
    program: Program, shardings: Shardings, devices: Devices | None
) -> dict[int | str, Any]:
    """The pytree of ``NamedSharding`` of each argument, by position or keyword."""
    own = jit_shardings(program, shardings, devices=devices).in_shardings
    _, keywords = jax.tree.unflatten(
        program.source.calling.in_tree, [0] * program.source.calling.in_tree.num_leaves
    )
    positional, named = own if keywords else (own, {})
    return {**dict(enumerate(positional)), **named}


def avals_by_name(calling: Any) -> dict[int | str, Any]:
    """The pytree of types of each argument, by position or keyword."""
    positional, keywords = jax.tree.unflatten(calling.in_tree, list(calling.in_avals))
    return {**dict(enumerate(positional)), **keywords}


def argument_names(program: Program, avals: Mapping[int | str, Any]) -> dict[int | str, str]:
    """The name of each argument in the paths of the program, by position or keyword."""
    calling = program.source.calling
    of_leaf = dict(zip(calling.arguments, program.arguments, strict=False))  # captured are last
    names: dict[int | str, str] = {}
    first = 0
    for key, tree in avals.items():
        count = len(jax.tree.leaves(tree))
        paths = [of_leaf[leaf] for leaf in range(first, first + count) if leaf in of_leaf]
        name = re.split(r"[.\[]", paths[0], maxsplit=1)[0] if paths else f"argument {key!r}"
        names[key], first = name, first + count
    return names


def argument_key(
    program: Program, what: str, avals: Mapping[int | str, Any], argument: int | str
) -> int | str:
    """The key of an argument, which is a position or a name.

    Raises :class:`toast.errors.PlanError`, which begins with ``what``, if there is none.
    """
    names = argument_names(program, avals)
    if argument in avals:
        return argument
    keys = [key for key, name in names.items() if name == argument]
    if len(keys) != 1:
        raise PlanError(
            f"{what}: {program.name} has no argument {argument!r}; use one of "
            f"{', '.join(dict.fromkeys(names.values()))}, or a position"
        )
    return keys[0]


def _matching(
    program: Program,
    name: str,
    made: Any,
    avals: dict[int | str, Any],
    argument: int | str | None,
) -> list[int | str]:
    """The arguments that an initial value is: one, or one for each element of a tuple."""
    names = argument_names(program, avals)
    if argument is not None:
        argument = argument_key(program, f"init {name}", avals, argument)
        if not _alike(made, avals[argument]):
            raise PlanError(
                f"init {name}: {tree_difference(made, avals[argument])}; return argument "
                f"{names[argument]} as {program.name} takes it"
            )
        return [argument]
    if single := [key for key, tree in avals.items() if _alike(made, tree)]:
        return single[:1]
    if isinstance(made, tuple | list) and made:
        for first in range(len(avals) - len(made) + 1):
            keys = [*avals][first : first + len(made)]
            if all(_alike(own, avals[key]) for own, key in zip(made, keys, strict=True)):
                return keys
    first_key = next(iter(avals), 0)
    raise PlanError(
        f"init {name}: its result is no argument of {program.name}: compared with "
        f"{names.get(first_key, 'none')}, {tree_difference(made, avals.get(first_key))}; return "
        "one argument, or a tuple of successive ones, as the plan has them"
    )


def _alike(made: Any, planned: Any) -> bool:
    return not tree_difference(made, planned)


def tree_difference(made: Any, planned: Any) -> str:
    """The first difference between an initial value and an argument; empty if there is none."""
    own, other = (jax.tree_util.tree_leaves_with_path(tree) for tree in (made, planned))
    if jax.tree.structure(made) != jax.tree.structure(planned):
        paths = {jax.tree_util.keystr(path) for path, _ in own}
        others = {jax.tree_util.keystr(path) for path, _ in other}
        if "" in paths | others:
            return f"it is {'one array, not a tree' if '' in paths else 'a tree, not one array'}"
        if missing := sorted(others - paths):
            return f"it lacks the leaf {missing[0]}"
        if more := sorted(paths - others):
            return f"it has a further leaf {more[0]}"
        return "it is another kind of pytree"
    for (path, leaf), (_, aval) in zip(own, other, strict=True):
        if is_array(leaf) and (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype):
            place = jax.tree_util.keystr(path)
            return (
                f"{f'leaf {place}' if place else 'it'} is "
                f"{leaf.dtype.name}{list(leaf.shape)}, and the plan has "
                f"{aval.dtype.name}{list(aval.shape)}"
            )
    return ""


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, or the type of one."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
