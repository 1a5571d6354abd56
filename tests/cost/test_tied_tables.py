"""The gradient of a table that is looked up and multiplied, as XLA's TPU compiler sums it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import action
from toast.cost import CostModel, Memo
from toast.cost.liveness import added_scatters
from toast.cost.terms import AddedOperands, AddedResults
from toast.hardware import Mesh, load
from toast.space import Space

VOCABULARY, WIDTH, ROWS = 16384, 256, 65536


def step(table: Any, head: Any, ids: Any, compute: str, *, tied: bool) -> Any:
    def loss(table: Any, head: Any) -> Any:
        x = jnp.tanh(table[ids].astype(compute))
        logits = x @ (table if tied else head).astype(compute).T
        return (jax.nn.logsumexp(logits.astype(jnp.float32), -1) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1))(table, head)


def model_of(compute: str = "float32", *, tied: bool = True) -> CostModel:
    table = jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32)
    ids = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    analysis = toast.analyze(
        lambda table, head, ids: step(table, head, ids, compute, tied=tied), table, table, ids,
        platform="tpu", cache=False,
    )  # fmt: skip
    return CostModel(Space(analysis, Mesh.parse("d=8"), min_dimensions=0), load("tpu-v5e"))


@pytest.mark.parametrize(
    ("compute", "tied", "added"),
    [
        ("float32", True, True),
        ("float32", False, False),
        ("bfloat16", True, False),  # a conversion is in between
    ],
)
def test_which_scatters_the_kernel_of_a_product_adds(compute: str, tied: bool, added: bool) -> None:
    model = model_of(compute, tied=tied)
    program = model.space.analysis.program
    found = added_scatters(program)
    assert len(found) == added
    for product, scatter in found:
        assert program.kinds[product] == "dot_general"
        assert program.kinds[scatter] == "scatter"
        assert scatter > product
    assert (AddedOperands.name in model.tables.columns.names) == added


@pytest.mark.parametrize(
    ("argument", "dimension", "waits"), [("ids", 0, True), ("table", 0, False)]
)
def test_operands_wait_for_a_joint_sum(argument: str, dimension: int, waits: bool) -> None:
    """Of data parallelism, but not where devices have parts of the table."""
    model = model_of()
    space = model.space
    state = space.apply(space.initial, action(space, argument, dimension, "d"))
    layout = model.layout(state[None])
    size = AddedOperands().bytes(layout)[0]
    assert size.any() == waits
    if waits:
        logits = ROWS * VOCABULARY * 4 / 8 / model.hardware.allocator_efficiency
        table = VOCABULARY * WIDTH * 4 / model.hardware.allocator_efficiency
        assert size.max() == pytest.approx(logits - table)
        assert AddedResults().bytes(layout)[0].max() == pytest.approx(table)
    priced, alone = Memo(model).price(state[None]), model.price(state[None])
    assert np.allclose(priced.peak_bytes, alone.peak_bytes)
    timeline = model.timeline(state)
    (pair,) = added_scatters(space.analysis.program)
    end = [b.end for b in timeline.buffers if b.bytes > 100 * 2**20 and b.start < pair[1]]
    assert (max(end, default=0) == pair[1] + 1) == waits
