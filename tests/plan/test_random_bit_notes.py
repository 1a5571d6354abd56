"""Random bits that a backward pass computes again."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast


def dropped(key: Any, x: Any, w: Any) -> Any:
    y = x @ w
    kept = jax.random.bernoulli(key, 0.9, y.shape)
    return jnp.where(kept, jnp.sin(y), 0.0) @ w


def step(function: Any, w: Any, x: Any, key: Any) -> Any:
    return jax.grad(lambda w: (function(key, x, w) ** 2).sum())(w)


@pytest.mark.parametrize(
    ("function", "implementation", "batch", "said"),
    [
        (jax.checkpoint(dropped), "threefry2x32", 1 << 19, True),
        (jax.checkpoint(dropped), "threefry2x32", 1 << 12, False),  # there is room
        (jax.checkpoint(dropped), "rbg", 1 << 19, False),
        (dropped, "threefry2x32", 1 << 19, False),
    ],
)
def test_what_xla_may_write_of_them_is_said(
    function: Any, implementation: str, batch: int, said: bool
) -> None:
    key = jax.eval_shape(functools.partial(jax.random.key, 0, impl=implementation))
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 512), (batch, 512))]
    plan = toast.plan(
        functools.partial(step, function), *shapes, key, mesh="data=2", hardware="tpu-v5e",
        settings=toast.Settings(rounds=1),
    )  # fmt: skip
    assert plan.fits
    assert ("random bits are computed again" in plan.note) is said
