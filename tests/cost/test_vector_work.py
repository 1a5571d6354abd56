"""Kernels that take longer than their bytes: bound by the vector unit, and copies of gathers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.helpers import action
from toast.cost import CostModel, break_down
from toast.cost.terms.traffic import GatherCopies
from toast.hardware import Hardware, Mesh, load
from toast.space import Space

V5E = load("tpu-v5e")
SIDE = 1024


def memory_seconds(function: Callable[..., Any], dtype: str, hardware: Hardware) -> float:
    """Of the accesses of a function of a square array, without exponentials and latencies."""
    analysis = toast.analyze(function, jax.ShapeDtypeStruct((SIDE, SIDE), dtype), platform="tpu")
    space = Space(analysis, Mesh.parse("a=2"), min_dimensions=0)
    terms = break_down(CostModel(space, hardware), space.initial).term_seconds
    return float(sum(terms[name].sum() for name in ("reads", "writes")))


@pytest.mark.parametrize(
    ("function", "dtype", "moved"),
    [
        (lambda x: x * 2, "float32", 8),
        (lambda x: x * 2, "bfloat16", 4),
        (lambda x: jnp.sum(x, 1), "float32", 4),
        (lambda x: jnp.sum(x.astype("float32"), 1), "bfloat16", 2),
    ],
)
def test_kernels_take_as_long_as_memory_or_the_vector_unit(
    function: Callable[..., Any], dtype: str, moved: int
) -> None:
    """``moved`` are bytes of memory traffic for each element."""
    elements = SIDE * SIDE
    by_memory = elements * moved / V5E.memory_bytes_per_s
    by_unit = elements / V5E.vector_elements_per_s
    found = memory_seconds(function, dtype, V5E)
    assert found == pytest.approx(max(by_memory, by_unit), rel=2e-3)
    free = dataclasses.replace(V5E, vector_elements_per_s=math.inf)
    assert memory_seconds(function, dtype, free) == pytest.approx(by_memory, rel=2e-3)


def test_an_optimizer_reads_its_arguments_in_one_kernel() -> None:
    """A kernel that moves 22 bytes for each element waits for the memory, not for the unit."""
    shapes = [jax.ShapeDtypeStruct((SIDE, SIDE), "bfloat16")] * 2
    shapes += [jax.ShapeDtypeStruct((SIDE, SIDE), "float32")] * 2

    def adam(weight: Any, gradient: Any, mean: Any, square: Any) -> Any:
        gradient = gradient.astype(jnp.float32)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
        new = weight.astype(jnp.float32) - 0.1 * mean / (jnp.sqrt(square) + 1e-8)
        return new.astype(jnp.bfloat16), mean, square

    analysis = toast.analyze(adam, *shapes, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=2"), min_dimensions=0)
    terms = break_down(CostModel(space, V5E), space.initial).term_seconds
    found = float(sum(terms[name].sum() for name in ("reads", "writes")))
    assert found == pytest.approx(SIDE * SIDE * 22 / V5E.memory_bytes_per_s, rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("one_hot", "passes"), [(False, 1), (True, 2)])
def test_each_reduction_of_a_loss_reads_the_logits_again(
    one_hot: bool, passes: int, dtype: str
) -> None:
    """The product's kernel has the maximum; then come the sum, and the logits of the labels."""

    def loss(x: Any, weights: Any, labels: Any) -> Any:
        logits = (x @ weights).astype(jnp.float32)
        largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        total = jnp.log(jnp.exp(logits - largest).sum(-1, keepdims=True))
        if not one_hot:
            return jnp.sum(total + largest)
        chosen = jax.nn.one_hot(labels, logits.shape[-1])
        return -jnp.sum(chosen * (logits - largest - total), -1).mean()

    rows, vocabulary = 2048, 8192
    shapes = [
        jax.ShapeDtypeStruct((rows, 512), dtype),
        jax.ShapeDtypeStruct((512, vocabulary), dtype),
        jax.ShapeDtypeStruct((rows,), "int32"),
    ]
    analysis = toast.analyze(loss, *shapes, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=2"), min_dimensions=0)
    terms = break_down(CostModel(space, V5E), space.initial).term_seconds
    once = rows * vocabulary / V5E.vector_elements_per_s
    assert float(terms["reads"].sum()) == pytest.approx(passes * once, rel=0.15)


def test_further_values_that_a_loop_keeps_are_written_and_read_once_more() -> None:
    """In XLA, the second of three takes two to four times as long as its bytes, the third as long."""

    def seconds(stacks: int) -> float:
        def body(x: Any, _: Any) -> tuple[Any, Any]:
            x = x + 1
            return x, (x, x * 2, x * 3)[:stacks]

        return memory_seconds(lambda x: jax.lax.scan(body, x, length=8), "bfloat16", V5E)

    rate = V5E.memory_bytes_per_s * V5E.products.memory_share
    stack = 8 * SIDE * SIDE * 2 / rate
    assert 3.0 * stack < seconds(3) - seconds(1) <= 4.02 * stack


def test_gathers_along_several_dimensions_are_copied() -> None:
    """Shards of both dimensions of a weight are gathered at once, and put into their places."""
    shapes = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((4096, 512), (512, 512)))
    analysis = toast.analyze(lambda x, w: jnp.tanh(x @ w), *shapes, platform="tpu")
    space = Space(analysis, Mesh.parse("a=4,b=2"), min_dimensions=0)
    rows = space.initial
    for axis in ("a", "b"):
        rows = space.apply(rows, action(space, "x", 0, axis))
    model = CostModel(space, V5E)

    def copied(*dims: tuple[int, str]) -> float:
        state = rows
        for dim, axis in dims:
            state = space.apply(state, action(space, "w", dim, axis))
        found = break_down(model, state).term_seconds.get(GatherCopies.name)
        return 0.0 if found is None else float(found.sum())

    assert copied() == copied((0, "a")) == copied((0, "a"), (0, "b")) == 0
    # Tiles of two rows are a quarter full.
    rate = V5E.memory_bytes_per_s / 2 / 4
    assert copied((0, "a"), (1, "b")) == pytest.approx(2 * 2 * 512 * 512 / rate)


