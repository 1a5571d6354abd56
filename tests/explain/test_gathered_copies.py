"""What the backward pass gathers again of an argument, and what the other choice would cost."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import toast


def gradients(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        y = x
        for one in weights:
            y = toast.checkpoint(lambda y, w: jnp.tanh(y @ w), name="layer")(y, one)
        return jnp.mean(y**2)

    return jax.grad(loss)(weights)


@functools.cache
def plan(remat: str | None) -> toast.Plan:
    """Three sharded weights, which are gathered for their products."""
    weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 3
    pins = {"x": P("data"), **{f"weights[{number}]": P("data") for number in range(3)}}
    return toast.plan(
        gradients, weights, jax.ShapeDtypeStruct((8192, 1024), jnp.float32), mesh="data=2",
        hardware="tpu-v5e", remat=remat, overlap="gathers",
        constraints=toast.Constraints(pin=pins), settings=toast.Settings(rounds=1),
    )  # fmt: skip


def test_weights_are_gathered_again() -> None:
    found = plan("layer: recompute=*").explain_argument("weights[1]").gathered
    assert found is not None
    assert (found.again, found.count, found.inputs, found.in_loop) == (True, 1, ("w",), False)
    assert found.bytes == 2 * 1024**2  # products round weights to bfloat16 before the gather
    assert found.text == (
        "the backward pass gathers it again (23.5 us before overlap); up to 2 MiB more would wait "
        "if its copies stayed: --why-not 'gathered=w'"
    )


def test_gathered_copies_stay() -> None:
    found = plan("layer: recompute=* gathered=w").explain_argument("weights[1]").gathered
    assert found is not None
    assert (found.again, found.count) == (False, 1)
    assert found.text == (
        "the backward pass uses the copies of the forward pass (2 MiB); to gather it again would "
        "take about 23.5 us before overlap: --why-not 'keep=w'"
    )


@pytest.mark.parametrize(("remat", "argument"), [(None, "weights[1]"), ("layer: recompute=*", "x")])
def test_what_is_not_gathered_has_no_such_line(remat: str | None, argument: str) -> None:
    assert plan(remat).explain_argument(argument).gathered is None
