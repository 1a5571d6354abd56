"""Attention whose scores are never in memory, as one op of the program.

Kernels compute it on devices.  Here it is a composite (``stablehlo.composite``): an op with a name
and a decomposition, which XLA runs on any platform.  The decompositions keep the scores of a few
keys at a time.  TOAST does not look into them: ``rules/ops/attention.lp`` has the rules and prices
of the composites by name.

Heads have two dimensions: ``groups`` with a key and a value head each, and the ``queries`` of a
group.  Every function computes products in the element type of its arguments, with float32 sums,
and softmax in float32.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

#: The most keys whose scores are in memory at a time.
_MOST_KEYS = 512

#: The score of a key that a query does not see.
UNSEEN = -1e30


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool = True, window: int = 0
) -> jax.Array:
    """Attention, ``[batch, sequence, groups, queries, value size]``.

    Its result, and what the backward pass needs of the softmax, have the name ``attention`` for
    policies of recomputation.

    :param query: ``[batch, sequence, groups, queries, key size]``.
    :param key: ``[batch, keys, groups, key size]``.
    :param value: ``[batch, keys, groups, value size]``.
    :param causal: whether a query sees only the keys up to its own position; the last query has the
        position of the last key.
    :param window: the number of keys that a causal query sees; 0 for all.
    """
    scaled = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    return _attention(scaled, key, value, causal, window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attention(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, window: int
) -> jax.Array:
    return forward(query, key, value, causal=int(causal), window=window)[0]


def _attention_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, window: int
) -> tuple[jax.Array, Any]:
    results = forward(query, key, value, causal=int(causal), window=window)
    attended, logsumexp = (checkpoint_name(result, "attention") for result in results)
    return attended, (query, key, value, attended, logsumexp)


def _attention_backward(
    causal: bool, window: int, residuals: Any, gradient: jax.Array
) -> tuple[jax.Array, ...]:
    gradients: tuple[jax.Array, ...] = backward(
        *residuals, gradient, causal=int(causal), window=window
    )
    return gradients


_attention.defvjp(_attention_forward, _attention_backward)


@functools.partial(jax.lax.composite, name="toast.attention")
def forward(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: int, window: int
) -> tuple[jax.Array, jax.Array]:
    """Attention, and the logsumexp of the scores, ``[batch, groups, queries, sequence]``."""
    batch, sequence, groups, queries, _ = query.shape
    rows = (batch, groups, queries, sequence)

    def add(carried: Any, part: Any) -> tuple[Any, None]:
        weighted, largest, total = carried
        keys, values, positions = part
        scores = _scores(query, keys, positions, key.shape[1], causal, window)
        higher = jnp.maximum(largest, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - higher[..., None])
        shrink = jnp.exp(largest - higher)
        weighted = weighted * shrink[..., None] + jnp.einsum(
            "bgrst,btgv->bgrsv", weights.astype(values.dtype), values,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return (weighted, higher, total * shrink + jnp.sum(weights, axis=-1)), None

    start = (
        jnp.zeros((*rows, value.shape[-1]), jnp.float32),
        jnp.full(rows, UNSEEN, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    (weighted, largest, total), _ = jax.lax.scan(add, start, _parts(key, value))
    attended = jnp.transpose(weighted / total[..., None], (0, 3, 1, 2, 4)).astype(value.dtype)
    return attended, largest + jnp.log(total)


@functools.partial(jax.lax.composite, name="toast.attention_backward")
def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attended: jax.Array,
    logsumexp: jax.Array,
    gradient: jax.Array,
    *,
    causal: int,
    window: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query, key and value, from the results of ``forward`` and a gradient."""
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    along = jnp.sum(gradient.astype(jnp.float32) * attended.astype(jnp.float32), axis=-1)
    along = jnp.transpose(along, (0, 2, 3, 1))

    def add(of_query: jax.Array, part: Any) -> tuple[jax.Array, Any]:
        keys, values, positions = part
        scores = _scores(query, keys, positions, key.shape[1], causal, window)
        weights = jnp.exp(scores - logsumexp[..., None])
        of_values = product("bgrst,bsgrv->btgv", weights.astype(gradient.dtype), gradient)
        of_weights = product("bsgrv,btgv->bgrst", gradient, values)
        of_scores = (weights * (of_weights - along[..., None])).astype(query.dtype)
        of_query = of_query + product("bgrst,btgk->bsgrk", of_scores, keys)
        of_keys = product("bgrst,bsgrk->btgk", of_scores, query)
        return of_query, (of_keys.astype(key.dtype), of_values.astype(value.dtype))

    zeros = jnp.zeros(query.shape, jnp.float32)
    of_query, parts = jax.lax.scan(add, zeros, _parts(key, value))
    of_key, of_value = (
        jnp.moveaxis(part, 0, 1).reshape(whole.shape)
        for part, whole in zip(parts, (key, value), strict=True)
    )
    return of_query.astype(query.dtype), of_key, of_value