@pytest.mark.parametrize(("shape", "padding"), [((64, 7, 7, 64), 2.0), ((64, 64, 128), 1.0)])
def test_kernels_read_and_write_whole_tiles(shape: tuple[int, ...], padding: float) -> None:
    x = jax.ShapeDtypeStruct(shape, "float32")
    analysis = toast.analyze(lambda x: x + 1, x, platform="tpu")
    space = Space(analysis, Mesh.parse("a=2"), min_dimensions=0)
    terms = break_down(CostModel(space, V5E), space.initial).term_seconds
    moved = 8 * math.prod(shape) * padding
    seconds = float(sum(terms[name].sum() for name in ("reads", "writes")))
    assert seconds == pytest.approx(moved / V5E.memory_bytes_per_s, rel=0.02)


# -- what is in memory ---------------------------------------------------------------------------


def test_weights_that_a_step_reads_take_the_time_of_their_bytes() -> None:
    """Although each has room in the fast memory: they are not made there."""

    def decode(weights: list[Any], x: Any) -> Any:
        for weight in weights:
            x = x @ weight
        return x

    bf16 = jnp.bfloat16
    weights = [jax.ShapeDtypeStruct((4096, 4096), bf16)] * 4
    analysis = toast.analyze(decode, weights, jax.ShapeDtypeStruct((8, 4096), bf16))
    model = CostModel(Space(analysis, Mesh.parse("a=2"), min_dimensions=0), V5E)
    moved = 4 * 4096 * 4096 * 2
    assert model.initial_seconds > moved / V5E.memory_bytes_per_s


def test_kernels_of_the_vector_unit_have_time_to_write_more() -> None:
    """What a policy keeps costs nothing where its kernel waits for the vector unit anyway."""
    for dtype, least, most in (("bfloat16", 1.0, 1.0), ("float32", 0.0, 0.1)):
        x = jax.ShapeDtypeStruct((SIDE, SIDE), dtype)
        analysis = toast.analyze(lambda x: x + 1, x, platform="tpu")
        for hardware in (V5E, dataclasses.replace(V5E, vector_elements_per_s=math.inf)):
            idle = CostModel(Space(analysis, Mesh.parse("a=4")), hardware).tables.idle
            if hardware is V5E:
                assert least <= idle.max() <= most
            else:
                assert not idle.any()
