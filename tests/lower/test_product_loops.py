"""Products that are computed shard by shard beside permutes (GShard, 3.3.2: windowed einsum)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import toast
from toast.cost import CostModel, Memo
from toast.frontend import mlir
from toast.hardware import Hardware

SHAPES = ((64, 32), (32, 64), (64, 32))


def busy() -> Hardware:
    """Hardware on which small products take longer than the transfer of their operands."""
    tpu = toast.hardware.load("tpu-v5e")
    slow = {dtype: 1e-5 * rate for dtype, rate in tpu.flops_per_s.items()}
    return dataclasses.replace(tpu, flops_per_s=slow, memory_bytes_per_s=1e15)


def layer(x: Any, up: Any, down: Any) -> Any:
    hidden = toast.split(jax.nn.relu(x @ up), 1, "model")
    return toast.split(hidden @ down, 0, "model")


def planned(
    function: Callable[..., Any], shapes: Any, pins: dict[str, P], *, mesh: str = "data=2,model=4",
    **options: Any,
) -> toast.Plan:  # fmt: skip
    return toast.plan(
        function, *(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes), mesh=mesh,
        hardware=busy(), lowering="local", constraints=toast.Constraints(pin=pins), **options,
    )  # fmt: skip


def of_layer(mesh: str = "data=2,model=4", **options: Any) -> toast.Plan:
    rows = P("model", None)
    pins = {"x": rows, "up": P(None, "model"), "down": P("model", None), "result": rows}
    return planned(layer, SHAPES, pins, mesh=mesh, **options)


@pytest.mark.parametrize("mesh", ["model=2", "model=3,data=2", "model=4", "data=2,model=4"])
def test_3_3_2_windowed_einsum(mesh: str) -> None:
    if "3" in mesh:
        shapes = ((48, 24), (24, 96), (96, 24))
        rows = P("model", None)
        pins = {"x": rows, "up": P(None, "model"), "down": P("model", None), "result": rows}
        plan = planned(layer, shapes, pins, mesh=mesh)
    else:
        plan = of_layer(mesh)
    local = plan.lowered()
    devices = plan.mesh.sizes[plan.mesh.names.index("model")]
    permutes = {key: n for key, n in local.counts().items() if key[0] == "collective_permute"}
    # The operand goes around, and then the parts of the sum.
    assert sum(permutes.values()) == 2 * (devices - 1)
    assert local.counts() == plan.model.reshards(plan.state)
    assert not {"all_gather", "reduce_scatter"} & {kind for kind, *_ in local.counts()}
    assert plan.verify(lowering="local").equal


def test_uses_share_the_shards_of_a_loop() -> None:
    """Several products of one gathered value: the first has the loop, the others its shards."""

    def gated(x: Any, gate: Any, up: Any, down: Any) -> Any:
        hidden = toast.split((x @ up) * jnp.tanh(x @ gate), 1, "model")
        return toast.split(hidden @ down, 0, "model"), x.sum()

    rows, columns = P("model", None), P(None, "model")
    pins = {
        "x": rows, "gate": columns, "up": columns, "down": P("model", None), "result[0]": rows,
    }  # fmt: skip
    plan = planned(gated, ((64, 32), (32, 64), (32, 64), (64, 32)), pins)
    assert plan.lowered().counts() == plan.model.reshards(plan.state)
    kinds = {kind for kind, *_ in plan.lowered().counts()}
    assert "collective_permute" in kinds and "all_gather" not in kinds
    assert plan.verify(lowering="local").equal


def test_batches_of_products() -> None:
    def heads(x: Any, w: Any) -> Any:
        return jnp.einsum("bsd,dhk->bhsk", x, w)

    pins = {"x": P("data", "model", None), "w": P(None, "model", None)}
    plan = planned(heads, ((4, 32, 16), (16, 8, 4)), pins)
    assert ("collective_permute", ("model",), 1024.0) in plan.lowered().counts()
    assert plan.lowered().counts() == plan.model.reshards(plan.state)
    assert plan.verify(lowering="local").equal


def test_price_decides() -> None:
    """A product that takes less time than its permutes has no loop, nor has one for XLA."""
    plan = of_layer()
    assert plan.model.loops
    unhurried = dataclasses.replace(busy(), flops_per_s={"f32": 1e18, "bf16": 1e18})
    for model in (
        CostModel(plan.model.space, unhurried),
        CostModel(plan.model.space, plan.hardware, loops=False),
        CostModel(plan.model.space, plan.hardware, overlap="none"),
    ):
        kinds = {kind for kind, *_ in model.reshards(plan.state)}
        assert kinds == {"all_gather", "reduce_scatter"}
    whole = CostModel(plan.model.space, plan.hardware, loops=False)
    assert plan.model.price(plan.state[None]).seconds < whole.price(plan.state[None]).seconds


def test_memo_has_the_price_of_loops() -> None:
    plan = of_layer()
    states = np.stack([plan.state, plan.model.space.unsharded])
    np.testing.assert_allclose(
        Memo(plan.model).price(states).seconds, plan.model.price(states).seconds, rtol=1e-9
    )


def test_locations_name_the_loop() -> None:
    text = of_layer().lowered().text
    assert "loop of dot_general" in text


def test_buffers_that_are_set_later_are_not_written_on_tpus() -> None:
    module = of_layer().lowered().module
    replaced = mlir.without_unset(module)
    assert "toast.unset" in str(module) and "toast.unset" not in str(replaced)
    assert "AllocateBuffer" in str(replaced)
