"""Dimensions that the axes do not divide: the note says which to pad, and what that gains."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.helpers import f32
from toast.cost import CostModel
from toast.plan import may_gain, padded
from toast.space import Space


def loss(embedding: Any, w: Any, ids: Any) -> Any:
    hidden = jax.nn.relu(embedding[ids] @ w)
    return -jax.nn.log_softmax(hidden @ embedding.T)[..., 0].mean()


def train_step(words: int, mesh: str = "model=16", **options: Any) -> toast.Plan:
    options = {"uneven": 0, **options}
    ids = jax.ShapeDtypeStruct((8, 1024), jnp.int32)
    step = jax.grad(loss, argnums=(0, 1))
    return toast.plan(
        step, f32(words, 256), f32(256, 256), ids, mesh=mesh, hardware="tpu-v5e", **options
    )


def test_vocabularies_to_pad_are_named() -> None:
    plan, larger = train_step(50257), train_step(50304)
    (note,) = plan.note.splitlines()
    assert note.startswith(
        "the axes do not divide some dimensions: embedding:0 has 50,257 elements; pad it to 50,304. A plan"
    )
    seconds = re.search(r"about ([\d.]+) ms per step instead of ([\d.]+) ms", note)
    assert seconds
    assert float(seconds[2]) == pytest.approx(1e3 * plan.after.step_seconds, rel=1e-2)
    assert float(seconds[1]) == pytest.approx(1e3 * larger.after.step_seconds, rel=0.1)
    assert larger.note == ""


def test_small_or_divided_dimensions_need_no_padding() -> None:
    mesh = toast.hardware.Mesh.parse("model=16")
    for shape in ((50304, 512), (100, 24), (4096, 1)):
        analysis = toast.analyze(lambda x: jnp.tanh(x), f32(*shape))
        assert padded(analysis, mesh) is None
    analysis = toast.analyze(lambda x: jnp.tanh(x), f32(50257, 24))
    larger = padded(analysis, mesh)
    assert larger is not None
    assert sorted({*larger.names.divisor.tolist()}) == [24, 50304]
    # Two devices need an even number only; the tile of 128 elements is padded to anyway.
    assert (
        padded(toast.analyze(lambda x: x * 2, f32(50258)), toast.hardware.Mesh.parse("d=2")) is None
    )


@pytest.mark.parametrize(
    ("size", "mesh", "to"),
    [
        (50257, "a=16,b=16", 50432),  # 197 * 256: both axes together
        (50257, "a=6,b=6", 50688),  # tiles of 128 for 36 devices
        (1000, "a=16,b=16", 1008),  # one axis: 1,024 would add 2.4 %
        (50272, "a=16,b=16", 50432),  # an axis divides it, but not both
    ],
)
def test_all_axes_together_divide_the_new_size(size: int, mesh: str, to: int) -> None:
    analysis = toast.analyze(lambda x: jnp.tanh(x), f32(size))
    larger = padded(analysis, toast.hardware.Mesh.parse(mesh))
    assert larger is not None
    assert {*larger.names.divisor.tolist()} == {to}


def test_no_note_if_padding_gains_little_or_no_time_is_left() -> None:
    plan = toast.plan(lambda x, y: x + y[None], f32(512, 50257), f32(50257), mesh="d=16",
                      hardware="tpu-v5e", uneven=0)  # fmt: skip
    assert plan.note == ""
    assert "do not divide" not in train_step(50257, settings=toast.Settings(budget=0.0)).note


def test_a_budget_leaves_time_for_the_note() -> None:
    """The plan and the note are those without a budget, if it suffices for both."""
    plan = train_step(50257, settings=toast.Settings(budget=600.0))
    assert plan.note == train_step(50257).note
    assert plan.note.startswith("the axes do not divide some dimensions: embedding:0 has 50,257")


def test_padding_is_not_searched_if_the_lower_bound_excludes_a_gain() -> None:
    plan = train_step(50257)
    larger = padded(plan.analysis, plan.mesh)
    assert larger is not None
    model = CostModel(Space(larger, plan.mesh), plan.hardware, like=plan.model)
    assert model.tables.use_class is plan.model.tables.use_class  # not gathered again
    least = model.quick_bound / model.initial_seconds
    assert may_gain(model, plan.cost)
    assert not may_gain(model, 1.05 * least)
    assert may_gain(model, 1.06 * least)
