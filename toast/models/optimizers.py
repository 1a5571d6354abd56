"""Optimisers as the papers' train steps use them: Adam, and GShard's Adafactor."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def adam_moments(params: Any) -> dict[str, Any]:
    """Shapes of Adam's two moments in float32, those of the parameters."""
    moment = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), params)
    return {"first": moment, "second": moment}


def adam(
    params: Any, moments: Any, count: jax.Array, gradients: Any, rate: float
) -> tuple[Any, Any, jax.Array]:
    """New parameters, moments and number of steps; ``count : []`` of int32."""
    count = count + 1
    time = count.astype(jnp.float32)
    first = jax.tree.map(
        lambda m, g: 0.9 * m + 0.1 * g.astype(jnp.float32), moments["first"], gradients
    )
    second = jax.tree.map(
        lambda v, g: 0.999 * v + 0.001 * jnp.square(g.astype(jnp.float32)),
        moments["second"],
        gradients,
    )

    def update(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        m_hat = m / (1.0 - 0.9**time)
        v_hat = v / (1.0 - 0.999**time)
        change = rate * m_hat / (jnp.sqrt(v_hat) + 1e-8)
        return (p.astype(jnp.float32) - change).astype(p.dtype)

    params = jax.tree.map(update, params, first, second)
    return params, {"first": first, "second": second}, count
