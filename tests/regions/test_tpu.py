"""Memory and collectives of train steps with ``jax.shard_map``, by XLA's TPU compiler."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import toast
from toast.evaluation.oracle.tpu import judge
from toast.search import TreeSearch

MESH = AbstractMesh((4, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def half(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def megatron(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    specs = (P("data"), P(None, "model"), P("model"))
    return jax.shard_map(
        lambda x, a, b: lax.psum(jax.nn.gelu(x @ a) @ b, "model"),
        mesh=MESH, in_specs=specs, out_specs=P("data"),
    )(x, a, b)  # fmt: skip


def gathered(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Weights are split over ``data``, and gathered where they are used."""

    def layer(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        a = lax.all_gather(a, "data", axis=0, tiled=True)
        b = lax.all_gather(b, "data", axis=1, tiled=True)
        return jax.nn.gelu(x @ a) @ b

    specs = (P("data"), P("data"), P(None, "data"))
    return jax.shard_map(
        layer, mesh=MESH, in_specs=specs, out_specs=P("data"), axis_names={"data"}
    )(x, a, b)


def train_step(layer: Callable[..., jax.Array]) -> Callable[..., Any]:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for pair in weights:
            x = x + layer(x, *pair)
        return (x.astype(jnp.float32) ** 2).mean()

    def step(weights: Any, x: jax.Array) -> Any:
        gradients = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: (w - 0.1 * g).astype(w.dtype), weights, gradients)

    return step


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra")
@pytest.mark.parametrize("layer", [megatron, gathered])
def test_predictions_are_those_of_the_tpu_compiler(
    layer: Callable[..., jax.Array], tmp_path: pathlib.Path
) -> None:
    weights = [(half(4096, 16384), half(16384, 4096))] * 4
    plan = toast.plan(
        train_step(layer), weights, half(8192, 4096), mesh="data=4,model=4", hardware="tpu-v5e",
        donate=(0,), platform="tpu", stages=(TreeSearch(effort=128),),
    )  # fmt: skip
    verdict = judge(plan.analysis.program, plan.shardings, plan.hardware, cache=tmp_path)
    # Peaks of unrolled programs of the corpus are 9 % off in the median.
    assert plan.after.peak_bytes == pytest.approx(verdict.peak_bytes, rel=0.15)
    predicted = {c.kind: c.bytes for c in plan.after.collectives if c.count}
    # The compiler also permutes small pieces of loops.
    compiled = {c.kind: c.bytes for c in verdict.collectives if c.bytes > 2**20}
    if layer is gathered:  # it makes loops of some sums, and all-reduces of others
        compiled, predicted = ({"all_gather": c["all_gather"]} for c in (compiled, predicted))
    assert compiled == pytest.approx(predicted, rel=0.03 if layer is gathered else 0.005)
