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
from toast.hardware import Hardware, load

ROWS, COLUMNS = P("model", None), P(None, "model")


def slow_products() -> Hardware:
    """Hardware on which small products hide their permutes, and neither kernels nor results wait."""
    slow = {"bf16": 2e12, "f32": 2e12}
    return dataclasses.replace(
        load("tpu-v5e"), memory_bytes_per_s=1e30, flops_per_s=slow, product_latency_s=0.0
    )


def layer(x: Any, up: Any, down: Any) -> Any:
    return jax.nn.relu(x @ up) @ down


def planned(
    function: Callable[..., Any],
    shapes: Any,
    pins: dict[str, P],
    mesh: str = "model=4",
    overlap: float = 1.0,
) -> toast.Plan:
    hardware = dataclasses.replace(slow_products(), overlap_efficiency=overlap)
    return toast.plan(
        function, *(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes), mesh=mesh,
        hardware=hardware, lowering="local", constraints=toast.Constraints(pin=pins),
    )  # fmt: skip


@pytest.fixture(scope="module")
def looped() -> toast.Plan:
    pins = {"x": ROWS, "up": COLUMNS, "down": ROWS, "result": ROWS}
    return planned(layer, ((1024, 64), (64, 512), (512, 64)), pins)


def test_3_3_2_windowed_einsum(looped: toast.Plan) -> None:
    """The operand goes around the four devices, and then the parts of the sum."""
    local = looped.lowered()
    assert dict(local.counts()) == {("collective_permute", ("model",), 65536.0): 6}
    assert local.counts() == looped.model.local_collectives(looped.state)
    assert looped.verify(lowering="local").equal
    assert "loop of dot_general" in local.text
    assert '"collective_permute of x for dot_general ' in local.text


def test_uses_share_the_shards_of_a_loop() -> None:
    """Several products of one gathered value: the first has the loop, the others its shards."""

    def gated(x: Any, gate: Any, up: Any, down: Any) -> Any:
        hidden = (x @ up) * jnp.tanh(x @ gate)
        return toast.split(hidden, 1, "model") @ down, x.sum()

    shapes = (1024, 64), (64, 512), (64, 512), (512, 64)
    pins = {"x": ROWS, "gate": COLUMNS, "up": COLUMNS, "down": ROWS, "result[0]": ROWS}
    plan = planned(gated, shapes, pins, overlap=0.1)  # else, one product hides the other's gather
    counts = plan.lowered().counts()
    assert counts["collective_permute", ("model",), 65536.0] == 6
    assert counts == plan.model.local_collectives(plan.state)
    assert plan.verify(lowering="local").equal


def test_batches_of_products() -> None:
    def heads(x: Any, w: Any) -> Any:
        return jnp.einsum("bsd,dhk->bhsk", x, w)

    pins = {"x": P("data", "model", None), "w": P(None, "model", None)}
    plan = planned(heads, ((4, 256, 64), (64, 8, 64)), pins, mesh="data=2,model=4")
    counts = plan.lowered().counts()
    assert counts["collective_permute", ("model",), 32768.0] == 3
    assert counts == plan.model.local_collectives(plan.state)
    assert plan.verify(lowering="local").equal


def test_price_decides(looped: toast.Plan) -> None:
    """A product that hides little of its permutes has no loop, nor has one for XLA."""
    space, hardware = looped.model.space, looped.hardware
    assert looped.model.loops
    slow_memory = dataclasses.replace(hardware, memory_bytes_per_s=1e9)
    quick_products = dataclasses.replace(hardware, flops_per_s=load("tpu-v5e").flops_per_s)
    whole = CostModel(space, hardware, loops=False)
    for model in (
        whole, CostModel(space, slow_memory), CostModel(space, quick_products),
        CostModel(space, hardware, overlap="none"),
    ):  # fmt: skip
        kinds = {kind for kind, *_ in model.reshards(looped.state)}
        assert kinds == {"all_gather", "reduce_scatter"}
    state = looped.state[None]
    assert looped.model.price(state).seconds < whole.price(state).seconds


def test_memo_has_the_price_of_loops(looped: toast.Plan) -> None:
    states = np.stack([looped.state, looped.model.space.unsharded])
    seconds = Memo(looped.model).price(states).seconds
    np.testing.assert_allclose(seconds, looped.model.price(states).seconds, rtol=1e-9)


def test_buffers_that_are_set_later_are_not_written_on_tpus(looped: toast.Plan) -> None:
    module = looped.lowered().module
    assert "toast.unset" in str(module)
    replaced = str(mlir.without_unset(module))
    assert "toast.unset" not in replaced
    assert "AllocateBuffer" in replaced


def test_branches_share_the_shards_of_a_loop() -> None:
    """The shards are passed on before the branches, each of which may use them."""

    def either(x: Any, up: Any, gate: Any, down: Any, flag: Any) -> Any:
        hidden = jax.lax.cond(
            flag, lambda: jax.nn.relu(x @ up), lambda: jnp.tanh(x @ gate) * (x @ up)
        )  # fmt: skip
        return toast.split(hidden, 1, "model") @ down

    pins = {"x": ROWS, "up": COLUMNS, "gate": COLUMNS, "down": ROWS, "result": ROWS}
    shapes = (1024, 64), (64, 512), (64, 512), (512, 64)
    plan = toast.plan(
        either, *(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes),
        jax.ShapeDtypeStruct((), "bool"), mesh="model=4", hardware=slow_products(),
        lowering="local", constraints=toast.Constraints(pin=pins),
    )  # fmt: skip
    local = plan.lowered()
    assert "loop of dot_general" in local.text
    assert local.counts() == plan.model.local_collectives(plan.state)
    assert plan.verify(lowering="local").equal
