"""Which kernels write updates into their buffers, and products in loops, as on TPUs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from toast.cost import CostModel, break_down
from toast.cost.liveness import liveness
from toast.cost.terms.kernels import _WAITING
from toast.cost.update_kernels import update_kernels
from toast.hardware import Mesh, load
from toast.space import Space

V5E = load("tpu-v5e")
STEPS, ROWS, WIDTH = 64, 8, 256


def analyzed(function: Any, *shapes: tuple[int, ...]) -> toast.Analysis:
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return toast.analyze(function, *arguments, platform="tpu", cache=False)


def costs(function: Any, *shapes: tuple[int, ...], hardware: Any = V5E) -> Any:
    space = Space(analyzed(function, *shapes), Mesh.parse("a=2"), min_dimensions=0)
    return space, break_down(CostModel(space, hardware), space.unsharded)


def scanned(step: Any) -> Any:
    return lambda first, xs: jax.lax.scan(step, first, xs)


def written_by(step: Any) -> list[tuple[str, bool]]:
    """For each update: the op of the kernel that writes it, and whether it is a product."""
    analysis = analyzed(scanned(step), (ROWS, WIDTH), (STEPS, WIDTH, WIDTH))
    program, names = analysis.program, analysis.names
    live = liveness(program, names.use_op, names.use_value, lanes=128)
    kernels = update_kernels(program, live, 128)
    return [
        (program.kinds[int(kernels.kernel[op]) % len(program.ops)], bool(kernels.by_product[op]))
        for op, kind in enumerate(program.kinds) if kind == "dynamic_update_slice"
    ]  # fmt: skip


def test_the_kernel_that_computes_an_update_writes_it() -> None:
    ((kind, by_product),) = written_by(lambda c, x: ((after := jnp.tanh(c + x[0])), after))
    assert kind != "dynamic_update_slice"
    assert not by_product


def test_a_carried_value_is_written_by_a_kernel_of_its_own() -> None:
    assert written_by(lambda c, x: (jnp.tanh(c + x[0]), c)) == [("dynamic_update_slice", False)]


@pytest.mark.parametrize("after", [lambda y: y, jnp.tanh])
def test_a_product_writes_its_result(after: Any) -> None:
    ((_, by_product),) = written_by(lambda c, x: ((y := after(c @ x)), y))
    assert by_product


def summing(weights: Any, xs: Any) -> Any:
    """A loop that adds an outer product to a matrix in each step."""
    return jax.lax.scan(lambda total, x: (total + x.T @ x, None), weights, xs)[0]


def reads(width: int) -> float:
    _, broken = costs(summing, (width, width), (STEPS, ROWS, width))
    return float(broken.term_seconds["reads"].sum())


def test_small_sums_of_loops_stay_in_fast_memory() -> None:
    """The product's kernel adds to the sum; a large one is read from memory."""
    assert reads(256) < 0.01 * STEPS * 4 * 256**2 / V5E.memory_bytes_per_s
    large = 8192
    assert reads(large) >= STEPS * 4 * large**2 / V5E.memory_bytes_per_s


def product_seconds(hardware: Any) -> float:
    """The products of a loop with weights that it computes before."""

    def loop(x: Any, weights: Any) -> Any:
        weights = jnp.tanh(weights)
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ weights), None), x, None, length=STEPS)[0]

    _, broken = costs(loop, (ROWS, 1024), (1024, 1024), hardware=hardware)
    return float(broken.product_seconds.sum()) / STEPS


def test_products_in_fast_memory_wait_for_their_weights() -> None:
    """They have no memory to wait for, but load the larger operand into the matrix unit."""
    loading = 1024**2 / V5E.products.weights_per_s
    assert product_seconds(V5E) == pytest.approx(
        loading + _WAITING * V5E.product_latency_s, rel=1e-3
    )
    without = dataclasses.replace(V5E.products, weights_per_s=np.inf)
    assert product_seconds(dataclasses.replace(V5E, products=without)) > V5E.product_latency_s


@pytest.mark.parametrize("width", [4480, 4608, 6144, 8192])
def test_products_that_read_weights_from_memory_take_no_less_time(width: int) -> None:
    """However much of the weight is in fast memory, the unit loads all of it."""

    def seconds(width: int) -> float:
        def loop(x: Any, weights: Any) -> Any:
            weights = jnp.tanh(weights)
            return jax.lax.scan(lambda c, _: (c @ weights, None), x, None, length=STEPS)[0]

        _, broken = costs(loop, (ROWS, width), (width, width))
        return float(broken.product_seconds.sum())

    assert seconds(width) > seconds(width - 128)


def test_an_update_after_a_sort_needs_a_kernel() -> None:
    assert written_by(lambda c, x: (c, jnp.sort(x[0] + c))) == [("dynamic_update_slice", False)]


def test_gpus_have_kernels_for_updates() -> None:
    analysis = analyzed(scanned(lambda c, x: ((y := c @ x), y)), (8, 64), (4, 64, 64))
    program, names = analysis.program, analysis.names
    live = liveness(program, names.use_op, names.use_value)
    kernels = update_kernels(program, live, 1)
    assert np.array_equal(kernels.kernel, live.kernel)
    assert not kernels.by_product.any()


def test_many_sums_do_not_stay_in_fast_memory() -> None:
    """A loop over microbatches carries the gradients of all weights."""

    def loop(totals: Any, xs: Any) -> Any:
        def step(totals: Any, x: Any) -> Any:
            return [total + x.T @ x for total in totals], None

        return jax.lax.scan(step, totals, xs)[0]

    def reads(sums: int) -> float:
        shape = jax.ShapeDtypeStruct((2048, 2048), "float32")  # 16 MiB
        xs = jax.ShapeDtypeStruct((4, 8, 2048), "float32")
        analysis = toast.analyze(loop, [shape] * sums, xs, platform="tpu", cache=False)
        space = Space(analysis, Mesh.parse("a=2"), min_dimensions=0)
        broken = break_down(CostModel(space, V5E), space.unsharded)
        return float(broken.term_seconds["reads"].sum())

    assert reads(1) < 1e-6
    assert reads(16) >= 16 * 4 * 2048**2 * 4 / V5E.memory_bytes_per_s


def test_arrays_that_a_loop_reads_often_are_in_fast_memory_first() -> None:
    mib = 2.0**20 * np.array([16, 64, 98, 128, 256])
    moved = V5E.products.moved_bytes(mib) / mib
    often = V5E.products.moved_bytes(mib, often=True) / mib
    assert moved == pytest.approx([0, 0.5, 1, 1, 1])
    assert often == pytest.approx([0, 0, 1 / 16, 1, 1])


def test_each_further_update_of_a_kernel_reads_again_what_the_first_has_read() -> None:
    def seconds(kept: int) -> float:
        def step(c: Any, x: Any) -> Any:
            y = jnp.tanh(x)
            return c + x, (y, y * x)[:kept]

        size = 16 * 2**20  # no fast memory has room for it
        _, broken = costs(scanned(step), (size,), (STEPS, size))
        return float(broken.term_seconds["reads"].sum())

    once = STEPS * 4 * 16 * 2**20 / V5E.memory_bytes_per_s / V5E.products.memory_share
    assert once < seconds(1) - seconds(0) < 2 * once
    assert seconds(2) - seconds(1) > 1.3 * once
