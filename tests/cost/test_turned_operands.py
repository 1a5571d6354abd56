"""Operands of loops of products that XLA copies into another layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import action
from toast.cost import CostModel
from toast.cost.terms.turned_operands import TurnedOperands, copied_bytes
from toast.hardware import Mesh, load
from toast.space import Space, States

#: So many that operands are too large for fast memory, in which copies take no time.
SEQUENCES = 1024


def model_of(
    tokens: int,
    width: int,
    hidden: int,
    dtype: str = "bfloat16",
    hardware: str = "tpu-v5e",
    sequences: int = SEQUENCES,
) -> CostModel:
    """A gradient ``[width, hidden]`` that sums over the tokens of all sequences."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        loss = jax.grad(lambda w: jnp.sum(jnp.einsum("btd,df->btf", x, w).astype("float32") ** 2))
        return w - 0.1 * loss(w)

    shapes = (jax.ShapeDtypeStruct(s, dtype) for s in ((width, hidden), (sequences, tokens, width)))
    analysis = toast.analyze(step, *shapes, donate=(0,), platform="tpu")
    return CostModel(Space(analysis, Mesh.parse("d=16"), min_dimensions=0), load(hardware))


def scattered(model: CostModel, along: int) -> States:
    """The batch and a dimension of ``w`` over all devices."""
    state = model.space.initial
    for argument, dimension in (("x", 0), ("w", along)):
        state = model.space.apply(state, action(model.space, argument, dimension, "d"))
    return state


def turned(model: CostModel, along: int) -> dict[int, float]:
    """The width of each turned operand, and the bytes of its copy on a device."""
    layout = model.layout(scattered(model, along)[None])
    copied = copied_bytes(layout)[0]
    assert (TurnedOperands().seconds(layout)[0] > 0).tolist() == (copied > 0).tolist()
    assert not TurnedOperands().least_seconds(layout).any()
    sizes, rank = model.tables.values.sizes, model.tables.values.rank
    return {int(sizes[v, rank[v] - 1]): float(copied[v]) for v in np.flatnonzero(copied)}


@pytest.mark.parametrize(
    ("tokens", "width", "hidden", "along", "copies"),
    [
        (256, 1024, 3072, 1, {3072: 256}),  # slices of 192 elements fill lanes worse than tokens
        (256, 1024, 4096, 1, {1024: 256}),  # slices are whole tiles: the left-hand side
        (256, 4096, 1024, 0, {4096: 256}),  # that is sliced, here
        (197, 1024, 3072, 1, {3072: 256}),  # 197 tokens in 256 lanes, or 192 elements
        (197, 1024, 4096, 1, {}),  # slices fill lanes, and tokens do not
        (197, 1280, 5120, 1, {}),  # 320 elements in 384 lanes
    ],
)
def test_the_contracting_dimension_is_in_the_lanes_that_it_fills(
    tokens: int, width: int, hidden: int, along: int, copies: dict[int, int]
) -> None:
    """As compiled for v5e."""
    model = model_of(tokens, width, hidden)
    sequences, element = SEQUENCES // 16, 2
    assert turned(model, along) == pytest.approx({
        last: sequences * lanes * last * element for last, lanes in copies.items()
    })  # fmt: skip


def test_sequences_are_in_the_lanes_if_they_fill_them() -> None:
    """64 sequences on a device do not, and 128 do."""
    few, many = (turned(model_of(197, 1024, 4096, sequences=n), 1) for n in (1024, 2048))
    assert few == {}
    assert many == pytest.approx({1024: 128 * 197 * 1024 * 2})


def test_float32_operands_are_rounded_first() -> None:
    wide, narrow = (model_of(256, 1024, 3072, dtype) for dtype in ("float32", "bfloat16"))
    assert turned(wide, 1) == turned(narrow, 1)


def test_devices_without_lanes_read_operands_as_they_are() -> None:
    assert not turned(model_of(256, 1024, 3072, hardware="h100"), 1)


def test_products_of_few_parts_are_no_loops() -> None:
    """A sum over four devices is none."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w).astype("float32") ** 2))(w)

    shapes = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((1024, 768), (64, 256, 1024)))
    analysis = toast.analyze(step, *shapes, donate=(0,), platform="tpu")
    space = Space(analysis, Mesh.parse("d=4"), min_dimensions=0)
    model = CostModel(space, load("tpu-v5e"))
    assert not turned(model, 1)
