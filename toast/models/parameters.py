"""Pytrees of parameters: their shapes, their number, and random values to begin with."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp


def count(shapes: Any) -> int:
    """How many numbers a pytree of arrays or ``jax.ShapeDtypeStruct`` holds."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def stacked(shapes: Any, times: int) -> Any:
    """The same shapes with a first dimension of ``times``: what a scan runs over."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct((times, *s.shape), s.dtype), shapes)


def initial(shapes: Any, key: jax.Array, *, norm: float = 1.0) -> Any:
    """Random parameters: normal weights, norms of ``norm``, biases of zero.

    Norms are the leaves whose name ends with ``norm``, biases those that end with ``bias``.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    values = []
    for (path, shape), leaf_key in zip(leaves, jax.random.split(key, len(leaves)), strict=True):
        name = str(getattr(path[-1], "key", ""))
        if name.endswith(("norm", "bias")):
            value = jnp.full(shape.shape, norm if name.endswith("norm") else 0.0, shape.dtype)
        else:
            value = 0.02 * jax.random.normal(leaf_key, shape.shape, shape.dtype)
        values.append(value)
    return jax.tree.unflatten(tree, values)
