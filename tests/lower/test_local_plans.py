"""Plans for device-local programs: what XLA computes wrongly may be sharded."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import random_states
from tests.lower.test_lowering import assert_as_predicted
from toast.cost import CostModel
from toast.errors import PlanError
from toast.hardware import Mesh, load
from toast.plan.shard import lowered_state
from toast.space import Space


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def convolution(x: jax.Array, w: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), [(1, 1), (1, 1)], dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )  # fmt: skip


def gradients(**options: int) -> Any:
    return jax.grad(lambda x, w: (convolution(x, w, **options) ** 3).sum(), (0, 1))


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"groups": 4}], ids=str)
def test_space_and_features_are_sharded_at_once(options: dict[str, int]) -> None:
    inputs = 4 // options.get("groups", 1)
    analysis = toast.analyze(
        gradients(**options), f32(2, 16, 16, 4), f32(3, 3, inputs, 8), lowering="local"
    )
    assert not any(rule.excludes or rule.whole_mesh for rule in analysis.rules)
    model = CostModel(Space(analysis, Mesh.parse("a=2,b=2")), load("tpu-v5e"))
    for state in random_states(model.space, 2, seed=1):
        assert_as_predicted(model, state, lowered_state(model, state))


def test_a_plan_says_how_it_is_lowered(tmp_path: pathlib.Path) -> None:
    shapes = f32(1, 64, 64, 8), f32(3, 3, 8, 8)
    options: dict[str, Any] = {"mesh": "a=2", "hardware": "tpu-v5e"}
    plan = toast.plan(convolution, *shapes, lowering="local", **options)
    assert plan.lowering == "local"
    random = np.random.default_rng(0)
    arrays = [random.normal(size=s.shape).astype("f4") for s in shapes]
    expected = convolution(*map(jnp.asarray, arrays))
    np.testing.assert_allclose(plan.jit()(*arrays), expected, rtol=1e-4, atol=1e-4)
    for run in (
        lambda: plan.jit(lowering="xla"), lambda: plan.verify(lowering="xla"), plan.annotated
    ):  # fmt: skip
        with pytest.raises(PlanError, match=r"is for device-local programs"):
            run()
    path = tmp_path / "plan.json"
    path.write_text(plan.json_text())
    assert json.loads(path.read_text())["lowering"] == "local"
    applied = toast.apply_plan(path, convolution, *shapes).plan
    assert (applied.lowering, applied.arguments) == ("local", plan.arguments)
    with pytest.raises(PlanError, match="use xla or local"):
        toast.plan(convolution, *shapes, lowering="gspmd", **options)
