"""Callbacks into Python run once, on whole arrays, as under ``jax.jit``."""

from __future__ import annotations

import copy
import pathlib
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import toast
from tests.helpers import f32
from toast.errors import PlanError, TargetError
from toast.report import missing_rules

SHAPES = (f32(4096, 512), f32(512, 2048))


class Recorder:
    """A function with callbacks of every kind, and what they were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def record(self, kind: str, result: Any = None) -> Any:
        def function(array: Any) -> Any:
            self.calls.append((kind, np.shape(array)))
            return None if result is None else result(np.asarray(array))

        return function

    def __call__(self, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = x @ w
        jax.debug.callback(self.record("debug"), y)
        jax.debug.print("sum {}", y.sum())
        z = jax.pure_callback(self.record("pure", np.tanh), f32(4096, 512), x)
        mean = io_callback(self.record("io", lambda a: a.mean(dtype=a.dtype)), f32(), y)
        return y + mean, z * 2


def arrays() -> list[jax.Array]:
    return [0.01 * jnp.ones(shape.shape) for shape in SHAPES]


def test_a_note_names_callbacks() -> None:
    plan = toast.plan(Recorder(), *SHAPES, mesh="b=4", hardware="tpu-v5e")
    (note,) = [line for line in plan.note.splitlines() if "callback" in line]
    assert note.startswith("callbacks into Python: tests/apply/test_callbacks.py:")
    assert "gets f32[4096,2048]" in note
    assert note.endswith(
        "one device gathers these arrays whole (72 MiB), and their time is not in the price"
    )

    def printed(x: jax.Array) -> None:
        jax.debug.print("{}", x)

    plan = toast.plan(printed, f32(8), mesh="b=4", hardware="tpu-v5e")
    assert plan.note.splitlines()[-1] == (
        "this plan cannot be run: plans run callbacks only in programs with results; return a value"
    )


def test_a_note_says_that_functions_of_another_process_are_missing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "printing.mlir"
    path.write_text(jax.jit(Recorder()).lower(*SHAPES).as_text())
    plan = toast.plan(path, mesh="b=4", hardware="tpu-v5e")
    assert "this plan cannot be run: the Python functions of its callbacks" in plan.note


@pytest.mark.parametrize("target", ["function", "traced", "lowered"])
def test_callbacks_run_once(target: str, capfd: pytest.CaptureFixture[str]) -> None:
    function = Recorder()
    plan: toast.Plan
    if target == "function":
        plan = toast.plan(function, *SHAPES, mesh="b=4", hardware="tpu-v5e")
    else:
        stage = jax.jit(function).trace(*SHAPES)
        plan = toast.plan(
            stage if target == "traced" else stage.lower(), mesh="b=4", hardware="tpu-v5e"
        )
    assert plan.steps
    assert not plan.analysis.without_rule
    y, z = jax.block_until_ready(plan.jit()(*arrays()))
    expected = [("debug", (4096, 2048)), ("io", (4096, 2048)), ("pure", (4096, 512))]
    assert sorted(function.calls) == expected
    assert capfd.readouterr().out.count("sum ") == 1
    again, _ = jax.jit(Recorder())(*arrays())
    np.testing.assert_allclose(y, again, rtol=1e-5)
    np.testing.assert_allclose(z, 2 * np.tanh(arrays()[0]), rtol=1e-5)


def test_the_report_does_not_say_that_every_device_runs_them() -> None:
    assert missing_rules(toast.analyze(Recorder(), *SHAPES)) == []


def test_callbacks_of_a_program_without_results_are_refused() -> None:
    def silent(x: jax.Array) -> None:
        jax.debug.callback(lambda total: None, x.sum())

    plan = toast.plan(silent, f32(8, 4), mesh="b=2", hardware="tpu-v5e")
    with pytest.raises(PlanError, match="only in programs with results; return a value"):
        plan.jit()(jnp.ones((8, 4)))


def test_programs_with_callbacks_are_verified() -> None:
    function = Recorder()
    plan = toast.plan(function, *SHAPES, mesh="b=4", hardware="tpu-v5e")
    assert plan.verify().equal
    assert len(function.calls) == 2 * 3  # unsharded and sharded


def test_callbacks_in_loops_run_in_every_iteration() -> None:
    seen = []

    def function(x: jax.Array) -> jax.Array:
        def body(i: Any, x: jax.Array) -> jax.Array:
            jax.debug.callback(lambda i, total: seen.append((int(i), float(total))), i, x.sum())
            return x + 1

        return jax.lax.fori_loop(0, 3, body, x)

    plan = toast.plan(function, f32(4096, 512), mesh="b=4", hardware="tpu-v5e")
    jax.block_until_ready(plan.jit()(jnp.zeros((4096, 512))))
    assert sorted(seen) == [(i, i * 4096.0 * 512) for i in range(3)]


def test_errors_of_callbacks_are_raised() -> None:
    def checked(x: jax.Array) -> jax.Array:
        def check(bad: Any) -> None:
            if bad:
                raise ValueError("negative")

        jax.debug.callback(check, (x < 0).any())
        return x * 2

    run = toast.plan(checked, f32(4096, 512), mesh="b=4", hardware="tpu-v5e").jit()
    np.testing.assert_allclose(run(jnp.ones((4096, 512)))[0, 0], 2)
    with pytest.raises(Exception, match="negative"):
        jax.block_until_ready(run(-jnp.ones((4096, 512))))


def test_callbacks_of_other_processes_are_refused(tmp_path: pathlib.Path) -> None:
    plan = toast.plan(Recorder(), *SHAPES, mesh="b=4", hardware="tpu-v5e")
    remedy = r"custom_call @xla_ffi_python_cpu_callback .* calls a Python function of the process"
    copies = [pickle.loads(pickle.dumps(plan)), copy.copy(plan)]
    path = tmp_path / "printing.mlir"
    path.write_text(jax.jit(Recorder()).lower(*SHAPES).as_text())
    copies[1:] = [toast.plan(path, mesh="b=4", hardware="tpu-v5e")]
    for other in copies:
        with pytest.raises(PlanError, match=remedy):
            other.jit()
        with pytest.raises(PlanError, match="plan the function itself"):
            other.verify()


def test_ordered_effects_are_refused(tmp_path: pathlib.Path) -> None:
    def function(x: jax.Array) -> jax.Array:
        return x + io_callback(lambda a: a, f32(64, 8), x, ordered=True)

    with pytest.raises(TargetError, match="its effects are ordered, and JAX runs those on one dev"):
        toast.plan(function, f32(64, 8), mesh="b=4", hardware="tpu-v5e")
    path = tmp_path / "ordered.mlir"
    path.write_text(jax.jit(function).lower(f32(64, 8)).as_text())
    plan = toast.plan(path, mesh="b=4", hardware="tpu-v5e")
    for run in (plan.jit, plan.verify):
        with pytest.raises(PlanError, match="argument arg0 is a token: its effects are ordered"):
            run()


def test_every_device_runs_callbacks_of_regions() -> None:
    """As in JAX: a region of ``shard_map`` is code for one device."""
    seen = []
    mesh = jax.sharding.AbstractMesh((4,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("b")

    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec)
    def function(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda total: seen.append(float(total)), x.sum())
        return x + 1

    plan = toast.plan(function, f32(4096, 512), mesh="b=4", hardware="tpu-v5e")
    jax.block_until_ready(plan.jit()(jnp.ones((4096, 512))))
    assert seen == [1024 * 512.0] * 4
