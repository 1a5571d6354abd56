"""Pytrees of parameters: shapes, numbers of elements and random initial values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def count(shapes: Any) -> int:
    """The number of elements of a pytree of arrays or ``jax.ShapeDtypeStruct``."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def shapes_in(dtype: str) -> Callable[..., jax.ShapeDtypeStruct]:
    """A function from sizes to the ``jax.ShapeDtypeStruct`` of this element type."""

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

    return shape


def repeated(shapes: Any, times: int, scanned: bool) -> Any:
    """The shapes of ``times`` layers: stacked if ``scanned``, otherwise a list."""
    if scanned:
        return stacked(shapes, times)
    return [jax.tree.map(lambda shape: shape, shapes) for _ in range(times)]


def stacked(shapes: Any, times: int) -> Any:
    """The shapes with a new first dimension of ``times``, for a scan."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct((times, *s.shape), s.dtype), shapes)


def initial(shapes: Any, seed: int, *, norm: float = 1.0) -> Any:
    """Random parameters: normal weights, norms with the value ``norm``, biases of zero.

    The names of norms end with ``norm``, those of biases with ``bias``.
    """
    # numpy, because jax.random compiles a program for each shape.
    random = np.random.default_rng(seed)

    def value(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = str(getattr(path[-1], "key", ""))
        if name.endswith("norm"):
            return jnp.full(leaf.shape, norm, leaf.dtype)
        if name.endswith("bias"):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return jnp.asarray(random.normal(0.0, 0.02, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, shapes)
