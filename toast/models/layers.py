"""Layers that several models use."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, offset: float) -> jax.Array:
    """RMS norm over the last dimension, in float32; the scale is ``scale + offset : [d_model]``."""
    wide = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(variance + 1e-6)
    wide_scale = scale.astype(jnp.float32)
    return (normed * (offset + wide_scale if offset else wide_scale)).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Layer norm over the last dimension; ``scale, bias : [d_model]``."""
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
    return x * scale + bias


def attention(params: dict[str, jax.Array], x: jax.Array, *, causal: bool = False) -> jax.Array:
    """Multi-head attention of ``x : [batch, positions, width]``, softmax in float32.

    ``wq, wk, wv : [width, heads, key_size]``, ``wo : [heads, key_size, width]``.
    """
    query, key, value = (jnp.einsum("bsd,dhk->bshk", x, params[w]) for w in ("wq", "wk", "wv"))
    logits = jnp.einsum("bshk,bthk->bhst", query * query.shape[-1] ** -0.5, key)
    logits = logits.astype(jnp.float32)
    if causal:
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), dtype=bool))[None, None]
        logits = jnp.where(mask, logits, -1e30)
    weights = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
    attended = jnp.einsum("bhst,bthk->bshk", weights, value)
    return jnp.einsum("bshk,hkd->bsd", attended, params["wo"])


def rotary(
    x: jax.Array,
    theta: float,
    start: jax.Array | None = None,
    *,
    positions: jax.Array | None = None,
) -> jax.Array:
    """Rotary position embedding of ``x : [batch, sequence, ..., size]``.

    Without ``positions``, tokens are in order, and ``x`` has heads; ``start : []`` is the position
    of the first token, 0 by default.  ``positions`` are integers, ``[1, sequence]`` or
    ``[batch, sequence]``.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if positions is None:
        position = jnp.arange(x.shape[1], dtype=jnp.float32)
        if start is not None:
            position = start.astype(jnp.float32) + position
        angle = (position[:, None] * frequency)[None, :, None, :]
    else:
        between = (1,) * (x.ndim - 3)
        angle = positions.astype(jnp.float32).reshape(*positions.shape, *between, 1) * frequency
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy of ``logits : [..., vocabulary]`` and ``targets : [...]``."""
    # One-hot instead of take_along_axis, as in trainers with large vocabularies.
    hit = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    picked = jnp.sum(hit * logits, axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def vocabulary_loss(x: jax.Array, output: jax.Array, targets: jax.Array, parts: int) -> jax.Array:
    """Mean cross entropy of logits of which only a part is in memory at a time.

    The backward pass computes the logits again.  A part has every ``parts``-th position, so that
    each device has its share of every part if the sequence is sharded.

    :param x: ``[batch, sequence, width]``.
    :param output: ``[width, vocabulary]`` in any element type; products are in that of ``x``.
    :param targets: ``[batch, sequence]`` of int32.
    :param parts: the number of parts, a divisor of the sequence.
    """
    weights = output.astype(x.dtype)

    def mean(x: jax.Array, targets: jax.Array) -> jax.Array:
        return cross_entropy((x @ weights).astype(jnp.float32), targets)

    if parts == 1:
        return mean(x, targets)
    batch, sequence, width = x.shape
    # Without the checkpoint, the scan would keep the logits of all parts for the backward pass.
    body = jax.checkpoint(mean, prevent_cse=False)
    split = (batch, sequence // parts, parts)
    x = jnp.moveaxis(x.reshape(*split, width), 2, 0)
    targets = jnp.moveaxis(targets.reshape(split), 2, 0)
    zero = jnp.zeros((), jnp.float32)
    total, _ = jax.lax.scan(lambda sum_, part: (sum_ + body(*part), None), zero, (x, targets))
    return total / parts
