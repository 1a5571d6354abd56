"""Uneven dimensions (GShard, 3.3.1): sizes of real models on meshes that do not divide them."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import toast
from tests.helpers import f32
from toast.apply import Runnable
from toast.cost import CostModel
from toast.hardware import Mesh, load
from toast.plan.shard import lowered_state
from toast.space import Space
from toast.uneven import padded_program

#: The number of tokens of GPT-2.
TOKENS = 50_257


def rows(x: jax.Array, w: jax.Array) -> Any:
    """A layer, and reductions over its rows, which padding must not reach."""
    y = jnp.tanh(x @ w)
    return y, y.sum(0), y.max(0), y.argmin(0), jnp.sort(y, 0), jax.nn.softmax(y, 0)


def heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k))
    return jnp.einsum("bhqk,bhkd->bhqd", scores, v).sum(1)


def loss(embedding: jax.Array, tokens: jax.Array) -> Any:
    """The loss of a language model and its gradient: embedding, logits, softmax and labels."""

    def mean(embedding: jax.Array) -> jax.Array:
        x = embedding[tokens[:-1]]
        logits = jax.nn.log_softmax(x @ embedding.T)
        return -jnp.take_along_axis(logits, tokens[1:, None], 1).mean()

    return jax.value_and_grad(mean)(embedding)


def check(
    function: Any, arrays: Sequence[Any], devices: int, local: str, added: float = 0.4
) -> None:
    """Runs plans of one action, some of which have values of the type ``local`` on a device.

    Dimensions may get a share ``added`` of their elements. Each plan gives the results of one device, and has the predicted collectives.
    """
    mesh = Mesh.parse(f"a={devices}")
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    padded = padded_program(toast.analyze(function, *shapes), mesh, added)
    assert padded is not None
    model = CostModel(Space(toast.analyze(padded.program), mesh), load("tpu-v5e"))
    space, found = model.space, 0
    expected = jax.tree.leaves(jax.jit(function)(*arrays))
    for action in space.actions:
        state = space.apply(space.initial, action)
        lowered = lowered_state(model, state)
        assert not lowered.gathered
        assert lowered.counts() == model.local_collectives(state)
        if local not in lowered.text:
            continue
        found += 1
        if found > 3:
            continue
        results = Runnable(
            lowered.program, lowered.shardings, module_of=lambda *_, m=lowered.module: m
        ).run_flat([*map(jnp.asarray, arrays)])
        for result, value in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, value, rtol=1e-5, atol=1e-5)
    assert found


def normal(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=shape).astype("f4")


def vocabulary(devices: int) -> None:
    """Rows of the tokens on each device: a multiple of 128 that the devices divide."""
    tokens = np.array([0, 50_256, 3, 25_000, 50_255, 50_256], dtype="i4")
    size = -(-TOKENS // 128) * 128
    assert size % devices == 0
    check(loss, (normal(TOKENS, 8), tokens), devices, f"tensor<{size // devices}x8xf32>")


def test_gshard_3_3_1_7_rows_on_4_devices() -> None:
    check(rows, (normal(7, 16), normal(16, 12)), 4, "tensor<2x12xf32>")


def test_gshard_3_3_1_12_heads_on_8_devices() -> None:
    arrays = [normal(3, 12, 10, 8) for _ in range(3)]
    check(heads, arrays, 8, "tensor<3x2x10x10xf32>")


def test_gshard_3_3_1_50257_tokens_on_8_devices() -> None:
    vocabulary(8)


def test_gshard_3_3_1_50257_tokens_on_16_devices() -> None:
    """In a process with 16 devices."""
    top = pathlib.Path(__file__).parents[2]
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=16 --xla_backend_optimization_level=0",
    }  # fmt: skip
    code = f"from {__name__} import vocabulary; vocabulary(16)"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=top, env=environment, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_a_plan_shards_50257_tokens_on_16_devices() -> None:
    """The price counts the padding: a device has a sixteenth of 50,304 rows."""
    shapes = f32(TOKENS, 512), jax.ShapeDtypeStruct((4096,), "int32")
    options: dict[str, Any] = {"mesh": "a=16", "hardware": "tpu-v5e"}
    plan = toast.plan(loss, *shapes, uneven=0.1, **options)
    even = toast.plan(loss, *shapes, uneven=0, **options)
    assert "padded, as the axes do not divide them: embedding:0 from 50,257 to 50,304" in plan.note
    assert plan.after.step_seconds < even.after.step_seconds
    assert "tensor<3144x512xf32>" in plan.lowered().text
