"""Kernels that ask for the kind of device while they are traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.helpers import f32
from toast.errors import TargetError
from toast.hardware import load
from toast.ports import HardwarePlatform


def asking(x: Any) -> Any:
    """A function that has one form for each kind of device, and none for CPUs."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        raise NotImplementedError("unknown device")
    return x * {"TPU v5 lite": 2.0, "TPU v5": 3.0}[device.device_kind] * device.num_cores


@pytest.mark.parametrize("hardware", ["tpu-v5e", "tpu-v5p"])
def test_a_function_is_traced_for_the_kind_of_device(hardware: str) -> None:
    plan = toast.plan(asking, f32(8), mesh="data=2", hardware=hardware)
    factor = {"tpu-v5e": 2.0, "tpu-v5p": 6.0}[hardware]
    assert float(plan.jit()(jnp.ones(8))[0]) == factor


def test_errors_are_those_of_the_first_trace() -> None:
    with pytest.raises(TargetError, match="NotImplementedError: unknown device"):
        toast.plan(asking, f32(8), mesh="data=2", hardware="h100")
    with pytest.raises(TargetError, match="NotImplementedError: unknown device"):
        toast.analyze(asking, f32(8))


@pytest.mark.parametrize(("hardware", "size"), [("h100", 64), ("h100", 256), ("a100", 64)])
def test_fused_attention_of_cudnn(hardware: str, size: int) -> None:
    """JAX asks for the version of cuDNN, and for the capability of the GPU."""

    def attend(*heads: Any) -> Any:
        attended = jax.nn.dot_product_attention(*heads, is_causal=True, implementation="cudnn")
        return attended.astype(jnp.float32).sum()

    heads = [jax.ShapeDtypeStruct((2, 1024, 8, size), jnp.bfloat16)] * 3
    plan = toast.plan(attend, *heads, mesh="data=2", hardware=hardware)
    program = plan.analysis.program
    assert program.platform == "cuda"
    targets = {signature.attribute("call_target_name") for signature in program.signatures}
    assert "__cudnn$fmhaSoftmax" in targets
    assert not plan.analysis.without_rule
    with pytest.raises(TargetError, match="cuDNN is not detected"):
        toast.plan(attend, *heads, mesh="data=2", hardware="tpu-v5e")


def test_fused_attention_of_cudnn_needs_a_gpu_that_has_it() -> None:
    def attend(*heads: Any) -> Any:
        return jax.nn.dot_product_attention(*heads, implementation="cudnn")

    heads = [jax.ShapeDtypeStruct((2, 1024, 8, 256), jnp.bfloat16)] * 3
    with pytest.raises(TargetError, match="cuDNN is not detected"):
        toast.plan(attend, *heads, mesh="data=2", hardware="a100")


def test_ragged_paged_attention_of_pallas() -> None:
    kernels = pytest.importorskip("jax.experimental.pallas.ops.tpu.ragged_paged_attention")
    shapes = (
        jax.ShapeDtypeStruct((512, 32, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((100, 16, 16, 128), jnp.bfloat16),
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8,), (8, 16), (9,), (1,))),
    )
    attention = kernels.ragged_paged_attention
    with pytest.raises(TargetError, match="pass its block sizes, such as num_queries_per_block"):
        toast.plan(lambda *a: attention(*a), *shapes, mesh="data=2", hardware="tpu-v5e")

    def with_sizes(*arrays: Any) -> Any:
        return attention(*arrays, num_kv_pages_per_block=8, num_queries_per_block=32)

    plan = toast.plan(with_sizes, *shapes, mesh="data=2", hardware="tpu-v5e")
    assert plan.analysis.program.platform == "tpu"
    assert "custom_call" in {signature.kind for signature in plan.analysis.program.signatures}


def test_hardware_states_the_kind() -> None:
    platform = HardwarePlatform.of(load("tpu-v6e"))
    assert (platform, platform.device_kind) == ("tpu", "TPU v6 lite")
