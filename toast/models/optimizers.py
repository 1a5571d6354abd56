"""The optimizers of train steps: Adam, AdamW with clipping, and Adafactor as in GShard."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from toast.frontend.microbatches import accumulate


def train_step(loss: Callable[..., Any], update: Callable[..., Any]) -> Callable[..., Any]:
    """``step(params, moments, count, *batch) -> (params, moments, count, loss)``.

    ``update(params, moments, count, gradients)`` minimizes ``loss(params, *batch)``.  The arguments
    of the batch have the names that they have in ``loss``, so that patterns of arguments match.
    """

    def step(
        params: Any, moments: Any, count: jax.Array, *batch: jax.Array
    ) -> tuple[Any, Any, jax.Array, jax.Array]:
        places = range(1, 1 + len(batch))
        gradient = accumulate(jax.value_and_grad(loss), batch_argnums=places)
        value, gradients = gradient(params, *batch)
        return *update(params, moments, count, gradients), value

    state = list(inspect.signature(step).parameters.values())[:3]
    batch = list(inspect.signature(loss).parameters.values())[1:]
    step.__signature__ = inspect.Signature([*state, *batch])  # type: ignore[attr-defined]
    return step


def adam_moments(params: Any) -> dict[str, Any]:
    """The shapes of Adam's two moments: those of the parameters, in float32."""
    moment = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), params)
    return {"first": moment, "second": moment}


def adam(
    params: Any, moments: Any, count: jax.Array, gradients: Any, rate: float
) -> tuple[Any, Any, jax.Array]:
    """New parameters, moments and step count; ``count : []`` of int32."""
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


def adamw(
    params: Any,
    moments: Any,
    count: jax.Array,
    gradients: Any,
    rate: float,
    *,
    decay: float = 0.1,
    clip: float = 1.0,
) -> tuple[Any, Any, jax.Array]:
    """As :func:`adam`, with decoupled weight decay and gradients clipped by their global norm.

    Gradients with a norm above ``clip`` over all parameters are scaled to this norm.
    """
    squares = (jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients))
    norm = jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))
    scale = jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-12))
    clipped = jax.tree.map(lambda g: g.astype(jnp.float32) * scale, gradients)
    updated, moments, count = adam(params, moments, count, clipped, rate)
    params = jax.tree.map(
        lambda new, old: (
            new.astype(jnp.float32) - rate * decay * old.astype(jnp.float32)
        ).astype(new.dtype),
        updated,
        params,
    )  # fmt: skip
    return params, moments, count


def momentum_shapes(params: Any) -> Any:
    """The shapes of :func:`momentum`'s moments: those of the parameters, in float32."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), params)


def momentum(
    params: Any, moments: Any, count: jax.Array, gradients: Any, rate: float
) -> tuple[Any, Any, jax.Array]:
    """New parameters, moments and step count of gradient descent with momentum and decay."""
    moments = jax.tree.map(
        lambda m, g, p: 0.9 * m + g.astype(jnp.float32) + 1e-4 * p.astype(jnp.float32),
        moments, gradients, params,
    )  # fmt: skip
    params = jax.tree.map(lambda p, m: (p - rate * m).astype(p.dtype), params, moments)
    return params, moments, count + 1


def adafactor_moments(params: dict[str, Any], scanned: Collection[str] = ()) -> dict[str, Any]:
    """The shapes of Adafactor's second moments in float32.

    A parameter with two or more dimensions has a ``row`` and a ``column`` for its last two
    dimensions, others have ``full``.  The first dimension of the entries of ``params`` in
    ``scanned`` is that of a scan and does not count.
    """

    def moments(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        if len(shape) - (name in scanned) < 2:
            return {"full": jax.ShapeDtypeStruct(shape, jnp.float32)}
        return {
            "row": jax.ShapeDtypeStruct(shape[:-1], jnp.float32),
            "column": jax.ShapeDtypeStruct((*shape[:-2], shape[-1]), jnp.float32),
        }

    return {
        name: jax.tree.map(lambda s, name=name: moments(name, s.shape), entry)
        for name, entry in params.items()
    }


def adafactor(
    params: dict[str, Any],
    moments: dict[str, Any],
    count: jax.Array,
    gradients: dict[str, Any],
    rate: float,
    scanned: Collection[str] = (),
) -> tuple[dict[str, Any], dict[str, Any], jax.Array]:
    """New parameters, moments and step count, as in GShard's appendix A.2.

    Second moments are factored, there is no first moment, updates are clipped to a root mean square
    of 1, and after 10,000 steps the rate decreases with the root of the step count.
    """
    count = count + 1
    time = count.astype(jnp.float32)
    decay = jnp.minimum(0.99, 1.0 - time**-0.8)
    step = rate * jax.lax.rsqrt(jnp.maximum(time, 10_000.0))

    def update(p: jax.Array, g: jax.Array, m: dict[str, jax.Array]) -> Any:
        square = jnp.square(g) + 1e-30

        def decayed(name: str, new: jax.Array) -> jax.Array:
            return decay * m[name] + (1.0 - decay) * new

        if "full" in m:
            m = {"full": decayed("full", square)}
            change = g * jax.lax.rsqrt(m["full"])
        else:
            row = decayed("row", jnp.mean(square, axis=-1))
            column = decayed("column", jnp.mean(square, axis=-2))
            m = {"row": row, "column": column}
            # Two separate roots: the product of two small squares would underflow.
            relative = row / jnp.mean(row, axis=-1, keepdims=True)
            change = g * jax.lax.rsqrt(relative)[..., None] * jax.lax.rsqrt(column)[..., None, :]
        change = change / jnp.maximum(1.0, jnp.sqrt(jnp.mean(jnp.square(change))))
        return p - step * change, m

    # Layers of a scan are updated and clipped one by one.
    updated = {
        name: jax.tree.map(
            jax.vmap(update) if name in scanned else update, entry, gradients[name], moments[name]
        )
        for name, entry in params.items()
    }
    params, moments = (
        jax.tree.map(lambda pair, i=i: pair[i], updated, is_leaf=lambda x: isinstance(x, tuple))
        for i in (0, 1)
    )
    return params, moments, count
