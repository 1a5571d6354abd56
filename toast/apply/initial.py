"""Makes the arguments of a plan, such as parameters, on their devices: sharded from birth."""

from __future__ import annotations

from collections.abc import Callable
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


def _matching(
    program: Program,
    name: str,
    made: Any,
    avals: dict[int | str, Any],
    argument: int | str | None,
) -> list[int | str]:
    """The arguments that an initial value is: one, or one for each element of a tuple."""
    if argument is not None:
        if argument not in avals:
            raise PlanError(
                f"init {name}: {program.name} has no argument {argument!r}; use one of "
                f"{', '.join(map(repr, avals))}"
            )
        if not _alike(made, avals[argument]):
            raise PlanError(
                f"init {name}: {tree_difference(made, avals[argument])}; return argument "
                f"{argument!r} as {program.name} takes it"
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
        f"init {name}: its result is no argument of {program.name}: as the first one, "
        f"{tree_difference(made, avals.get(first_key))}; return one argument, or a tuple of "
        "successive ones, as the plan has them"
    )


def _alike(made: Any, planned: Any) -> bool:
    return not tree_difference(made, planned)


def tree_difference(made: Any, planned: Any) -> str:
    """The first difference between an initial value and an argument; empty if there is none."""
    own, other = (jax.tree_util.tree_leaves_with_path(tree) for tree in (made, planned))
    if jax.tree.structure(made) != jax.tree.structure(planned):
        paths = {jax.tree_util.keystr(path) for path, _ in own}
        others = {jax.tree_util.keystr(path) for path, _ in other}
        if missing := sorted(others - paths):
            return f"it lacks the leaf {missing[0] or 'itself'}"
        if more := sorted(paths - others):
            return f"it has a further leaf {more[0] or 'itself'}"
        return "it is another kind of pytree"
    for (path, leaf), (_, aval) in zip(own, other, strict=True):
        if is_array(leaf) and (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype):
            return (
                f"leaf {jax.tree_util.keystr(path) or 'itself'} is "
                f"{leaf.dtype.name}{list(leaf.shape)}, and the plan has "
                f"{aval.dtype.name}{list(aval.shape)}"
            )
    return ""


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, or the type of one."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
