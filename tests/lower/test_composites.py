"""Composites run on shards: their decomposition is lowered with the shardings of the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec

import toast
from tests.helpers import f32, random_states
from tests.lower.test_lowering import assert_as_predicted
from toast.cost import CostModel
from toast.hardware import Mesh, load
from toast.models.attention import attention
from toast.plan.shard import lowered_state
from toast.space import Space

SHAPES = (f32(4, 16, 4, 2, 8), f32(4, 16, 4, 8), f32(4, 16, 4, 8))


def forward(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, causal=True)


def backward(q: Any, k: Any, v: Any) -> Any:
    return jax.grad(lambda *qkv: (forward(*qkv) ** 2).sum(), (0, 1, 2))(q, k, v)


@pytest.mark.parametrize("spec", [
    PartitionSpec("a"), PartitionSpec(None, None, "a"), PartitionSpec(None, "a"),
    PartitionSpec("a", "b"), PartitionSpec("b", None, "a"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("function", [forward, backward])
def test_attention_along_batch_heads_and_queries(
    function: Callable[..., Any], spec: PartitionSpec
) -> None:
    """Gradients of keys and values are partial sums over queries."""
    plan = toast.plan(
        function, *SHAPES, mesh="a=2,b=2", hardware="tpu-v5e",
        constraints=toast.Constraints(pin={"q": spec}),
    )  # fmt: skip
    assert_as_predicted(plan.model, plan.state, plan.lowered())


def test_random_states_of_attention() -> None:
    model = CostModel(
        Space(toast.analyze(backward, *SHAPES), Mesh.parse("a=2,b=2,c=2")), load("tpu-v5e")
    )
    for state in random_states(model.space, 4, seed=0):
        assert_as_predicted(model, state, lowered_state(model, state))


def test_loops_that_share_a_value_reshard_it_on_their_own() -> None:
    """The stacked weights of a scan, which both passes gather."""

    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            return jax.lax.scan(lambda h, w: (jax.numpy.tanh(h @ w), None), x, ws)[0].sum()

        return jax.grad(loss)(ws)

    plan = toast.plan(
        step, f32(3, 16, 16), f32(8, 16), mesh="a=2,b=2", hardware="tpu-v5e",
        constraints=toast.Constraints(pin={"ws": PartitionSpec(None, None, "b")}),
    )  # fmt: skip
    assert_as_predicted(plan.model, plan.state, plan.lowered())
