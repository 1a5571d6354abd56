"""Puts a state, such as a checkpoint, on the devices of a plan, and says where it does not fit."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from toast.apply.device_meshes import Devices
from toast.apply.initial import (
    argument_key,
    argument_names,
    avals_by_name,
    in_shardings_by_name,
    is_array,
    tree_difference,
)
from toast.errors import PlanError
from toast.hardware import Mesh
from toast.program import Program, Shardings


def argument_types(program: Program, shardings: Shardings, devices: Devices | None) -> Any:
    """The types of the arguments with their shardings; see :meth:`toast.Plan.types_for`."""
    calling = _calling(program, "types_for")
    check_mesh(program, shardings, devices)
    by_name = in_shardings_by_name(program, shardings, devices)
    own = [leaf for key in avals_by_name(calling) for leaf in jax.tree.leaves(by_name[key])]
    leaves = [
        # Leaves that are no arrays, such as the functions of a module, stay as they are.
        calling.static[number] if number in calling.static
        else jax.ShapeDtypeStruct(planned.shape, planned.dtype, sharding=sharding)
        for number, (planned, sharding) in enumerate(zip(calling.in_avals, own, strict=True))
    ]  # fmt: skip
    positional, keywords = jax.tree.unflatten(calling.in_tree, leaves)
    return (positional, keywords) if keywords else positional


def placed_state(
    program: Program,
    shardings: Shardings,
    state: Any,
    *,
    devices: Devices | None,
    argument: int | str | None,
) -> Any:
    """``state`` with the shardings of the arguments that it is; see :meth:`toast.Plan.place`."""
    calling = _calling(program, "place")
    check_mesh(program, shardings, devices)
    avals = avals_by_name(calling)
    trees = _arguments_of(program, state, avals, argument)
    roots = argument_names(program, avals)
    for key, tree in trees.items():
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        for (path, leaf), planned in zip(leaves, jax.tree.leaves(avals[key]), strict=True):
            if text := _misfit(f"{roots[key]}{jax.tree_util.keystr(path)}", leaf, planned):
                raise PlanError(
                    f"{text}; restore the state of the planned model, or plan again for this one"
                )
    by_name = in_shardings_by_name(program, shardings, devices)

    def put(leaf: Any, sharding: Any) -> Any:
        return jax.device_put(leaf, sharding) if is_array(leaf) else leaf

    placed = [jax.tree.map(put, tree, by_name[key]) for key, tree in trees.items()]
    if next(iter(trees.values())) is state:
        return placed[0]
    return placed if isinstance(state, list) else tuple(placed)


def check_mesh(program: Program, shardings: Shardings, devices: Devices | None) -> None:
    """Checks that the axes of a mesh, which has those of the plan, divide its arguments.

    Raises :class:`toast.errors.PlanError`, which names the argument, the dimension and the sizes.
    Other meshes are left to :func:`toast.apply.on_devices`.
    """
    if not isinstance(devices, jax.sharding.Mesh):
        return
    sizes = dict(devices.shape)
    for path, value in zip(program.arguments, program.argument_values, strict=True):
        shape = program.values[value].type.shape
        for dimension, axes in enumerate(shardings.of(program, value)):
            count = math.prod(sizes.get(axis, 1) for axis in axes)
            if shape[dimension] % count:
                raise PlanError(
                    f"{path}: dimension {dimension} has {shape[dimension]} elements, which "
                    f"{count} devices ({' x '.join(axes)}) of mesh {Mesh.of(devices)} do not "
                    f"divide; the plan is for mesh {shardings.mesh}; plan again for this mesh, "
                    "as with toast.apply_plan(..., mesh=mesh)"
                )


def _calling(program: Program, what: str) -> Any:
    calling = getattr(program.source, "calling", None)
    if calling is None:
        raise PlanError(
            f"{what}: {program.name} is a program from a file, without pytrees; plan its "
            "function, or use shardings_for(mesh).in_shardings"
        )
    return calling


def _arguments_of(
    program: Program, state: Any, avals: dict[int | str, Any], argument: int | str | None
) -> dict[int | str, Any]:
    """The parts of a state by argument, as the structures of their trees are: one, or several."""
    if argument is not None:
        argument = argument_key(program, "place", avals, argument)
    keys = [*avals] if argument is None else [argument]
    runs: list[dict[int | str, Any]] = [{key: state} for key in keys]
    if argument is None and isinstance(state, tuple | list) and state:
        starts = range(len(keys) - len(state) + 1)
        runs += [dict(zip(keys[first:], state, strict=False)) for first in starts]
    runs = [run for run in runs if all(_alike(tree, avals[key]) for key, tree in run.items())]
    if not runs:
        name = argument_names(program, avals)[keys[0]]
        raise PlanError(
            f"place: the state is no argument of {program.name}: compared with {name}, "
            f"{tree_difference(state, avals[keys[0]])}; pass one argument, or a tuple of "
            "successive ones"
        )
    exact = (
        run for run in runs
        if not any(tree_difference(tree, avals[key]) for key, tree in run.items())
    )  # fmt: skip
    return next(exact, runs[0])


def _alike(state: Any, planned: Any) -> bool:
    return bool(jax.tree.structure(state) == jax.tree.structure(planned))


def _misfit(path: str, leaf: Any, planned: Any) -> str:
    """How a leaf differs from the planned one, in words; empty if it does not."""
    if not is_array(planned):
        return ""
    shape = np.shape(leaf)
    if len(shape) != len(planned.shape):
        return (
            f"{path}: it has {len(shape)} dimensions in the state, and {len(planned.shape)} in "
            "the plan"
        )
    for dimension, (own, size) in enumerate(zip(shape, planned.shape, strict=True)):
        if own != size:
            return (
                f"{path}: dimension {dimension} has {own} elements in the state, and {size} in "
                "the plan"
            )
    dtype = getattr(leaf, "dtype", planned.dtype)
    if dtype != planned.dtype:
        return f"{path}: it is {dtype} in the state, and {planned.dtype} in the plan"
    return ""
