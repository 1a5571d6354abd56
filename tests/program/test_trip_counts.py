"""Numbers of iterations of loops that a program does not state."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import f32
from toast import api
from toast.errors import TargetError
from toast.program import Program, uncounted_loops, with_trip_counts

HERE = pathlib.Path(__file__).name


def fixed_points(w: Any, x: Any) -> Any:
    """Two loops until convergence; a loop of three iterations is inside the first."""

    def inner(_: Any, state: Any) -> Any:
        return jnp.tanh(state @ w)

    def more(state: Any) -> Any:
        return jnp.abs(state[0] - state[1]).max() > 1e-3

    def step(state: Any) -> Any:
        return jax.lax.fori_loop(0, 3, inner, state[0]), state[0]

    first, _ = jax.lax.while_loop(more, step, (x, x + 1))
    return jax.lax.while_loop(lambda y: jnp.abs(y).max() > 1, lambda y: y @ w.T, first)


SHAPES = f32(32, 32), f32(64, 32)


def products(program: Program) -> list[int]:
    return [program.repeats[o] for o in range(len(program.ops)) if program.kind(o) == "dot_general"]


def test_a_loop_is_counted_once() -> None:
    program = api.program_of(fixed_points, *SHAPES)
    first, _ = uncounted_loops(program)
    with pytest.raises(TargetError, match="5 iterations, but another key states 7 for loop 0"):
        with_trip_counts(program, {first.place: 7, "0": 5})


def test_loops_are_counted_as_stated() -> None:
    program = api.program_of(fixed_points, *SHAPES)
    first, second = uncounted_loops(program)
    assert products(program) == [3, 1]
    assert products(with_trip_counts(program, {first.place: 7})) == [21, 1]
    line = second.place.rpartition(":")[2]
    assert products(with_trip_counts(program, {f"{HERE}:{line}": 5, "0": 2})) == [6, 5]
    counted = with_trip_counts(program, 10)
    assert with_trip_counts(program, np.int64(10)) == counted
    assert products(counted) == [30, 10]
    assert uncounted_loops(counted) == ()
    assert with_trip_counts(program, None) is program
    # Ops outside, and what the loops carry, run as often as before.
    carries = [o for o in range(len(program.ops)) if program.kind(o) in ("carry", "yield")]
    assert {program.repeats[o] for o in carries} == {1}
    assert [counted.repeats[o] for o in carries if program.repeats[o] != counted.repeats[o]]
    assert counted.digest != program.digest


def test_plans_price_the_stated_iterations() -> None:
    options: dict[str, Any] = {"mesh": "d=4", "hardware": "tpu-v5e"}
    once = toast.plan(fixed_points, *SHAPES, **options)
    assert once.note.count("trip count unknown: loop ") == 2
    assert f"{HERE}:" in once.note
    assert "state it with trip_counts={" in once.note
    often = toast.plan(fixed_points, *SHAPES, trip_counts=100, **options)
    assert "trip count" not in often.note
    assert often.before.step_seconds > 20 * once.before.step_seconds
    assert often.verify().equal


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"other.py:1": 3}, r"trip_counts other.py:1: fixed_points has no loop there whose trip count "
         r"is unknown; these are 0 \(.*test_trip_counts.py:\d+\)"),
        ({"2": 3}, "trip_counts 2: fixed_points has no loop there"),
        ({"0": 0}, "trip_counts 0: 0 is not a number of iterations from 1 to"),
        ({"0": 1.5}, "trip_counts 0: 1.5 is not a number"),
        ({"0": 2**31, "1": 2**31}, ""),
    ],
)  # fmt: skip
def test_impossible_counts_are_refused(counts: Any, message: str) -> None:
    program = api.program_of(fixed_points, *SHAPES)
    if not message:
        with_trip_counts(program, counts)
        return
    with pytest.raises(TargetError, match=message):
        with_trip_counts(program, counts)


def test_programs_without_such_loops_take_no_counts() -> None:
    with pytest.raises(TargetError, match="whose trip count is unknown: it states them all"):
        toast.analyze(lambda x: x * 2, f32(4), trip_counts=3)


def test_an_argument_that_only_a_condition_uses_is_used() -> None:
    def halved(x: Any, count: Any, idle: Any) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, y: y / 2, x)

    plan = toast.plan(halved, f32(8), i32(), f32(2), mesh="x=2", hardware="tpu-v5e")
    assert plan.note.splitlines()[0] == "unused arguments: idle"


def i32() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jnp.int32)
