"""Attention of sequences that a mesh axis splits: keys and values go around a ring of devices.

Attention is one op with a price (:mod:`toast.models.attention`).  If its queries are split, XLA
gathers all keys and values of a sequence on every device.  In a ring, a device has one part of them
at a time, and sends it on while it computes.  XLA does not turn the one into the other, so a
program that is to have a ring says so: this one in a region (``jax.shard_map``) that is manual over
the axis.  Other axes shard batch and heads as usual.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from toast.lower.attention_parts import UNSEEN
from toast.models.attention import backward, forward


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mesh: Mesh | AbstractMesh,
    axis: str,
    causal: bool = True,
) -> jax.Array:
    """Attention like :func:`toast.models.attention.attention`, without a window.

    The steps are unrolled: in each, a device computes attention to a part of the keys.  In causal
    attention, it leaves out the parts behind its own queries; it computes them nevertheless, as all
    devices run the same program.

    :param query: ``[batch, sequence, groups, queries, key size]``.
    :param key: ``[batch, sequence, groups, key size]``.
    :param value: ``[batch, sequence, groups, value size]``.
    :param mesh: a mesh with the axis; it may be abstract.
    :param axis: the mesh axis that splits the sequence; its size divides the sequence.
    :param causal: whether a query sees only the keys up to its own position.
    """
    scaled = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    return _attention(scaled, key, value, mesh, axis, causal)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mesh: Mesh | AbstractMesh,
    axis: str,
    causal: bool,
) -> jax.Array:
    return _residuals(query, key, value, mesh, axis, causal)[0]


def _residuals(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mesh: Mesh | AbstractMesh,
    axis: str,
    causal: bool,
) -> tuple[jax.Array, Any]:
    sequence = P(None, axis)
    around = jax.shard_map(
        functools.partial(_forward, axis=axis, causal=causal), mesh=mesh, axis_names={axis},
        in_specs=sequence, out_specs=(sequence, P(None, None, None, axis)), check_vma=False,
    )  # fmt: skip
    attended, logsumexp = (
        checkpoint_name(result, "attention") for result in around(query, key, value)
    )
    return attended, (query, key, value, attended, logsumexp)


def _gradients(
    mesh: Mesh | AbstractMesh, axis: str, causal: bool, residuals: Any, gradient: jax.Array
) -> tuple[jax.Array, ...]:
    sequence = P(None, axis)
    around = jax.shard_map(
        functools.partial(_backward, axis=axis, causal=causal), mesh=mesh, axis_names={axis},
        in_specs=(*[sequence] * 4, P(None, None, None, axis), sequence), out_specs=sequence,
        check_vma=False,
    )  # fmt: skip
    gradients: tuple[jax.Array, ...] = around(*residuals, gradient)
    return gradients


_attention.defvjp(_residuals, _gradients)


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, *, axis: str, causal: bool
) -> tuple[jax.Array, jax.Array]:
    """Attention of the queries of a device to all keys, and the logsumexp of its scores."""
    devices = jax.lax.axis_size(axis)
    part = key, value
    attended = logsumexp = None
    for step in range(devices):
        # The part of the next step is under way while this one is used.
        following = _sent_on(part, axis) if step + 1 < devices else part
        seen, rows = forward(query, *part, causal=int(causal and step == 0), window=0)
        seen = seen.astype(jnp.float32)
        if attended is None or logsumexp is None:
            attended, logsumexp = seen, rows
        else:
            if causal:
                rows = jnp.where(_before(step, axis), rows, UNSEEN)
            total = jnp.logaddexp(logsumexp, rows)
            attended = attended * _weights(logsumexp - total) + seen * _weights(rows - total)
            logsumexp = total
        part = following
    assert attended is not None
    assert logsumexp is not None
    return attended.astype(value.dtype), logsumexp


def _backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attended: jax.Array,
    logsumexp: jax.Array,
    gradient: jax.Array,
    *,
    axis: str,
    causal: bool,
) -> tuple[jax.Array, ...]:
    """The gradients of query, key and value.

    The gradients of keys and values go around with them, and home in the end.
    """
    devices = jax.lax.axis_size(axis)
    of_query = jnp.zeros(query.shape, jnp.float32)
    part, sums = (key, value), [jnp.zeros(x.shape, jnp.float32) for x in (key, value)]
    for step in range(devices):
        following = _sent_on(part, axis) if step + 1 < devices else part
        parts = backward(
            query, *part, attended, logsumexp, gradient, causal=int(causal and step == 0), window=0
        )
        if causal and step:
            parts = [jnp.where(_before(step, axis), x, 0) for x in parts]
        of_query = of_query + parts[0]
        sums = [total + x for total, x in zip(sums, parts[1:], strict=True)]
        if devices > 1:
            sums = _sent_on(sums, axis)
        part = following
    of_key, of_value = sums
    return (
        of_query.astype(query.dtype), of_key.astype(key.dtype), of_value.astype(value.dtype),
    )  # fmt: skip


def _sent_on(part: Any, axis: str) -> Any:
    """What the device before this one in the ring has."""
    devices = jax.lax.axis_size(axis)
    to_next = [(device, (device + 1) % devices) for device in range(devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, to_next), part)


def _before(step: int, axis: str) -> jax.Array:
    """Whether the keys that a device has in this step are those of positions before its own."""
    return jax.lax.axis_index(axis) >= step


def _weights(exponents: jax.Array) -> jax.Array:
    """Weights of queries, from ``[batch, groups, queries, sequence]``."""
    return jnp.transpose(jnp.exp(exponents), (0, 3, 1, 2))[..., None]
