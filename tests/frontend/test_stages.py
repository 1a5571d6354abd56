"""What JAX has traced, lowered or exported, other platforms, and static arguments."""

from __future__ import annotations

import functools
import pathlib
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


def solve(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.linalg.solve(a, b)


def targets_of(program: Any) -> set[Any]:
    calls = {s.attribute("call_target_name") for s in program.signatures}
    return calls - {None}


def test_a_plan_sees_the_form_for_its_hardware_and_runs_the_form_for_this_machine() -> None:
    plan = toast.plan(solve, f32(64, 64), f32(64, 128), **MESH)
    program = plan.analysis.program
    assert program.platform == "tpu"
    assert targets_of(program) == {"LuDecomposition"}
    assert program.digest == api.program_of(solve, *SOLVED, platform="tpu").digest
    here = plan.here()
    assert any("lapack" in target for target in targets_of(here.analysis.program))
    assert here.arguments == plan.arguments
    assert plan.verify().equal
    b = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    np.testing.assert_allclose(plan.jit()(2 * jnp.eye(64), b), b / 2, rtol=1e-6)
    copied = pickle.loads(pickle.dumps(plan))
    np.testing.assert_allclose(copied.jit()(2 * jnp.eye(64), b), b / 2, rtol=1e-6)
    on_gpus = toast.plan(solve, *SOLVED, mesh="data=4", hardware="h100")
    assert any("cusolver" in target for target in targets_of(on_gpus.analysis.program))


SOLVED = f32(64, 64), f32(64, 128)


def test_traced_functions_have_the_form_for_the_hardware_too() -> None:
    plan = toast.plan(jax.jit(solve).trace(*SOLVED), **MESH)
    assert plan.analysis.program.platform == "tpu"
    assert plan.verify().equal


def test_programs_without_differences_have_the_platform_of_this_machine() -> None:
    for target in (step, functools.partial(step, times=3)):
        plan = toast.plan(target, *SHAPES, **MESH)
        assert plan.analysis.program.platform == "cpu"
        assert plan.analysis.program.digest == api.program_of(target, *SHAPES).digest
        assert plan.here() is plan


def test_programs_with_composites_have_the_platform_of_this_machine() -> None:
    from toast.models import build

    program = toast.plan(build("llama3.1-8b", small=True), **MESH).analysis.program
    assert program.platform == "cpu"
    assert any(s.attribute("name") == "toast.attention" for s in program.signatures)


def attended(a: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    """Attention, whose ops are those of every platform, and a routine that has a form for each."""
    from toast.models.attention import attention

    return solve(a, attention(q, k, k).reshape(len(a), -1))


def test_composites_have_a_form_for_the_hardware() -> None:
    shapes = f32(8, 8), f32(2, 4, 2, 2, 4), f32(2, 4, 2, 4)
    plan = toast.plan(attended, *shapes, **MESH)
    program = plan.analysis.program
    assert program.platform == "tpu"
    assert any(s.attribute("name") == "toast.attention" for s in program.signatures)
    assert plan.here().analysis.program.platform == "cpu"
    random = np.random.default_rng(0)
    arrays = [random.normal(size=shape.shape).astype("f4") for shape in shapes]
    np.testing.assert_allclose(
        plan.jit()(*arrays), attended(*map(jnp.asarray, arrays)), rtol=2e-3, atol=2e-3
    )
    assert plan.verify().equal


def test_a_kernel_needs_no_platform_if_the_hardware_has_one() -> None:
    plan = toast.plan(kernel, f32(256, 256), **MESH)
    assert plan.analysis.program.platform == "tpu"
    with pytest.raises(PlanError, match="was lowered for tpu, and cpu cannot run it"):
        plan.jit()(jnp.ones((256, 256)))


def test_callbacks_are_lowered_for_this_machine() -> None:
    def printed(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x.sum())
        return solve(x, x)

    plan = toast.plan(printed, f32(64, 64), **MESH)
    assert plan.analysis.program.platform == "cpu"


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
    with pytest.raises(PlanError, match=r"pass times by name, and the others in the structure"):
        plan.jit()(*arrays(), 3)


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
    assert plan.note.splitlines()[0].endswith(
        "; use more devices or a smaller batch (toast.fit finds how many, and how small)"
    )


def test_a_train_step_that_does_not_fit_may_recompute() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: (jnp.tanh(x @ w) @ w).sum())(w)

    types = f32(2**15, 2**15), f32(2**17, 2**15)
    plan = toast.plan(step, *types, settings=toast.Settings(budget=0.0), **MESH)
    (said,) = (line for line in plan.note.splitlines() if line.startswith("does not fit"))
    assert said.endswith(
        '; use recomputation (remat="auto"), more microbatches (toast.accumulate), more devices or '
        "a smaller batch (toast.fit finds how many, and how small)"
    )


def test_captured_arrays_are_arguments() -> None:
    table = jnp.arange(1024.0 * 1024).reshape(1024, 1024) / 2**20
    inner = jax.jit(lambda x: x @ table)

    @jax.jit
    def step(x: jax.Array, *rest: jax.Array) -> jax.Array:
        looped = jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(inner(y)), x)
        return jax.lax.cond(x[0, 0] > 2, lambda: looped @ table, lambda: looped + rest[0])

    x = jnp.ones((64, 1024))
    plan = toast.plan(step, x, x, **MESH)
    program = plan.analysis.program
    assert program.arguments == ("x", "rest[0]", "captured[0]")
    assert not program.captured
    assert plan.note == (
        "captured arrays are arguments, which the plan passes itself: captured[0] (f32[1024,1024])"
    )
    assert plan.verify().equal
    run = plan.jit()
    for _ in range(2):
        np.testing.assert_allclose(run(x, x), step(x, x), rtol=1e-4)
    assert "captured[0]" in plan.arguments
    assert jax.tree.structure(plan.in_shardings) == jax.tree.structure((x, x))
    # A copy has the arrays, too.
    np.testing.assert_allclose(pickle.loads(pickle.dumps(plan)).jit()(x, x), step(x, x), rtol=1e-4)


def test_captured_arrays_can_be_sharded() -> None:
    up = (jnp.arange(2.0**22) % 7).reshape(2**10, 2**12) / 2**12
    down = up.T % 5
    layer = lambda x: jax.nn.relu(x @ up) @ down  # noqa: E731
    plan = toast.plan(layer, f32(2, 2**10), **MESH)
    assert plan.arguments["captured[0]"] == ((), ("data",))
    assert ("data",) in plan.arguments["captured[1]"]
    x = jnp.ones((2, 2**10))
    np.testing.assert_allclose(plan.jit()(x), layer(x), rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "bool", "float64"])
def test_captured_arrays_of_other_types(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        table = (jnp.arange(2**16).reshape(256, 256) % 2).astype(dtype)
        x = jnp.ones((8, 256), jnp.float32)
        plan = toast.plan(lambda x: jnp.where(x @ table > 3, 1, x), x, **MESH)
        assert plan.jit()(x).tolist() == jnp.where(x @ table > 3, 1, x).tolist()


def test_captured_arrays_of_files_are_constants(tmp_path: pathlib.Path) -> None:
    table = jnp.arange(1024.0 * 1024).reshape(1024, 1024)
    lowered = jax.jit(lambda x: x @ table).lower(f32(64, 1024))
    (tmp_path / "program.mlir").write_text(str(lowered.compiler_ir()))
    one = toast.plan(tmp_path / "program.mlir", **MESH)
    other = toast.plan(lambda x: x @ jnp.ones((1024, 1024)), f32(64, 1024), **MESH)
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
