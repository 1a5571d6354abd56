"""Random bits, as of dropout, take time on the vector unit of a TPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.helpers import term_seconds
from toast.cost.terms.kernels import RandomBits

KEY = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
#: Operations on integers for each random number.
THREEFRY = 121


def dropped(x: jax.Array, key: jax.Array) -> jax.Array:
    keep = jax.random.bernoulli(key, 0.9, x.shape)
    return jnp.where(keep, x / 0.9, 0.0).astype(x.dtype)


def half(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, "bfloat16")


@pytest.mark.parametrize(
    ("hardware", "elements_per_s"),
    [("tpu-v5e", 38e9), ("tpu-v6e", 46e9), ("tpu-v4", 30e9), ("tpu-v5p", 77e9), ("h100", None)],
)
def test_random_numbers_per_second_are_those_of_compiled_kernels(
    hardware: str, elements_per_s: float | None
) -> None:
    x = half(4096, 4096)
    found = term_seconds(hardware, dropped, x, KEY)
    without = term_seconds(hardware, lambda x: x / 0.9, x)
    assert not without.get(RandomBits.name)
    if elements_per_s is None:  # a GPU has more units for integers
        assert not found.get(RandomBits.name)
    else:
        total = found[RandomBits.name] + sum(without.values())
        assert total == pytest.approx(4096 * 4096 / elements_per_s, rel=0.1)


@pytest.mark.parametrize(("depth", "hidden"), [(512, False), (16384, True)])
def test_a_long_product_hides_them(depth: int, hidden: bool) -> None:
    def function(x: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
        return dropped(x, key) @ w

    found = term_seconds("tpu-v5e", function, half(4096, 512), half(512, depth), KEY)
    assert (found.get(RandomBits.name, 0.0) == 0.0) == hidden


def test_each_kernel_computes_them_again() -> None:
    """Two products that cannot share a kernel."""

    def function(x: jax.Array, a: jax.Array, b: jax.Array, key: jax.Array) -> jax.Array:
        y = dropped(x, key)
        return (y @ a) @ (b @ y)

    once = term_seconds("tpu-v5e", lambda x, a, key: dropped(x, key) @ a,
                        half(4096, 512), half(512, 128), KEY)  # fmt: skip
    twice = term_seconds("tpu-v5e", function, half(4096, 512), half(512, 128), half(128, 4096), KEY)
    assert twice[RandomBits.name] == pytest.approx(2 * once[RandomBits.name], rel=0.05)


def test_empty_arrays_take_no_time() -> None:
    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        mixed = (x << 3) ^ (x >> 5)
        return jnp.concatenate([mixed.astype(jnp.bfloat16), y]) * 2

    empty = jax.ShapeDtypeStruct((0, 64), "uint32")
    found = term_seconds("tpu-v5e", function, empty, half(64, 64))
    assert not found.get(RandomBits.name)


def test_a_mask_for_all_steps_of_a_loop_is_computed_once() -> None:
    def function(x: jax.Array, w: jax.Array, key: jax.Array) -> jax.Array:
        keep = jax.random.bernoulli(key, 0.9, x.shape)
        return jax.lax.scan(lambda y, w: (jnp.where(keep, y @ w, 0.0), None), x, w)[0]

    once, often = (
        term_seconds("tpu-v5e", function, half(4096, 128), half(steps, 128, 128), KEY)
        for steps in (2, 16)
    )
    assert often[RandomBits.name] == pytest.approx(once[RandomBits.name])
