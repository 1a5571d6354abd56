"""Layers that several models use."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from toast.models.forms import product


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


def _stepwise_forward(
    logits: jax.Array, targets: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    log_probabilities = jax.lax.optimization_barrier(jax.nn.log_softmax(logits))
    hit = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    picked = jnp.sum(hit * log_probabilities, axis=-1)
    return -jnp.mean(picked), (log_probabilities, targets)


def _stepwise_backward(
    residuals: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None]:
    log_probabilities, targets = residuals
    hit = jax.nn.one_hot(targets, log_probabilities.shape[-1], dtype=log_probabilities.dtype)
    of_log = jax.lax.optimization_barrier(hit * (-gradient / targets.size))
    of_logits = of_log - jnp.exp(log_probabilities) * jnp.sum(of_log, axis=-1, keepdims=True)
    # The barrier keeps all three in memory until the last is computed.
    return jax.lax.optimization_barrier((of_logits, of_log, log_probabilities))[0], None


_stepwise_cross_entropy = jax.custom_vjp(lambda *args: _stepwise_forward(*args)[0])
_stepwise_cross_entropy.defvjp(_stepwise_forward, _stepwise_backward)


def materialised_loss(x: jax.Array, output: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy, computed step by step, as PyTorch does without a compiler.

    Every step has its result in memory: the logits in the element type of ``x``, the logits in
    float32, the logarithms of the probabilities, their gradient, and the gradient of the logits.
    The last three are in memory at once.  Arguments are those of :func:`vocabulary_loss`.
    """
    logits = jax.lax.optimization_barrier(product("bsd,dv->bsv", x, output))
    wide = jax.lax.optimization_barrier(logits.astype(jnp.float32))
    loss: jax.Array = _stepwise_cross_entropy(wide, targets)
    return loss


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
