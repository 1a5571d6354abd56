"""Shardings in JAX's words, in the structure of a function's arguments and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from toast.apply.device_meshes import Devices, on_devices
from toast.frontend.jax import Calling
from toast.frontend.jax_libraries import ArgumentVariable
from toast.program import Program, Shardings, Spec


def partition_spec(spec: Spec) -> jax.sharding.PartitionSpec:
    """A sharding as a ``PartitionSpec``."""
    parts = [axes[0] if len(axes) == 1 else axes or None for axes in spec]
    return jax.sharding.PartitionSpec(*parts)


def named_sharding(mesh: jax.sharding.Mesh, spec: Spec) -> jax.sharding.NamedSharding:
    """A sharding on a mesh with devices."""
    return jax.sharding.NamedSharding(mesh, partition_spec(spec))


def calling_of(program: Program) -> Calling | None:
    """How the function of a program is called; ``None`` for a program from a file."""
    return getattr(program.source, "calling", None)


def _specs(specs: Sequence[Spec], avals: Sequence[Any]) -> list[jax.sharding.PartitionSpec]:
    """PartitionSpecs for JAX's arrays; those of random keys omit the dimension of their words."""
    return [partition_spec(spec[: len(a.shape)]) for spec, a in zip(specs, avals, strict=True)]


def is_key(leaf: Any) -> bool:
    """Whether an array has random keys."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def in_shardings(program: Program, shardings: Shardings) -> Any:
    """PartitionSpecs of the arguments, in the structure of ``jax.jit(in_shardings=...)``.

    A tuple with one pytree per positional argument.  For a function planned with keyword arguments,
    a pair of that tuple and the dictionary of the keywords.  For a program from a file, a flat
    tuple.
    """
    specs = [shardings.of(program, v) for v in program.argument_values]
    calling = calling_of(program)
    if calling is None:
        return tuple(partition_spec(spec) for spec in specs)
    positional, keywords = jax.tree.unflatten(calling.in_tree, leaf_specs(calling, specs))
    return (positional, keywords) if keywords else positional


def leaf_specs(calling: Calling, specs: Sequence[Spec]) -> list[jax.sharding.PartitionSpec]:
    """PartitionSpecs of the leaves of a function's arguments; those the program lacks are whole."""
    count = len(calling.in_avals)
    of_leaves: list[Spec] = [()] * (count + len(calling.captured))
    for leaf, spec in zip(calling.arguments, specs, strict=True):
        of_leaves[leaf] = spec
    for leaf, first in calling.repeated.items():
        of_leaves[leaf] = of_leaves[first]
    return _specs(of_leaves[:count], calling.in_avals)


def out_shardings(program: Program, shardings: Shardings) -> Any:
    """PartitionSpecs in the structure of the results; a flat tuple for a program from a file."""
    calling = calling_of(program)
    if calling is None:
        return tuple(partition_spec(spec) for spec in shardings.results)
    specs = _specs(shardings.results, calling.out_avals)
    arguments = [shardings.of(program, value) for value in program.argument_values]
    of_variables = dict(enumerate(leaf_specs(calling, arguments)))
    of_variables |= calling.updated(specs)

    def other(leaf: Any) -> jax.sharding.PartitionSpec:
        is_variable = isinstance(leaf, ArgumentVariable)
        return of_variables[leaf.leaf] if is_variable else partition_spec(())

    return calling.returned(specs, other)


class JitShardings(NamedTuple):
    """Arguments of ``jax.jit``: pytrees of ``jax.sharding.NamedSharding``."""

    #: Those of the arguments.
    in_shardings: Any
    #: Those of the results.
    out_shardings: Any


def jit_shardings(
    program: Program, shardings: Shardings, *, devices: Devices | None = None
) -> JitShardings:
    """The shardings of arguments and results on real devices, for ``jax.jit``.

    They have the structures of :func:`in_shardings` and :func:`out_shardings`.  ``devices`` and
    errors are those of :func:`jax_mesh`.
    """
    mesh, shardings = on_devices(shardings, devices)
    return JitShardings(*jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(mesh, spec),
        (in_shardings(program, shardings), out_shardings(program, shardings)),
        is_leaf=lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec),
    ))  # fmt: skip
