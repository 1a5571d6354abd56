"""Products of large float32 operands, whose kernels read parts of both again."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import toast
from toast.cost import CostModel
from toast.hardware import Mesh, load
from toast.space import Space

V5E = load("tpu-v5e")


def longer(tokens: int, width: int, dtype: str, other: str, sequences: int = 1) -> float:
    """The time of a product on v5e over that without the operands that it reads again."""

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("btd,bdf->btf", x, w, preferred_element_type="float32")

    shapes = (
        jax.ShapeDtypeStruct((sequences, tokens, width), dtype),
        jax.ShapeDtypeStruct((sequences, width, width), other),
    )
    space = Space(toast.analyze(product, *shapes, platform="tpu"), Mesh.parse("d=2"))
    without = dataclasses.replace(V5E.products, reloading=0.0)
    times = [
        float(CostModel(space, hardware).price(space.initial[None]).matmul_seconds[0])
        for hardware in (V5E, dataclasses.replace(V5E, products=without))
    ]
    return times[0] / times[1]


def test_large_float32_operands_are_read_again() -> None:
    assert 1.25 < longer(8192, 4096, "float32", "float32") < 1.4
    assert longer(8192, 1024, "float32", "float32") == 1, "the smaller one is in fast memory"


@pytest.mark.parametrize(("one", "other"), [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_narrow_operands_are_not(one: str, other: str) -> None:
    assert longer(8192, 4096, one, other) == 1


def test_a_batch_of_small_products_has_small_operands() -> None:
    assert longer(256, 1024, "float32", "float32", sequences=64) == 1