def _parts(key: jax.Array, value: jax.Array) -> tuple[jax.Array, ...]:
    """Keys, values and positions in parts of at most ``_MOST_KEYS``, with a leading dimension."""
    keys = key.shape[1]
    size = max(n for n in range(1, min(keys, _MOST_KEYS) + 1) if keys % n == 0)

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], keys // size, size, *x.shape[2:]), 1, 0)

    return split(key), split(value), jnp.arange(keys).reshape(-1, size)


def _scores(
    query: jax.Array, keys: jax.Array, positions: jax.Array, count: int, causal: int, window: int
) -> jax.Array:
    """Scores of some of ``count`` keys, ``[batch, groups, queries, sequence, keys]``."""
    scores = jnp.einsum("bsgrk,btgk->bgrst", query, keys, preferred_element_type=jnp.float32)
    if not causal:
        return scores
    own = jnp.arange(query.shape[1]) + (count - query.shape[1])
    return jnp.where(_seen(own[:, None], positions, window), scores, UNSEEN)


def _seen(query: jax.Array, key: jax.Array, window: int) -> jax.Array:
    """Whether a causal query at a position sees the key at another."""
    return (key <= query) & (key > query - window) if window else key <= query


def paged_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    *,
    window: int = 0,
    value_size: int = 0,
) -> jax.Array:
    """Attention of one token of each sequence to its pages, ``[batch, groups, queries, value]``.

    :param query: ``[batch, groups, queries, key size]``.
    :param keys: ``[pages, page size, groups, key size]``, the pages of all sequences.
    :param values: ``[pages, page size, groups, stored size]``.
    :param table: ``[batch, pages of a sequence]`` of int32, the pages of each sequence in order.
    :param lengths: ``[batch]`` of int32, the keys that a query sees.
    :param window: the number of last keys that a query sees; 0 for all.
    :param value_size: the leading elements of the stored values that are the value; 0 for all.
    """
    scaled = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    attended: jax.Array = _paged(
        scaled, keys, values, table, lengths, window=window,
        value_size=value_size or values.shape[-1],
    )  # fmt: skip
    return attended


@functools.partial(jax.lax.composite, name="toast.paged_attention")
def _paged(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    *,
    window: int,
    value_size: int,
) -> jax.Array:
    count = table.shape[1] * keys.shape[1]

    def read(pages: jax.Array) -> jax.Array:
        return pages[table].reshape(table.shape[0], count, *pages.shape[2:])

    scores = jnp.einsum("bgrk,btgk->bgrt", query, read(keys), preferred_element_type=jnp.float32)
    seen = _seen(lengths[:, None] - 1, jnp.arange(count), window)
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, UNSEEN), axis=-1)
    attended = jnp.einsum(
        "bgrt,btgv->bgrv", weights.astype(values.dtype), read(values[..., :value_size]),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return attended.astype(values.dtype)


def pages_of(sequence: int, page: int) -> int:
    """The number of pages that a sequence takes."""
    return math.ceil(sequence / page)
