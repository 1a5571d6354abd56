"""What JAX has traced, lowered or exported, other platforms, and static arguments."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import toast
from tests.helpers import f32
from toast import api
from toast.errors import PlanError, TargetError

MESH: dict[str, Any] = {"mesh": "data=4", "hardware": "tpu-v5e"}


@functools.partial(jax.jit, static_argnames="times", donate_argnums=0)
def step(params: dict[str, jax.Array], x: jax.Array, *, times: int = 2) -> Any:
    return jnp.tanh(params["w"] @ x) * times, params["w"] + 1.0


SHAPES = {"unused": f32(3), "w": f32(64, 64)}, f32(64, 128)
TRACED = step.trace(*SHAPES, times=3)


def arrays() -> tuple[Any, ...]:
    filled: tuple[Any, ...] = jax.tree.map(lambda s: jnp.full(s.shape, 0.01), SHAPES)
    return filled


def exported(*platforms: str) -> Any:
    return jax.export.export(step, platforms=platforms or None)(*SHAPES, times=3)


@pytest.mark.parametrize(
    ("stage", "platform"),
    [
        (TRACED, None),
        (TRACED, "tpu"),
        (TRACED.lower(), None),
        (exported(), None),
        (exported("tpu", "cuda", "cpu"), "cpu"),
        (exported("tpu", "cuda", "cpu"), "tpu"),
    ],
)
def test_stages_run_like_their_function(stage: Any, platform: str | None) -> None:
    plan = toast.plan(stage, platform=platform, **MESH)
    program = plan.analysis.program
    assert program.arguments == ("params['w']", "x")
    assert program.donated == {0}
    assert program.platform == platform or (platform is None and program.platform)
    assert "case" not in {program.kind(op) for op in range(len(program.ops))}
    expected = step(*arrays(), times=3)
    for actual, wanted in zip(plan.jit()(*arrays()), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-6)
    params, _ = plan.in_shardings
    assert params["unused"] == jax.sharding.PartitionSpec()


def test_a_lowered_function_stays_as_it_is() -> None:
    lowered = jax.jit(lambda x: jax.jit(jnp.tanh)(x) + 1.0).lower(f32(8))
    before = lowered.as_text()
    api.program_of(lowered)
    assert lowered.as_text() == before


@pytest.mark.parametrize(
    ("stage", "platform", "message"),
    [
        (exported("tpu", "cpu"), None, r"for several platforms \(tpu, cpu\); pass one of them"),
        (exported("tpu"), "cpu", "platform 'cpu': it is exported for tpu; use one of these"),
        (TRACED.lower(lowering_platforms=("tpu", "cpu")), None, "is lowered for several platforms"),
        (TRACED.lower(lowering_platforms=("tpu",)), "cpu", r"lowering_platforms=\('cpu',\)"),
        (TRACED, "gpu", "platform 'gpu': JAX does not lower for it; use one of cpu, cuda"),
    ],
)
def test_which_platform(stage: Any, platform: str | None, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        api.program_of(stage, platform=platform)


def test_arguments_of_a_stage_are_its_own() -> None:
    with pytest.raises(TargetError, match="1 more arguments: has no effect for a target of type"):
        api.program_of(TRACED, f32(4))


def kernel(x: jax.Array) -> jax.Array:
    def double(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = 2 * x_ref[...]

    called = pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))
    return jnp.tanh(called(x))


def test_kernels_of_a_platform_that_is_not_here() -> None:
    with pytest.raises(TargetError, match=r'pass platform="tpu" or "cuda" \(--platform\)'):
        api.program_of(kernel, f32(256, 256))
    program = api.program_of(kernel, f32(256, 256), platform="tpu")
    (call,) = (s for s in program.signatures if s.kind == "custom_call")
    assert call.attribute("call_target_name") == "tpu_custom_call"
    plan = toast.plan(program, **MESH)
    with pytest.raises(PlanError, match="was lowered for tpu, and cpu cannot run it"):
        plan.jit()(jnp.ones((256, 256)))


def test_the_platform_is_part_of_the_hash() -> None:
    here, there = (api.program_of(jnp.tanh, f32(8), platform=p) for p in ("cpu", "tpu"))
    assert here.ops == there.ops
    assert here.digest != there.digest


def test_a_platform_that_is_an_argument() -> None:
    program = api.program_of(lambda x, platform: x + platform, f32(8), platform=f32(8))
    assert program.arguments == ("x", "platform")


def test_files_have_their_platform(tmp_path: Any) -> None:
    path = tmp_path / "step.mlir"
    path.write_text(TRACED.lower().as_text())
    with pytest.raises(TargetError, match="platform: has no effect for a target of type"):
        api.program_of(path, platform="tpu")


def test_static_arguments_of_a_plan() -> None:
    plan = toast.plan(step, *SHAPES, times=3, **MESH)
    with_static = plan.jit()(*arrays(), times=3)
    without = plan.jit()(*arrays())
    np.testing.assert_array_equal(with_static[0], without[0])
    with pytest.raises(PlanError, match=r"was planned with the static times = 3, got 4"):
        plan.jit()(*arrays(), times=4)


def test_static_arguments_that_cannot_be_pickled() -> None:
    function = jax.jit(lambda x, by: by(x), static_argnames="by")
    program = api.program_of(function, f32(8), by=lambda x: x + 1.0)
    again = pickle.loads(pickle.dumps(program))
    assert again.source.calling.in_tree == program.source.calling.in_tree
    assert not again.source.calling.static


@pytest.mark.parametrize("dtype", ["int4", "uint2", "float4_e2m1fn", "float8_e4m3fn"])
def test_small_element_types(dtype: str) -> None:
    small = jax.ShapeDtypeStruct((64, 64), jnp.dtype(dtype))
    plan = toast.plan(lambda x, w: x.astype(jnp.float32) @ w, small, f32(64, 64), **MESH)
    (output,) = plan.verify().outputs
    assert output.equal
    assert output.magnitude > 0.1


def test_a_plan_that_does_not_fit_says_so() -> None:
    plan = toast.plan(lambda x: jnp.tanh(x) @ x, f32(2**17, 2**17), **MESH)
    assert not plan.fits
    assert plan.note.startswith("does not fit: the plan needs ")


def test_captured_arrays_count() -> None:
    table = jnp.arange(1024.0 * 1024).reshape(1024, 1024)
    shapes = f32(64, 1024)
    one = toast.plan(lambda x: x @ table, shapes, **MESH)
    other = toast.plan(lambda x: x @ jnp.ones((1024, 1024)), shapes, **MESH)
    assert one.after.peak_bytes - other.after.peak_bytes == 4 * 2**20
    assert one.timeline.peak_bytes == one.after.peak_bytes
    assert one.note == (
        "captured arrays: every device holds 4 MiB whole: f32[1024,1024] (4 MiB); pass them as "
        "arguments to shard them"
    )
    assert other.note == ""


def test_unused_arguments_are_named() -> None:
    plan = toast.plan(lambda a, b, c: b + 1.0, f32(8), f32(8), f32(8), **MESH)
    assert plan.note == "unused arguments: a, c"
