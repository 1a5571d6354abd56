"""The devices of this machine as the reference; CPU devices stand for GPUs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import toast
from toast.errors import HardwareError, PlanError
from toast.evaluation.compare import compare
from toast.evaluation.validate import summary, validate
from toast.hardware import Hardware, Mesh, load


def cpu() -> Hardware:
    """A hardware file of this machine's devices."""
    kind = jax.devices("cpu")[0].device_kind
    return dataclasses.replace(load("p100"), name="box", platform="cpu", device_kind=kind)


def mlp() -> toast.Analysis:
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return toast.analyze(lambda a, b: jnp.tanh(a @ b) @ b, shape, shape)


def test_plans_are_compiled_and_timed() -> None:
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    validation = validate(mlp(), Mesh.parse("x=2"), cpu(), oracle="gpu", plans=1)
    assert not any(row.error for row in validation.rows)
    assert all(row.scheduled_seconds > 0 for row in validation.rows)
    assert all(abs(row.argument_error) < 1e-3 for row in validation.rows)
    assert "arguments exact" in summary(validation)


def test_plans_of_all_methods_are_compiled_and_timed() -> None:
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    rows = compare(mlp(), Mesh.parse("x=2"), cpu(), ["toast", "shardy"], oracle="gpu")
    verdicts = [row.verdict for row in rows]
    assert all(v and v.schedule and v.schedule.seconds > 0 for v in verdicts)


def test_other_devices_are_refused() -> None:
    with pytest.raises(HardwareError, match="h100 describes NVIDIA H100 80GB HBM3, but JAX found"):
        validate(mlp(), Mesh.parse("x=2"), load("h100"), oracle="gpu")
    with pytest.raises(HardwareError, match="h100 describes NVIDIA H100 80GB HBM3, but JAX found"):
        compare(mlp(), Mesh.parse("x=2"), load("h100"), oracle="gpu")
    with pytest.raises(HardwareError, match="tpu-v5e is not a GPU; use --oracle tpu"):
        validate(mlp(), Mesh.parse("x=2"), load("tpu-v5e"), oracle="gpu")
    with pytest.raises(
        PlanError, match=r"mesh x=512 needs 512 devices, but there are \d+ cpu here"
    ):
        validate(mlp(), Mesh.parse("x=512"), cpu(), oracle="gpu")
