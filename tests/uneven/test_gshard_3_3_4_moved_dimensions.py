"""Slices and pads of sizes that no axis divides (GShard, 3.3.4): padded, they move in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import toast
from tests.helpers import f32, random_states
from toast.apply import Runnable
from toast.cost import CostModel
from toast.hardware import Mesh, load
from toast.plan.shard import lowered_state
from toast.space import Space
from toast.uneven import padded_program


def next_token(x: jax.Array, w: jax.Array) -> Any:
    """The loss of a language model: the logits of all tokens but the last, and their labels."""
    labels = (jnp.abs(x[:, 0]) * 4).astype("int32")

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax((x @ w)[:-1])
        return -jnp.take_along_axis(logits, labels[1:, None], 1).mean()

    return jax.value_and_grad(loss, (0, 1))(x, w)


def differences(x: jax.Array, w: jax.Array) -> Any:
    return jnp.diff(x, axis=0) @ w, jnp.diff(x, n=2, axis=0).sum(0)


def inner(x: jax.Array, w: jax.Array) -> Any:
    """Parts of two dimensions, with the gradient."""

    def part(x: jax.Array) -> jax.Array:
        return (jnp.tanh(x)[3:-2, 1:14] ** 2).max(0).sum()

    return jax.value_and_grad(part)(x), jnp.pad(x[1:], ((2, 1), (0, 0)), constant_values=3) @ w


def strided(x: jax.Array, w: jax.Array) -> Any:
    """A step of two stays as it is; the part after it moves."""
    return (x[::2][1:] @ w).sum(0), jnp.cumsum(x[2:], 0)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "next_token": next_token, "differences": differences, "inner": inner, "strided": strided,
}  # fmt: skip


@pytest.mark.parametrize("rows", [16, 21])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gshard_3_3_4_parts_move_in_place(name: str, rows: int) -> None:
    """The whole is divided by the axes, or not."""
    function, mesh = PROGRAMS[name], Mesh.parse("a=4,b=2")
    generator = np.random.default_rng(rows)
    arrays = [generator.normal(size=shape).astype("f4") for shape in ((rows, 16), (16, 12))]
    shapes = [f32(*array.shape) for array in arrays]
    padded = padded_program(toast.analyze(function, *shapes, lowering="local"), mesh, 0.9)
    assert padded is not None
    model = CostModel(
        Space(toast.analyze(padded.program, lowering="local"), mesh), load("tpu-v5e")
    )  # fmt: skip
    space = model.space
    single = [space.apply(space.initial, action) for action in space.actions]
    expected = jax.tree.leaves(jax.jit(function)(*arrays))
    for state in (*single[:4], *random_states(space, 3, seed=rows)):
        lowered = lowered_state(model, state)
        assert lowered.counts() == model.local_collectives(state)
        results = Runnable(
            lowered.program, lowered.shardings, module_of=lambda *_, m=lowered.module: m
        ).run_flat([*map(jnp.asarray, arrays)])
        for result, value in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, value, rtol=1e-5, atol=1e-5)


def test_all_tokens_but_the_last_stay_sharded() -> None:
    """No array of tokens is gathered or exchanged: devices pass on one label."""
    tokens = PartitionSpec("sequence")
    options: dict[str, Any] = {
        "mesh": "sequence=8", "hardware": "tpu-v5e", "lowering": "local",
        "constraints": toast.Constraints(pin={"x": tokens, "result[1][0]": tokens}),
    }  # fmt: skip
    shapes = f32(32768, 1024), f32(1024, 4096)
    plan = toast.plan(next_token, *shapes, uneven=0.1, **options)
    assert [(each.elements, each.padded) for each in plan.padding] == [(32767, 32768)]
    of_weights = 4.0 * 1024 * 4096
    kinds = {c.kind for c in plan.lowered().collectives if c.bytes not in (4.0, of_weights)}
    assert kinds <= {"all_gather"}  # of labels
    assert max(c.bytes for c in plan.lowered().collectives) == of_weights
    whole = toast.plan(next_token, *shapes, uneven=0, **options)
    assert plan.after.step_seconds < 0.6 * whole.after.step_seconds
