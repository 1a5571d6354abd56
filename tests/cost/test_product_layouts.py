"""What products of libraries cost on GPUs: operands that are laid out again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.helpers import f32
from toast.cost import CostModel
from toast.cost.product_layouts import ProductLayouts, fits
from toast.hardware import Mesh, load
from toast.space import Space


@pytest.mark.parametrize(
    ("order", "groups", "taken"),
    [
        ([0, 1, 2], ([0], [1], [2]), True),
        ([0, 2, 1], ([0], [1], [2]), True),  # the matrices are transposed
        ([1, 0, 2], ([0], [1], [2]), True),  # a batch between rows and columns
        ([1, 2, 0], ([0], [1], [2]), False),  # a batch comes last
        ([0, 1, 2, 3], ([0, 2], [1], [3]), False),  # a batch in two parts
        ([0, 1, 2, 3], ([], [0, 1], [2, 3]), True),
        ([0, 1], ([0, 1], [], []), True),
    ],
)
def test_what_a_library_takes(order: list[int], groups: Any, taken: bool) -> None:
    assert fits(order, groups) == taken


def layouts(function: Callable[..., Any], *shapes: Any) -> tuple[list[int], list[str]]:
    """How often operands of products are accessed besides, and the kinds that are copied."""
    analysis = toast.analyze(function, *shapes)
    names, program = analysis.names, analysis.program
    found = ProductLayouts.of(program, names.use_op, names.use_index)
    copied = [
        program.kind(v.op) for v, is_ in zip(program.values, found.copied, strict=True) if is_
    ]
    return [again for again in found.again.tolist() if again], copied


QUERY, CACHE = f32(8, 2, 4, 64), f32(8, 128, 4, 64)


def scores(query: jax.Array, cache: jax.Array) -> jax.Array:
    return jnp.einsum("bqhd,bkhd->bhqk", query, cache)


def test_heads_between_keys_and_sizes_are_transposed() -> None:
    assert layouts(scores, QUERY, CACHE) == ([2, 2], [])
    # One query per head: XLA computes sums, in any layout.
    assert layouts(scores, f32(8, 1, 4, 64), CACHE) == ([], [])
    # What a kernel computes before, it writes as it is needed.
    assert layouts(lambda q, c: scores(q * 2, c * 2), QUERY, CACHE) == ([], [])
    # Heads before keys are taken as they are.
    assert layouts(lambda q, c: jnp.einsum("bhqd,bhkd->bhqk", q, c), f32(8, 4, 2, 64),
                   f32(8, 4, 128, 64)) == ([], [])  # fmt: skip


def test_reshapes_keep_layouts_unless_they_join_what_is_apart() -> None:
    def product(shape: tuple[int, ...], contracted: Any) -> Callable[..., Any]:
        def function(x: jax.Array, y: jax.Array) -> jax.Array:
            return jax.lax.dot_general(x.transpose(1, 0, 2).reshape(shape), y, contracted)

        return function

    x, y = f32(4, 8, 16), f32(4, 16, 8)
    assert layouts(product((8, 4, 16), (((2,), (1,)), ((1,), (0,)))), x, y) == ([], [])
    assert layouts(product((8, 1, 4, 16), (((3,), (1,)), ((2,), (0,)))), x, y) == ([], [])
    # Dimensions of 4 and 16 are apart: that of 8 lies between them.
    assert layouts(product((8, 64), (((1,), (0,)), ((), ()))), x, f32(64, 8)) == ([2], [])


def test_a_cache_is_updated_in_its_other_layout() -> None:
    def step(query: jax.Array, cache: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        cache = jax.lax.dynamic_update_slice(cache, new, (0, 5, 0, 0))
        return scores(query * 2, cache), cache

    shapes = QUERY, CACHE, f32(8, 1, 4, 64)
    assert layouts(step, *shapes) == ([6], ["dynamic_update_slice"])
    assert layouts(lambda *a: step(*a)[0], *shapes) == ([4], ["dynamic_update_slice"])


def test_only_gpus_lay_operands_out_again() -> None:
    def prices(function: Callable[..., Any], device: str) -> float:
        analysis = toast.analyze(function, f32(64, 16, 8, 64), f32(64, 2048, 8, 64))
        model = CostModel(Space(analysis, Mesh.parse("data=2")), load(device))
        return float(model.price(model.space.initial[None]).memory_seconds[0])

    # The cache is read and written at 0.80 of 3.35 TB/s.
    moved = 2 * 4 * (64 * 2048 * 8 * 64 + 64 * 16 * 8 * 64)
    assert prices(scores, "h100") == pytest.approx(moved / (0.80 * 3.35e12), rel=0.05)
    assert prices(scores, "tpu-v5e") < 1e-4


def test_ragged_products_write_the_rows_of_every_group() -> None:
    def function(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(rows, weights, sizes)

    analysis = toast.analyze(
        function, f32(512, 64), f32(8, 64, 64), jax.ShapeDtypeStruct((8,), jnp.int32),
        platform="cuda",
    )  # fmt: skip
    names = analysis.names
    found = ProductLayouts.of(analysis.program, names.use_op, names.use_index)
    assert found.again.max() == 2 * 8
