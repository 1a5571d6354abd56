"""Random bits that a backward pass computes again."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast
from toast.plan.prediction import fit_text


def dropped(key: Any, x: Any, w: Any) -> Any:
    y = x @ w
    kept = jax.random.bernoulli(key, 0.9, y.shape)
    return jnp.where(kept, jnp.sin(y), 0.0) @ w


def step(function: Any, w: Any, x: Any, key: Any) -> Any:
    return jax.grad(lambda w: (function(key, x, w) ** 2).sum())(w)


@pytest.mark.parametrize(
    ("function", "implementation", "batch", "words"),
    [
        (jax.checkpoint(dropped), "threefry2x32", 1 << 19, "may not fit"),
        (jax.checkpoint(dropped), "threefry2x32", 1 << 12, "fits"),  # there is room
        (jax.checkpoint(dropped), "rbg", 1 << 19, "fits"),
        (dropped, "threefry2x32", 1 << 19, "fits"),
    ],
)
def test_what_xla_may_write_of_them_halves_the_odds_and_is_said(
    function: Any, implementation: str, batch: int, words: str
) -> None:
    key = jax.eval_shape(functools.partial(jax.random.key, 0, impl=implementation))
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 512), (batch, 512))]
    plan = toast.plan(
        functools.partial(step, function), *shapes, key, mesh="data=2", hardware="tpu-v5e",
        settings=toast.Settings(rounds=1),
    )  # fmt: skip
    assert plan.fits
    assert fit_text(plan.fits, plan.after.fit_probability).startswith(f"{words} (")
    said = "may not" in words
    assert ("random bits are computed again" in plan.note) is said
    after, bars = plan.after, plan.error_bars
    both = (after.peak_bytes, after.peak_bytes + after.constant_bytes)
    assert after.fit_probability == pytest.approx(sum(
        bars.fit_probability(after.argument_bytes, peak, plan.memory_bytes) for peak in both
    ) / 2)  # fmt: skip
    assert after.peak_interval is not None
    assert (plan.after.peak_interval.high > plan.memory_bytes) is said
