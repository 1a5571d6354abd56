"""A train step with FSDP and tensor parallelism, by hand, to export."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import toast
from toast.plan import Plan

#: The model dimension takes ``data`` in weights, and the batch in activations.
PINS = {
    "params['embedding']": "P('model', 'data')",
    "params['up']": "P('data', 'model')",
    "params['down']": "P('model', 'data')",
    "params['norm']": "P()",
    "tokens": "P('data')",
}
FIRST = {"tokens:0": "data", "params['up']:1": "model"}


def train_step(params: dict[str, Any], tokens: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: dict[str, Any]) -> jax.Array:
        x = params["embedding"][tokens] * params["norm"]
        x = x + jax.nn.relu(x @ params["up"]) @ params["down"]
        return jnp.mean(x**2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def types() -> tuple[Any, Any]:
    shapes = {"embedding": (64, 512), "up": (512, 1024), "down": (1024, 512), "norm": (512,)}
    return (
        {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()},
        jax.ShapeDtypeStruct((64, 16), jnp.int32),
    )


def values() -> tuple[Any, Any]:
    params, tokens = types()
    ones = {name: jnp.full(own.shape, 0.5, own.dtype) for name, own in params.items()}
    return ones, (np.arange(1024, dtype=np.int32) % 64).reshape(tokens.shape)


@functools.cache
def plan(mesh: str = "data=2,model=2") -> Plan:
    return toast.plan(
        train_step, *types(), donate=0, mesh=mesh, hardware="tpu-v5e",
        constraints=toast.Constraints(pin=PINS, fix=FIRST), settings=toast.Settings(rounds=1),
    )  # fmt: skip
