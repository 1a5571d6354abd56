"""Attention of some queries to some keys, and its gradients.

The models of the zoo compute attention from these functions (:mod:`toast.models.attention`).  So
does a device of a device-local program for its own queries, heads and sequences, from keys that go
around the devices if these split the sequence.  Queries are ``[batch, sequence, groups, queries,
key size]``, keys ``[batch, keys, groups, key size]``, values likewise.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

#: The most keys whose scores are in memory at a time.
MOST_KEYS = 512

#: The score of a key that a query does not see.
UNSEEN = -1e30

#: A position in the sequence: that of the first query, or of the first key.
Position: TypeAlias = int | jax.Array


class Rows(NamedTuple):
    """What is known of each query after some keys, in float32."""

    #: ``[batch, groups, queries, sequence, value size]`` the sum of values with their weights.
    weighted: jax.Array
    #: ``[batch, groups, queries, sequence]`` the largest score, to which the weights refer.
    largest: jax.Array
    #: ``[batch, groups, queries, sequence]`` the sum of the weights.
    total: jax.Array


def without_keys(query: jax.Array, value: jax.Array) -> Rows:
    """The rows before the first key."""
    batch, sequence, groups, queries, _ = query.shape
    rows = (batch, groups, queries, sequence)
    return Rows(
        jnp.zeros((*rows, value.shape[-1]), jnp.float32),
        jnp.full(rows, UNSEEN, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )


def with_keys(
    rows: Rows,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    first_query: Position,
    first_key: Position,
    *,
    causal: int,
    window: int,
) -> Rows:
    """The rows after further keys; each query sees some key, of these or of others."""

    def add(carried: Rows, part: Any) -> tuple[Rows, None]:
        weighted, largest, total = carried
        keys, values, positions = part
        scores = _scores(query, keys, first_query, positions, causal, window)
        higher = jnp.maximum(largest, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - higher[..., None])
        shrink = jnp.exp(largest - higher)
        weighted = weighted * shrink[..., None] + jnp.einsum(
            "bgrst,btgv->bgrsv", weights.astype(values.dtype), values,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return Rows(weighted, higher, total * shrink + jnp.sum(weights, axis=-1)), None

    rows, _ = jax.lax.scan(add, rows, _parts(key, value, first_key))
    return rows


def attended(rows: Rows, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Attention in an element type, and the logsumexp of the scores, after all keys."""
    weighted, largest, total = rows
    result = jnp.transpose(weighted / total[..., None], (0, 3, 1, 2, 4)).astype(dtype)
    return result, largest + jnp.log(total)


def along_results(result: jax.Array, gradient: jax.Array) -> jax.Array:
    """The product of each result and its gradient, ``[batch, groups, queries, sequence]``."""
    along = jnp.sum(gradient.astype(jnp.float32) * result.astype(jnp.float32), axis=-1)
    return jnp.transpose(along, (0, 2, 3, 1))


def gradients(
    of_query: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    logsumexp: jax.Array,
    along: jax.Array,
    gradient: jax.Array,
    first_query: Position,
    first_key: Position,
    *,
    causal: int,
    window: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of keys and values by these queries, and ``of_query`` with their part of it.

    :param of_query: the gradient of the queries by other keys, in float32.
    :param along: from :func:`along_results`.
    """
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def add(of_query: jax.Array, part: Any) -> tuple[jax.Array, Any]:
        keys, values, positions = part
        scores = _scores(query, keys, first_query, positions, causal, window)
        weights = jnp.exp(scores - logsumexp[..., None])
        of_values = product("bgrst,bsgrv->btgv", weights.astype(gradient.dtype), gradient)
        of_weights = product("bsgrv,btgv->bgrst", gradient, values)
        of_scores = (weights * (of_weights - along[..., None])).astype(query.dtype)
        of_query = of_query + product("bgrst,btgk->bsgrk", of_scores, keys)
        of_keys = product("bgrst,bsgrk->btgk", of_scores, query)
        return of_query, (of_keys.astype(key.dtype), of_values.astype(value.dtype))

    of_query, parts = jax.lax.scan(add, of_query, _parts(key, value, first_key))
    of_key, of_value = (
        jnp.moveaxis(part, 0, 1).reshape(whole.shape)
        for part, whole in zip(parts, (key, value), strict=True)
    )
    return of_query, of_key, of_value


def _parts(key: jax.Array, value: jax.Array, first_key: Position) -> tuple[jax.Array, ...]:
    """Keys, values and positions in parts of at most ``MOST_KEYS``, with a leading dimension."""
    keys = key.shape[1]
    size = max(n for n in range(1, min(keys, MOST_KEYS) + 1) if keys % n == 0)

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], keys // size, size, *x.shape[2:]), 1, 0)

    return split(key), split(value), _positions(keys, first_key).reshape(-1, size)


def _positions(count: int, first: Position) -> jax.Array:
    numbers = jnp.arange(count)
    return numbers if isinstance(first, int) and first == 0 else numbers + first


def _scores(
    query: jax.Array,
    keys: jax.Array,
    first_query: Position,
    positions: jax.Array,
    causal: int,
    window: int,
) -> jax.Array:
    """Scores of keys at some positions, ``[batch, groups, queries, sequence, keys]``."""
    scores = jnp.einsum("bsgrk,btgk->bgrst", query, keys, preferred_element_type=jnp.float32)
    if not causal:
        return scores
    own = jnp.arange(query.shape[1]) + first_query
    return jnp.where(seen(own[:, None], positions, window), scores, UNSEEN)


def seen(query: jax.Array, key: jax.Array, window: int) -> jax.Array:
    """Whether a causal query at a position sees the key at another."""
    return (key <= query) & (key > query - window) if window else key <= query


def paged(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    *,
    window: int,
    value_size: int,
) -> jax.Array:
    """Attention of one query of each sequence to its pages, ``[batch, groups, queries, value]``."""
    count = table.shape[1] * keys.shape[1]

    def read(pages: jax.Array) -> jax.Array:
        return pages[table].reshape(table.shape[0], count, *pages.shape[2:])

    scores = jnp.einsum("bgrk,btgk->bgrt", query, read(keys), preferred_element_type=jnp.float32)
    visible = seen(lengths[:, None] - 1, jnp.arange(count), window)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, UNSEEN), axis=-1)
    result = jnp.einsum(
        "bgrt,btgv->bgrv", weights.astype(values.dtype), read(values[..., :value_size]),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return result.astype(values.dtype)
