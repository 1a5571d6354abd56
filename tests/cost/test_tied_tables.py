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
from toast.cost.liveness import added_scatters, liveness
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
    names = model.space.analysis.names
    live = liveness(program, names.use_op, names.use_value, lanes=128)
    found = added_scatters(program, live)
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
    (scatter,) = (
        number for number, op in enumerate(space.analysis.program.ops)
        if space.analysis.program.kinds[number] == "scatter"
        and space.analysis.program.values[op.results[0]].type.shape == (VOCABULARY, WIDTH)
    )  # fmt: skip
    end = [b.end for b in timeline.buffers if b.bytes > 100 * 2**20 and b.start < scatter]
    assert (max(end, default=0) == scatter + 1) == waits
    assert not AddedOperands().least_bytes(layout).any()


def test_gpus_and_arguments_have_no_added_operands() -> None:
    space = model_of().space
    gpu = CostModel(space, load("h100"))
    assert not gpu.tables.values.adds_scatter.any()
    state = space.apply(space.initial, action(space, "ids", 0, "d"))
    assert not AddedOperands().bytes(gpu.layout(state[None])).any()

    def of_argument(table: Any, x: Any, ids: Any) -> Any:
        return jax.grad(lambda t: (x @ t.T).sum() + (t[ids] ** 2).sum())(table)

    arguments = (
        jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    )  # fmt: skip
    analysis = toast.analyze(of_argument, *arguments, platform="tpu", cache=False)
    model = CostModel(Space(analysis, Mesh.parse("d=8"), min_dimensions=0), load("tpu-v5e"))
    columns = model.tables.columns
    if AddedOperands.name in columns.names:
        events, block = model.tables.events, columns[AddedOperands.name]
        inside = (events.column >= block.start) & (events.column < block.stop)
        assert not np.isin(events.value[inside], analysis.program.argument_values).any()
