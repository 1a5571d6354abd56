"""Blocks of models of other libraries, which nobody marked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from toast.api import program_of
from toast.errors import TargetError


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def blocks(step: Callable[..., Any], *arguments: Any) -> list[tuple[str, int, str]]:
    program = program_of(step, *arguments, remat="full")
    assert program.memory is not None
    return [(block.name, block.runs, block.origin) for block in program.memory.blocks]


def test_layers_of_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(8, 8, 32, 4, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(eqx.combine(params, static))(x) ** 2)

    assert blocks(eqx.filter_grad(loss), params, f32(16, 8)) == [("call", 3, "repeated")]


def test_layers_of_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Layers(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = nnx.relu(layer(x)) + x
            return x

    @nnx.jit  # type: ignore[misc]
    def step(model: Any, x: jax.Array) -> Any:
        return nnx.grad(lambda model: model(x).sum())(model)

    assert blocks(step, Layers(), f32(4, 8)) == [("call", 4, "repeated")]


@pytest.mark.parametrize("own", [False, True])
def test_scans_of_linen(own: bool) -> None:
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):  # type: ignore[misc, name-defined]
        @nn.compact  # type: ignore[misc]
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + nn.Dense(8)(nn.gelu(nn.Dense(32)(x))), None

    class Layers(nn.Module):  # type: ignore[misc, name-defined]
        @nn.compact  # type: ignore[misc]
        def __call__(self, x: jax.Array) -> jax.Array:
            body = nn.remat(Block) if own else Block
            scan = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
            x, _ = scan()(x, None)
            return x

    model = Layers()
    variables = jax.eval_shape(model.init, jax.random.key(0), f32(4, 8))

    def loss(variables: Any, x: jax.Array) -> jax.Array:
        return model.apply(variables, x).sum()

    if own:
        with pytest.raises(TargetError, match=r"has a jax.checkpoint of its own"):
            blocks(jax.grad(loss), variables, f32(4, 8))
    else:
        assert blocks(jax.grad(loss), variables, f32(4, 8)) == [("body_fn", 4, "scan")]
