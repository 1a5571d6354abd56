"""Attention whose scores are never in memory, as one op of the program.

Kernels compute it on devices.  Here it is a composite (``stablehlo.composite``): an op with a name
and a decomposition, which XLA runs on any platform.  The decompositions keep the scores of a few
keys at a time (:mod:`toast.lower.attention_parts`).  TOAST does not look into them:
``rules/ops/attention.lp`` has the rules and prices of the composites by name.

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

from toast.lower.attention_parts import (
    along_results,
    attended,
    gradients,
    paged,
    with_keys,
    without_keys,
)


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
    result, logsumexp = (checkpoint_name(each, "attention") for each in results)
    return result, (query, key, value, result, logsumexp)


def _attention_backward(
    causal: bool, window: int, residuals: Any, gradient: jax.Array
) -> tuple[jax.Array, ...]:
    of_operands: tuple[jax.Array, ...] = backward(
        *residuals, gradient, causal=int(causal), window=window
    )
    return of_operands


_attention.defvjp(_attention_forward, _attention_backward)


@functools.partial(jax.lax.composite, name="toast.attention")
def forward(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: int, window: int
) -> tuple[jax.Array, jax.Array]:
    """Attention, and the logsumexp of the scores, ``[batch, groups, queries, sequence]``."""
    rows = with_keys(
        without_keys(query, value), query, key, value, key.shape[1] - query.shape[1], 0,
        causal=causal, window=window,
    )  # fmt: skip
    return attended(rows, value.dtype)


@functools.partial(jax.lax.composite, name="toast.attention_backward")
def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    result: jax.Array,
    logsumexp: jax.Array,
    gradient: jax.Array,
    *,
    causal: int,
    window: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query, key and value, from the results of ``forward`` and a gradient."""
    of_query, of_key, of_value = gradients(
        jnp.zeros(query.shape, jnp.float32), query, key, value, logsumexp,
        along_results(result, gradient), gradient, key.shape[1] - query.shape[1], 0,
        causal=causal, window=window,
    )  # fmt: skip
    return of_query.astype(query.dtype), of_key, of_value


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
    result: jax.Array = _paged(
        scaled, keys, values, table, lengths, window=window,
        value_size=value_size or values.shape[-1],
    )  # fmt: skip
    return result


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
    return paged(query, keys, values, table, lengths, window=window, value_size=value_size)


def pages_of(sequence: int, page: int) -> int:
    """The number of pages that a sequence takes."""
    return math.ceil(sequence / page)
