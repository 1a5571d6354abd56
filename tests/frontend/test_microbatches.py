"""``toast.accumulate``: microbatches give the results of the whole batch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from toast.api import program_of
from toast.errors import TargetError


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def random(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    drawn = np.random.default_rng(sum(shape)).normal(size=shape)
    return jnp.asarray(drawn, dtype)


def loss(w: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((jnp.tanh(batch["x"] @ w) - batch["y"]) ** 2)


BATCH = {"x": random(12, 4), "y": random(12, 3)}
W = random(4, 3)
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 12])
def test_results_are_those_of_the_whole_batch(microbatches: int) -> None:
    whole = jax.value_and_grad(loss)
    parts = toast.accumulate(whole, batch_argnums=-1, microbatches=microbatches)
    jax.tree.map(close, jax.jit(parts)(W, BATCH), whole(W, BATCH))


def test_one_microbatch_is_the_function_itself() -> None:
    whole = jax.value_and_grad(loss)
    parts = toast.accumulate(whole, batch_argnums=1)
    assert str(jax.make_jaxpr(parts)(W, BATCH)) == str(jax.make_jaxpr(whole)(W, BATCH))


def test_microbatches_have_every_nth_row() -> None:
    def rows(x: jax.Array) -> jax.Array:
        return jnp.max(x[:, 0]) * 1.0

    x = jnp.asarray([[0.0], [10.0], [2.0], [30.0]])
    assert toast.accumulate(rows, batch_argnums=0, microbatches=2)(x) == (2 + 30) / 2


def test_sums() -> None:
    def total(w: jax.Array, x: jax.Array) -> dict[str, jax.Array]:
        return {"sum": (x @ w).sum(), "mean": (x @ w).mean(), "rows": jnp.int32(x.shape[0])}

    x = random(8, 4)
    reduce = {"sum": "sum", "mean": "mean", "rows": "sum"}
    parts = toast.accumulate(total, batch_argnums=1, microbatches=4, reduce=reduce)
    jax.tree.map(close, parts(W, x), total(W, x))


def test_means_over_selected_tokens() -> None:
    def masked(w: jax.Array, x: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sum((x @ w) ** 2, -1) * mask) / jnp.sum(mask)

    x, mask = random(6, 4), jnp.asarray([1.0, 0, 1, 1, 1, 1])
    whole = jax.value_and_grad(masked)
    parts = toast.accumulate(
        whole, batch_argnums=(1, 2), microbatches=2, weight=lambda w, x, mask: mask.sum()
    )
    jax.tree.map(close, parts(W, x, mask), whole(W, x, mask))


def test_small_types_are_added_up_in_float32() -> None:
    def of_rows(x: jax.Array) -> jax.Array:
        return jnp.mean(x, 0)

    x = jnp.full((4096, 1), 1.0078125, jnp.bfloat16)  # 1 + 2**-7
    parts = toast.accumulate(of_rows, batch_argnums=0, microbatches=4096)
    assert parts(x).dtype == jnp.bfloat16
    assert float(parts(x)[0]) == 1.0078125


def test_auxiliary_results_and_keywords() -> None:
    def with_aux(w: jax.Array, x: jax.Array, *, scale: float) -> tuple[jax.Array, dict[str, Any]]:
        y = x @ w * scale
        return jnp.mean(y**2), {"norm": jnp.mean(jnp.abs(y))}

    whole = jax.value_and_grad(with_aux, has_aux=True)
    parts = toast.accumulate(whole, batch_argnums=1, microbatches=3)
    jax.tree.map(close, parts(W, BATCH["x"], scale=2.0), whole(W, BATCH["x"], scale=2.0))


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        (
            {"microbatches": 5}, (W, BATCH),
            "microbatches 5: does not divide the batch of 12 rows (argument 1['x']); use 1, 2, 3, "
            "4, 6, 12",
        ),
        (
            {"microbatches": 0}, (W, BATCH),
            "microbatches 0: use a whole number from 1",
        ),
        (
            {"microbatches": 2, "batch_argnums": 2}, (W, BATCH),
            "batch_argnums 2: the function got 2 arguments; use the position of one",
        ),
        (
            {"microbatches": 2}, (W, {"x": BATCH["x"], "y": BATCH["y"][:6]}),
            "batch_argnums: argument 1['y'] has 6 rows, and argument 1['x'] has 12; use arguments "
            "with one batch as their first dimension",
        ),
        (
            {"microbatches": 2}, (W, {"x": BATCH["x"], "y": jnp.float32(1)}),
            "batch_argnums: argument 1['y'] is a number and has no batch; leave it out, or give it "
            "a first dimension",
        ),
        (
            {"microbatches": 2, "reduce": "max"}, (W, BATCH),
            "reduce 'max': use 'mean' or 'sum', or a tree of these that fits the results",
        ),
    ],
)  # fmt: skip
def test_errors(options: dict[str, Any], arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TargetError) as error:
        toast.accumulate(loss, **{"batch_argnums": 1, **options})(*arguments)
    assert str(error.value) == message


def test_whole_numbers_have_no_mean() -> None:
    def count(x: jax.Array) -> dict[str, jax.Array]:
        return {"rows": jnp.int32(x.shape[0])}

    with pytest.raises(TargetError) as error:
        toast.accumulate(count, batch_argnums=0, microbatches=2)(BATCH["x"])
    assert str(error.value) == (
        "reduce: result['rows'] is int32, which has no mean; use 'sum' for it"
    )


def test_a_plan_chooses_their_number() -> None:
    step = toast.accumulate(jax.value_and_grad(loss), batch_argnums=1)
    shapes = f32(4, 3), {"x": f32(12, 4), "y": f32(12, 3)}
    plain, cut = program_of(step, *shapes), program_of(step, *shapes, microbatches=3)
    assert plain.memory is None
    assert cut.memory is not None
    assert cut.memory.microbatches == 3
    assert max(cut.repeats) == 3
    assert program_of(step, *shapes, microbatches=1).digest == plain.digest


def test_a_step_that_accumulates_nothing() -> None:
    def step(w: jax.Array) -> jax.Array:
        return w * 2

    with pytest.raises(TargetError) as error:
        program_of(step, f32(4), microbatches=2)
    assert str(error.value) == (
        "step: microbatches=2, but no gradients are accumulated in it; use "
        "toast.accumulate(jax.value_and_grad(loss), batch_argnums=...) in the step"
    )


def test_values_that_are_no_options_are_arguments() -> None:
    def step(x: jax.Array, *, microbatches: jax.Array, remat: jax.Array) -> jax.Array:
        return x * microbatches * remat

    program = program_of(step, f32(4), microbatches=f32(4), remat=f32(4))
    assert program.arguments == ("x", "microbatches", "remat")
