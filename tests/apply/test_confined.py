"""Ops that devices run on their shards, in manual computations of their own."""

from __future__ import annotations

import importlib
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.helpers import action, f32, model_of
from toast.apply import annotate, verify
from toast.cost import CostModel
from toast.evaluation.oracle.tpu import judge
from toast.plan.prediction import Prediction
from toast.plan.shard import shardings_of
from toast.space import States


def train_step(x: jax.Array, up: jax.Array, down: jax.Array) -> list[jax.Array]:
    def loss(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return ((jax.nn.silu(x @ up) @ down) ** 2).mean()

    return [*jax.grad(loss, argnums=(0, 1, 2))(x, up, down)]


def test_ops_on_shards_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs have no kernel for ragged products, so that other products stand in for them."""
    module = importlib.import_module("toast.apply.annotate")
    monkeypatch.setattr(module, "_CONFINED", frozenset({"dot_general"}))
    model = model_of(toast.analyze(train_step, f32(4, 16, 8), f32(8, 32), f32(32, 8)), "a=2,b=4")
    program, space = model.space.analysis.program, model.space
    states = {}
    for one, other in itertools.combinations(space.actions, 2):
        if one.axis != other.axis and one.color != other.color:
            state = space.apply(space.apply(space.initial, one), other)
            states[state.tobytes()] = state
    chosen = [*states.values()][::6]
    assert len(chosen) > 2
    regions = 0
    for state in chosen:
        shardings = shardings_of(model, state)
        regions += str(annotate(program, shardings)).count("sdy.manual_computation")
        assert verify(program, shardings).equal
    assert regions == len(chosen) * sum(
        program.kind(op) == "dot_general" for op in range(len(program.ops))
    )


def experts(x: jax.Array, up: jax.Array, down: jax.Array, sizes: jax.Array) -> jax.Array:
    hidden = jax.nn.silu(jax.lax.ragged_dot(x, up, sizes))
    return jax.lax.ragged_dot(hidden, down, sizes)


def sharded_experts(rows: int = 1024) -> tuple[CostModel, States]:
    """The hidden dimension is sharded over one axis, that of the rows' elements over the other."""
    half = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    arguments = half(rows, 512), half(8, 512, 2048), half(8, 2048, 512)
    sizes = jax.ShapeDtypeStruct((8,), "int32")
    model = model_of(toast.analyze(experts, *arguments, sizes, platform="tpu"), "a=2,b=2")
    space = model.space
    state = space.apply(space.initial, action(space, "up", 2, "a"))
    return model, space.apply(state, action(space, "x", 1, "b"))


def test_ragged_products_are_out_of_the_partitioner_s_sight() -> None:
    model, state = sharded_experts()
    text = str(annotate(model.space.analysis.program, shardings_of(model, state)))
    first, second = text.split("sdy.manual_computation")[1:]
    shards = "(tensor<1024x256xbf16>, tensor<8x256x1024xbf16>, tensor<8xi32>)"
    assert f"{shards} -> tensor<1024x1024xbf16>" in first
    # Parts of a sum are stacked: XLA adds them up.
    assert "tensor<2x1024x2048xbf16>" in first
    assert "stablehlo.reduce" in first
    assert "tensor<1024x1024xbf16>, tensor<8x1024x" in second


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_xla_moves_and_needs_what_is_predicted_for_ragged_products() -> None:
    model, state = sharded_experts(8192)
    program, hardware = model.space.analysis.program, model.hardware
    verdict = judge(program, shardings_of(model, state), hardware)
    predicted = Prediction.of(model.price(state[None]))
    sent = sum(collective.sent_bytes for collective in verdict.collectives)
    assert sent == pytest.approx(predicted.sent_bytes, rel=1e-3)
    assert verdict.peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.15)
