"""The kernels of attention that XLA for TPUs generates, by how a program writes its softmax."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from toast.cost import CostModel, break_down
from toast.cost.bound import class_seconds
from toast.cost.terms.kernels import Reads
from toast.evaluation.optimum import random_legal
from toast.hardware import Mesh, load
from toast.space import Space

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def own(q: jax.Array, k: jax.Array, v: jax.Array, dtype: str = "float32") -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=dtype)
    weights = jax.nn.softmax(scores.astype("float32"), -1).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def narrow(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The product is in bfloat16, and so is the gradient of the scores."""
    return own(q, k, v, "bfloat16")


def repeated(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    k, v = (jnp.repeat(each[:, :, ::2], 2, 2) for each in (k, v))
    return own(q, k, v)


def library(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v)


def priced(attention: Attention, keys: int = 1024, heads: int = 8) -> dict[tuple[str, str], float]:
    """Picoseconds for each score, by pass and kind of op, and in reads of sums alone."""

    def step(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        return jax.grad(lambda x: jnp.sum(attention(*x).astype("float32")))((q, k, v))

    shape = jax.ShapeDtypeStruct((64 // heads, keys, heads, 64), "bfloat16")
    analysis = toast.analyze(step, shape, shape, shape, platform="tpu")
    model = CostModel(Space(analysis, Mesh.parse("d=2")), load("tpu-v5e"))
    broken, program = break_down(model, model.space.initial), analysis.program
    seconds = broken.product_seconds + broken.memory_seconds
    found: dict[tuple[str, str], float] = {}
    for op in range(len(program.ops)):
        key = program.passes[op], program.kind(op)
        each = float(seconds[op]) / (64 * keys * keys) * 1e12
        found[key] = found.get(key, 0.0) + each
    return found


@pytest.mark.parametrize(
    ("attention", "keys", "sums"),
    [
        (own, 1024, False),
        (narrow, 1024, False),
        (own, 4096, True),  # rows are too long
        (repeated, 1024, True),
        (library, 1024, True),  # a transpose is between the maximum and the exponentials
    ],
)
def test_a_product_adds_up_the_exponentials_of_its_rows(
    attention: Attention, keys: int, sums: bool
) -> None:
    """As compiled for v5e: another kernel takes 9 to 12 ps for each score."""
    assert (priced(attention, keys)["forward", "reduce"] > 8) == sums


def test_another_kernel_adds_up_narrower_scores() -> None:
    """XLA drops the only head behind the product, whose kernel computes the maximum alone."""
    one, several = (priced(narrow, heads=heads)["forward", "reduce"] for heads in (1, 8))
    assert one == pytest.approx(9.3, rel=0.05)
    assert several < 1


def test_a_bound_has_no_time_for_sums_that_a_product_may_compute() -> None:
    """Whether it does depends on the sharding of other ops than the sum."""
    shape = jax.ShapeDtypeStruct((8, 1024, 8, 64), "bfloat16")
    analysis = toast.analyze(narrow, shape, shape, shape, platform="tpu")
    space = Space(analysis, Mesh.parse("a=8"), min_dimensions=0, collapse=False)
    model = CostModel(space, load("tpu-v5e"))
    tables = model.tables
    (use,) = np.flatnonzero(tables.uses.reads_in_products)
    op_class = tables.op_class(Reads.scope)[use]
    least = class_seconds(tables, model.machine, [Reads()], space.choices)[op_class]
    drawn = random_legal(space, 50, np.random.default_rng(0))
    read = Reads().seconds(model.layout(drawn))[:, use]
    assert not least.any()
    assert read.min() == 0 < read.max()


def test_products_compute_gradients_of_scores_as_they_read_them() -> None:
    """If the program rounds them, a kernel does."""
    written = {each: priced(each)["backward", "convert"] for each in (own, library, narrow)}
    multiplied = {each: priced(each)["backward", "multiply"] for each in (own, library)}
    assert written[narrow] > 6
    assert written[own] < 4
    assert max(multiplied.values()) < 8  # 19 ps if they were written and read


def test_results_are_packed_before_they_are_written() -> None:
    """Products compiled for v5e take 6.6 ps for an element of 32 bits, and 9.4 for one of 16."""
    seconds = {}
    for dtype in ("float32", "bfloat16"):

        def step(x: jax.Array, y: jax.Array, dtype: str = dtype) -> jax.Array:
            return jnp.einsum("bmk,bnk->bmn", x, y, preferred_element_type=dtype)

        shape = jax.ShapeDtypeStruct((32, 2048, 128), "bfloat16")
        analysis = toast.analyze(step, shape, shape, platform="tpu")
        model = CostModel(Space(analysis, Mesh.parse("d=2")), load("tpu-v5e"))
        seconds[dtype] = float(model.price(model.space.initial[None]).seconds[0])
    each = {dtype: spent / (32 * 2048**2) * 1e12 for dtype, spent in seconds.items()}
    assert each["float32"] < each["bfloat16"]
    assert each["bfloat16"] == pytest.approx(9.4, rel=0.15)
    assert np.isfinite(each["float32"])
