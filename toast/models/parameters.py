"""Pytrees of parameters: their shapes, their number, and random values to begin with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def count(shapes: Any) -> int:
    """How many numbers a pytree of arrays or ``jax.ShapeDtypeStruct`` holds."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def shapes_in(dtype: str) -> Callable[..., jax.ShapeDtypeStruct]:
    """A function of sizes: the shape of an array of this element type."""

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

    return shape


def repeated(shapes: Any, times: int, scanned: bool) -> Any:
    """The shapes of so many layers: stacked for a scan, or a list of them."""
    if scanned:
        return stacked(shapes, times)
    return [jax.tree.map(lambda shape: shape, shapes) for _ in range(times)]


def stacked(shapes: Any, times: int) -> Any:
    """The same shapes with a first dimension of ``times``: what a scan runs over."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct((times, *s.shape), s.dtype), shapes)


def initial(shapes: Any, seed: int, *, norm: float = 1.0) -> Any:
    """Random parameters: normal weights, norms of ``norm``, biases of zero.

    Norms are the leaves whose name ends with ``norm``, biases those that end with ``bias``.
    """
    # Not jax.random, which compiles a program for each shape.
    random = np.random.default_rng(seed)

    def drawn(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = str(getattr(path[-1], "key", ""))
        if name.endswith("norm"):
            return jnp.full(leaf.shape, norm, leaf.dtype)
        if name.endswith("bias"):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return jnp.asarray(random.normal(0.0, 0.02, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(drawn, shapes)
