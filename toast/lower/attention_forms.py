"""The local forms of attention: a device computes it for its own sequences, queries and heads.

If the sequence is sharded, the keys and values of one device after the other come around (a ring):
each device passes on what it has received, and computes attention of its queries to it.  The
gradients of keys and values follow these, and in the end go home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir.dialects import stablehlo

from toast.lower import attention_parts as parts
from toast.lower.device_groups import tiles
from toast.lower.emitter import Emitter
from toast.lower.op_sharding import OpSharding

#: The dimension of queries and keys that is the sequence.
_SEQUENCE = 1


def _options(op: OpSharding) -> dict[str, int]:
    return {name: int(str(op.signature.attribute(name))) for name in ("causal", "window")}


class _Sequence:
    """The positions of a device's queries, and of the keys that come around to it."""

    def __init__(self, emitter: Emitter, op: OpSharding) -> None:
        self._emitter = emitter
        queries, keys = (op.signature.operands[n].shape[_SEQUENCE] for n in (0, 1))
        of_queries, self._axes = (op.operands[n][_SEQUENCE] for n in (0, 1))
        self._shards = emitter.shards(self._axes)
        self._keys = keys // self._shards
        own = queries // emitter.shards(of_queries)
        #: ``[devices]`` the position of the first query; the last query of all has the last key's.
        self._first = keys - queries + tiles(emitter.mesh, of_queries) * own
        #: How often keys and values are passed on.
        self.passes = next(
            (ring.passes(keys, self._shards) for ring in op.rule.rings if ring.factor in op.axes), 0
        )

    def positions(self, step: int) -> list[Any]:
        """The first query, and the first of the keys that are here after ``step`` passes."""
        tile = (tiles(self._emitter.mesh, self._axes) - step) % self._shards
        return [self._emitter.row(self._first), self._emitter.row(tile * self._keys)]

    def passed_on(self, values: Sequence[Any], tensors: Sequence[int], distance: int) -> list[Any]:
        """The values of the device that is ``distance`` before this one in the ring."""
        return [
            self._emitter.passed_on(value, self._axes, distance, tensor)
            for value, tensor in zip(values, tensors, strict=True)
        ]


def _first_rows(
    query: jax.Array, key: jax.Array, value: jax.Array, *at: Any, **options: int
) -> Any:
    return parts.with_keys(parts.without_keys(query, value), query, key, value, *at, **options)


def _next_rows(
    weighted: jax.Array, largest: jax.Array, total: jax.Array, *arguments: Any, **options: int
) -> Any:
    return parts.with_keys(parts.Rows(weighted, largest, total), *arguments, **options)


def _result(
    weighted: jax.Array, largest: jax.Array, total: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return parts.attended(parts.Rows(weighted, largest, total), value.dtype)


def _attention(emitter: Emitter, operation: Any, op: OpSharding) -> list[Any]:
    query, *here = operation.operands
    options = _options(op)
    with emitter.before(operation):
        sequence = _Sequence(emitter, op)
        rows = emitter.call(_first_rows, [query, *here, *sequence.positions(0)], **options)
        for step in range(1, sequence.passes + 1):
            here = sequence.passed_on(here, (1, 2), 1)
            at = sequence.positions(step)
            rows = emitter.call(_next_rows, [*rows, query, *here, *at], **options)
        return emitter.call(_result, [*rows, here[1]])


def _first_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    result: jax.Array,
    logsumexp: jax.Array,
    gradient: jax.Array,
    *at: Any,
    **options: int,
) -> tuple[jax.Array, ...]:
    """The gradients, and the products of results and gradients, which further steps need."""
    along = parts.along_results(result, gradient)
    none = jnp.zeros(query.shape, jnp.float32)
    return along, *parts.gradients(
        none, query, key, value, logsumexp, along, gradient, *at, **options
    )


def _next_gradients(of_query: jax.Array, *arguments: Any, **options: int) -> Any:
    return parts.gradients(of_query, *arguments, **options)


def _as(x: jax.Array, like: jax.Array) -> tuple[jax.Array]:
    return (x.astype(like.dtype),)


def _attention_backward(emitter: Emitter, operation: Any, op: OpSharding) -> list[Any]:
    query, key, value, result, logsumexp, gradient = operation.operands
    options = _options(op)
    with emitter.before(operation):
        sequence = _Sequence(emitter, op)
        along, of_query, *own = emitter.call(
            _first_gradients,
            [query, key, value, result, logsumexp, gradient, *sequence.positions(0)], **options,
        )  # fmt: skip
        here = [key, value]
        sums: list[Any] = []
        for step in range(1, sequence.passes + 1):
            here = sequence.passed_on(here, (1, 2), 1)
            of_query, *added = emitter.call(
                _next_gradients,
                [of_query, query, *here, logsumexp, along, gradient, *sequence.positions(step)],
                **options,
            )  # fmt: skip
            if sums:
                sums = sequence.passed_on(sums, (-2, -3), 1)
                added = [stablehlo.add(*pair) for pair in zip(sums, added, strict=True)]
            sums = added
        if sums:
            home = sequence.passed_on(sums, (-2, -3), -sequence.passes)
            own = [stablehlo.add(*pair) for pair in zip(own, home, strict=True)]
        return [*emitter.call(_as, [of_query, query]), *own]


def _paged_attention(emitter: Emitter, operation: Any, op: OpSharding) -> list[Any]:
    names = ("window", "value_size")
    options = {name: int(str(op.signature.attribute(name))) for name in names}
    with emitter.before(operation):
        return emitter.call(_paged, list(operation.operands), **options)


def _paged(*operands: jax.Array, **options: int) -> tuple[jax.Array]:
    return (parts.paged(*operands, **options),)


#: The local form of a composite, by its name: its results from operands of a device.
COMPOSITES: dict[str, Callable[[Emitter, Any, OpSharding], list[Any]]] = {
    "toast.attention": _attention,
    "toast.attention_backward": _attention_backward,
    "toast.paged_attention": _paged_attention,
}

__all__ = ["COMPOSITES"]
