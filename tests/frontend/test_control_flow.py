"""Loops and branches stand in line: trip counts, ties, joins; and they run sharded."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import toast
from tests.helpers import f32
from toast import api
from toast.hardware import Mesh, load
from toast.models import transformer
from toast.program import Program
from toast.report import missing_rules


def kinds(program: Program) -> list[str]:
    return [program.kind(op) for op in range(len(program.ops))]


def scan(ws: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0]


def trips(program: Program) -> set[Any]:
    return {s.attribute("trip_count") for s in program.signatures if s.kind == "carry"}


def test_a_scan_is_carry_body_yield() -> None:
    program = api.program_of(scan, f32(6, 8, 8), f32(4, 8))
    found = kinds(program)
    # The counter and c are carried; the stacked weights go round unchanged.
    assert found.count("carry") == found.count("yield") == 2
    assert trips(program) == {6}
    assert [program.kind(op) for op, _ in program.ties] == ["yield"] * 2
    (dot,) = [op for op, kind in enumerate(found) if kind == "dot_general"]
    assert program.repeats[dot] == 6
    assert program.repeats[found.index("carry")] == 1
    assert "while" not in found


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: lax.fori_loop(0, 5, lambda i, c: c * 2.0 + i, x), 5),
        (lambda x: lax.fori_loop(3, 11, lambda i, c: c * 2.0 + i, x), 8),
        (lambda x: lax.scan(lambda c, _: (c * 2.0, c), x, length=7)[1], 7),
        (lambda x: lax.while_loop(lambda c: c[0] < 9.0, lambda c: c * 2.0, x), -1),
    ],
)
def test_trip_counts(function: Any, count: int) -> None:
    assert trips(api.program_of(function, f32(16))) == {count}


def test_loops_without_a_count_are_noted() -> None:
    analysis = toast.analyze(
        lambda x: lax.while_loop(lambda c: c[0] < 9.0, lambda c: c * 2.0, x), f32(16)
    )
    (note,) = missing_rules(analysis)
    assert note.startswith("trip count unknown: loop 0 at ")
    assert "test_control_flow.py" in note


def test_nested_loops_multiply() -> None:
    def f(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, c: lax.fori_loop(0, 4, lambda _, d: jnp.sin(d), c), x)

    program = api.program_of(f, f32(16))
    (sine,) = [op for op, kind in enumerate(kinds(program)) if kind == "sine"]
    assert program.repeats[sine] == 12


def test_carried_values_have_one_color() -> None:
    analysis = toast.analyze(scan, f32(6, 8, 8), f32(4, 8))
    names, program = analysis.names, analysis.program
    for op, other in program.ties:
        value, carried = program.ops[op].results[0], program.ops[other].results[0]
        one = analysis.color[names.def_name[names.value_dim[value] : names.value_dim[value + 1]]]
        two = analysis.color[
            names.def_name[names.value_dim[carried] : names.value_dim[carried + 1]]
        ]
        assert (one == two).all()


def test_branches_join() -> None:
    def f(p: jax.Array, x: jax.Array) -> jax.Array:
        return lax.switch(p, [lambda x: x * 2.0, lambda x: x + 1.0, jnp.sin], x)

    program = api.program_of(f, jax.ShapeDtypeStruct((), jnp.int32), f32(16, 4))
    found = kinds(program)
    join = program.ops[found.index("join")]
    assert len(join.operands) == 3
    assert toast.analyze(program).without_rule == ()


def test_checkpointed_values_pass_a_barrier_one_by_one() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w)))(x, w).sum()

    program = api.program_of(jax.grad(f, argnums=(0, 1)), f32(8, 4), f32(4, 16))
    assert kinds(program).count("optimization_barrier") == 3
    assert toast.analyze(program).without_rule == ()


def test_loops_survive_a_round_trip_through_facts(tmp_path: Any) -> None:
    analysis = toast.analyze(scan, f32(6, 8, 8), f32(4, 8))
    path = tmp_path / "scan.lp"
    path.write_text(analysis.facts.to_lp())
    again = toast.analyze(path)
    assert again.program.ties == analysis.program.ties
    assert again.program.repeats == analysis.program.repeats
    assert (again.color == analysis.color).all()


def recurrent(ws: jax.Array, x: jax.Array, p: jax.Array) -> tuple[jax.Array, jax.Array]:
    def body(c: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = lax.cond(p > 3, lambda c: jnp.tanh(c @ w), lambda c: c @ w.T, c)
        return c, c.sum(axis=1)

    return lax.scan(body, x, ws)


def test_loops_and_branches_run_sharded() -> None:
    program = api.program_of(
        recurrent, f32(3, 64, 64), f32(32, 64), jax.ShapeDtypeStruct((), "int32")
    )
    analysis = toast.analyze(program)
    mesh = Mesh.parse("d=4,m=2")
    plan = toast.plan(
        analysis, mesh=mesh, hardware=api.small_scale(analysis, mesh, load("tpu-v5e"))
    )
    assert plan.shardings.values
    assert plan.verify().equal


@pytest.fixture(scope="module")
def scanned() -> dict[int, toast.Analysis]:
    configs = {n: dataclasses.replace(transformer.T2B, layers=n, scanned=True) for n in (2, 18)}
    return {n: toast.analyze(transformer.model(c, "scanned")) for n, c in configs.items()}


def test_scanned_layers_cost_the_analysis_nothing(scanned: dict[int, toast.Analysis]) -> None:
    few, many = (scanned[n].counts() for n in (2, 18))
    assert few == many


def test_scanned_and_unrolled_forms_get_equivalent_plans(
    scanned: dict[int, toast.Analysis],
) -> None:
    """The same sharding of nearly every parameter, behind the layers' own dimension.

    The memory limit binds neither: where it does, the scan's peak is another than the unrolled one.
    """
    config = dataclasses.replace(transformer.T2B, layers=2)
    forms = {
        False: toast.analyze(transformer.model(config, "unrolled")),
        True: scanned[2],
    }
    plans = {
        form: toast.plan(analysis, mesh="data=4,model=4", hardware="tpu-v5e")
        for form, analysis in forms.items()
    }
    one, other = plans[False].after, plans[True].after
    assert one.matmul_seconds == pytest.approx(other.matmul_seconds, rel=0.02)
    assert one.step_seconds == pytest.approx(other.step_seconds, rel=0.15)
    assert one.argument_bytes == pytest.approx(other.argument_bytes, rel=0.15)


def test_scanned_train_step_runs_sharded() -> None:
    config = dataclasses.replace(transformer.TINY, scanned=True)
    analysis = toast.analyze(transformer.model(config, "scanned"))
    mesh = Mesh.parse("data=4,model=2")
    plan = toast.plan(
        analysis, mesh=mesh, hardware=api.small_scale(analysis, mesh, load("tpu-v5e"))
    )
    found = plan.verify()
    assert all(output.relative_error <= 1e-5 for output in found.outputs)
