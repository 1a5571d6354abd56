"""Train steps of layers whose recomputation a plan decides: in a scan, and one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import toast

Layer = Callable[[jax.Array, dict[str, jax.Array]], jax.Array]


def scanned_step(layer: Layer) -> Callable[[Any, Any], Any]:
    """Loss and gradients of layers in a scan, with stacked weights."""

    def scanned(weights: Any, x: Any) -> Any:
        block = toast.checkpoint(layer, prevent_cse=False)

        def loss(weights: Any) -> Any:
            return jnp.mean(jax.lax.scan(lambda x, w: (block(x, w), None), x, weights)[0] ** 2)

        return jax.value_and_grad(loss)(weights)

    return scanned


def unrolled_step(layer: Layer) -> Callable[[Any, Any], Any]:
    """The same for layers one after the other."""

    def unrolled(weights: Any, x: Any) -> Any:
        block = toast.checkpoint(layer)

        def loss(weights: Any) -> Any:
            y = x
            for number in range(len(weights["q"])):
                y = block(y, jax.tree.map(lambda w, n=number: w[n], weights))
            return jnp.mean(y**2)

        return jax.value_and_grad(loss)(weights)

    return unrolled


def arrays(layers: int, batch: int, sequence: int, width: int) -> tuple[Any, Any]:
    """Weights and inputs."""

    def shape(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    square = shape(layers, width, width)
    weights = {
        "q": square, "k": square, "v": square, "up": shape(layers, width, 4 * width),
        "down": shape(layers, 4 * width, width),
    }  # fmt: skip
    return weights, shape(batch, sequence, width)
