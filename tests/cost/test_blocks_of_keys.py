"""Attention in blocks of keys, whose loop carries the maximum and the sum of its softmax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import toast
from toast.cost import CostModel, break_down
from toast.hardware import Mesh, load
from toast.space import Space

Q = jax.ShapeDtypeStruct((4, 2048, 8, 128), jnp.bfloat16)
BLOCKS, BLOCK = 2, 1024


def in_blocks(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Exponentials of differences from the maximum up to each block."""

    def step(carry: Any, part: Any) -> tuple[Any, None]:
        most, total, out = carry
        scores = jnp.einsum("bthd,bshd->bhts", q, part[0], preferred_element_type=jnp.float32)
        new = jnp.maximum(most, scores.max(-1))
        odds, again = jnp.exp(scores - new[..., None]), jnp.exp(most - new)
        seen = jnp.einsum("bhts,bshd->bhtd", odds.astype(q.dtype), part[1])
        return (new, total * again + odds.sum(-1), out * again[..., None] + seen), None

    rows = jnp.zeros((*q.shape[::2], q.shape[1]), jnp.float32)
    start = (rows - 1e30, rows, jnp.zeros((*rows.shape, q.shape[-1]), jnp.float32))
    parts = tuple(a.reshape(len(a), BLOCKS, BLOCK, *a.shape[2:]).swapaxes(0, 1) for a in (k, v))
    (_, total, out), _ = jax.lax.scan(step, start, parts)
    return out / total[..., None]


def at_once(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Exponentials of differences from the maximum of all keys of a row."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
    odds = jax.nn.softmax(scores, -1).astype(q.dtype)
    return jnp.einsum("bhts,bshd->bhtd", odds, v)


def seconds_of_sums(function: Any) -> float:
    """Of the kernels that add up exponentials."""
    analysis = toast.analyze(function, Q, Q, Q, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("data=4"))
    broken = break_down(CostModel(space, load("tpu-v5e")), space.initial)
    return sum(
        float(broken.memory_seconds[number])
        for number in range(len(analysis.program.ops))
        if "reduce_sum" in analysis.program.location(number).path
        and analysis.program.kinds[number] == "reduce"
    )


def test_no_product_adds_up_exponentials_whose_maximum_a_loop_carries() -> None:
    """The product of a block knows the maximum of its own block alone."""
    scores = 4 * 8 * 2048 * BLOCKS * BLOCK * np.dtype(np.float32).itemsize
    bandwidth = load("tpu-v5e").memory_bytes_per_s
    assert seconds_of_sums(in_blocks) > 0.9 * scores / bandwidth
    assert seconds_of_sums(at_once) < 0.1 * scores / bandwidth
