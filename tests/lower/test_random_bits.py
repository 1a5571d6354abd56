"""Random numbers of device-local programs are those of one device, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import toast
from tests.helpers import f32, random_states
from toast.apply import Runnable
from toast.cost import CostModel
from toast.hardware import Mesh, load
from toast.plan.shard import lowered_state
from toast.space import Space

#: The words of a key, by implementation.
WORDS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}

X = f32(16, 8)


def bits(key: Any, x: Any) -> Any:
    """Bits of several types, next to values that are sharded."""
    return [jax.random.bits(key, (16, 8), dtype) for dtype in ("uint8", "uint16", "uint32")], x * 2


def dropout(key: Any, x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x @ x.T @ x, 0)


def layers(key: Any, x: Any) -> Any:
    """A key of its own for each step of a loop."""

    def layer(x: Any, key: Any) -> Any:
        noise = jax.random.uniform(key, x.shape)
        return x + noise, noise[0]

    return lax.scan(layer, x, jax.random.split(key, 3))


def choices(key: Any, x: Any) -> Any:
    first, second, third = jax.random.split(jax.random.fold_in(key, 7), 3)
    order = jax.random.permutation(first, 16)
    return (
        order,
        x[order],
        jax.random.randint(second, x.shape, 0, 99),
        jax.random.normal(third, (7, 8)),
    )


def mapped(key: Any, x: Any) -> Any:
    """A key for each row, which may be sharded."""
    return jax.vmap(lambda key, row: row + jax.random.uniform(key, row.shape))(
        jax.random.split(key, len(x)), x
    )


FUNCTIONS: tuple[Callable[..., Any], ...] = (bits, dropout, layers, choices, mapped)


def assert_same_numbers(function: Any, shapes: Any, arguments: Any, mesh: str) -> None:
    """Compares random states of a program with one device."""
    expected = jax.tree.leaves(jax.jit(function)(*arguments))
    model = CostModel(Space(toast.analyze(function, *shapes), Mesh.parse(mesh)), load("tpu-v5e"))
    for state in random_states(model.space, 3, seed=1):
        local = lowered_state(model, state)
        assert local.counts() == model.local_collectives(state)
        results = Runnable(
            local.program, local.shardings, module_of=lambda *_, m=local.module: m
        ).run_flat([*map(jnp.asarray, arguments)])
        for result, value in zip(results, expected, strict=True):
            if np.issubdtype(value.dtype, np.integer):
                np.testing.assert_array_equal(result, value)
            else:  # products may be summed in another order
                np.testing.assert_allclose(result, value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mesh", ["a=4", "a=2,b=4"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("implementation", WORDS)
def test_numbers_of_jax_random(implementation: str, function: Any, mesh: str) -> None:
    words = WORDS[implementation]

    def of_words(words: Any, x: Any) -> Any:
        return function(jax.random.wrap_key_data(words, impl=implementation), x)

    shapes = jax.ShapeDtypeStruct((words,), "uint32"), X
    x = np.random.default_rng(0).normal(size=X.shape).astype("f4")
    key = np.arange(3, 3 + words, dtype="uint32")
    assert_same_numbers(of_words, shapes, (key, x), mesh)


@pytest.mark.parametrize("algorithm", [
    lax.RandomAlgorithm.RNG_THREE_FRY, lax.RandomAlgorithm.RNG_PHILOX, lax.RandomAlgorithm.RNG_DEFAULT
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["uint8", "uint32", "uint64"])
def test_numbers_of_rng_bit_generator(algorithm: Any, dtype: str) -> None:
    """Also the state after them, from which later numbers follow."""

    def generate(state: Any, x: Any) -> Any:
        state, first = lax.rng_bit_generator(state, (16, 8), dtype, algorithm=algorithm)
        state, second = lax.rng_bit_generator(state, (8, 16), dtype, algorithm=algorithm)
        return state, first, second, x * 2 + (first % 2).astype("f4") * (second.T % 3).astype("f4")

    with jax.enable_x64(dtype == "uint64"):
        state = np.arange(1, 5, dtype="uint32")
        shapes = jax.ShapeDtypeStruct(state.shape, "uint32"), X
        assert_same_numbers(generate, shapes, (state, np.ones(X.shape, "f4")), "a=4,b=2")
