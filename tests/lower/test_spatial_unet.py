"""GShard 4.4 and A.4: images larger than the batch are sharded along space, here in a U-Net."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from toast import api
from toast.hardware import Mesh, load
from toast.models import unet

LARGE = unet.UNetConfig(
    channels=64, multipliers=(1, 2, 4), blocks=1, heads=8, groups=8, image=512, batch=2
)
SMALL = unet.UNetConfig(
    channels=8, multipliers=(1, 2), blocks=1, heads=4, groups=4, image=16, batch=2, dtype="float32"
)


def arguments(config: unet.UNetConfig) -> Any:
    images = jax.ShapeDtypeStruct((config.batch, config.image, config.image, 3), jnp.float32)
    return (
        unet.parameter_shapes(config),
        images,
        images,
        jax.ShapeDtypeStruct((config.batch,), "f4"),
    )


def gradients(config: unet.UNetConfig) -> Any:
    return jax.value_and_grad(functools.partial(unet.loss, config))


@pytest.mark.parametrize("lowering", ["xla", "local"])
def test_gshard_4_4_the_search_shards_space_if_the_batch_is_smaller_than_the_mesh(
    lowering: str,
) -> None:
    """No pin says so: the price does.  Neighbours exchange the edges of their shards (A.4)."""
    options: dict[str, Any] = {
        "hardware": "tpu-v5e", "lowering": lowering, "settings": toast.Settings(rounds=1),
    }  # fmt: skip
    plan = toast.plan(gradients(LARGE), *arguments(LARGE), mesh="data=2,space=4", **options)
    assert plan.arguments["images"] == (("data",), ("space",), (), ())
    assert any(axes == ("space",) for _, axes, _ in plan.model.edges(plan.state))
    of_batch = toast.plan(gradients(LARGE), *arguments(LARGE), mesh="data=2", **options)
    assert plan.after.step_seconds < 0.3 * of_batch.after.step_seconds
    assert plan.after.peak_bytes < 0.4 * of_batch.after.peak_bytes


@pytest.mark.parametrize(
    ("mesh", "lowering"), [("data=2,space=4", "local"), ("space=8", "local"), ("space=8", "xla")]
)
def test_gshard_a_4_images_in_parts_equal_one_device(mesh: str, lowering: str) -> None:
    random = np.random.default_rng(0)
    inputs = jax.tree.map(
        lambda s: (0.1 * random.normal(size=s.shape) + (s.ndim < 2)).astype("f4"), arguments(SMALL)
    )
    spec = "P('data', 'space')" if "data" in mesh else "P(None, 'space')"
    analysis = toast.analyze(gradients(SMALL), *arguments(SMALL), lowering=lowering)
    hardware = api.small_scale(analysis, Mesh.parse(mesh), load("tpu-v5e"))
    plan = toast.plan(
        analysis, mesh=mesh, hardware=hardware,
        settings=toast.Settings(rounds=1),
        constraints=toast.Constraints(pin={"images": spec, "noise": spec}),
    )  # fmt: skip
    expected, results = jax.jit(gradients(SMALL))(*inputs), plan.jit()(*inputs)
    for result, value in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
        scale = float(np.abs(value).max())
        np.testing.assert_allclose(result, value, rtol=0, atol=1e-5 * scale)
    if lowering == "local":
        local = plan.lowered()
        assert not local.gathered
        assert local.counts() == plan.model.local_collectives(plan.state)
        assert any(each.edges and each.axes == ("space",) for each in local.collectives)
