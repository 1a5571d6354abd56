"""Which ops are in branches of conditionals, and how often these run."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import toast
from toast.cost.conditionals import branch_runs

STEPS, INNER = 7, 5


def loop(body: Any, x: Any, flags: Any) -> Any:
    return jax.lax.scan(lambda state, flag: (body(state, flag), None), x, flags)[0]


def alone(x: Any, weight: Any, flags: Any) -> Any:
    return loop(
        lambda x, flag: jax.lax.cond(flag > 0, lambda x: x @ weight, lambda x: x * 2, x), x, flags
    )


def with_a_loop(x: Any, weight: Any, flags: Any) -> Any:
    def branch(x: Any) -> Any:
        return jax.lax.fori_loop(0, INNER, lambda _, x: x @ weight, x)

    return loop(lambda x, flag: jax.lax.cond(flag > 0, branch, lambda x: x * 2, x), x, flags)


def before(x: Any, weight: Any, flags: Any) -> Any:
    def body(x: Any, flag: Any) -> Any:
        y = x @ weight
        return jax.lax.cond(flag > 0, lambda x: y + x, lambda x: y - x, x)

    return loop(body, x, flags)


def after(x: Any, weight: Any, flags: Any) -> Any:
    def body(x: Any, flag: Any) -> Any:
        return jax.lax.cond(flag > 0, lambda x: x + 1, lambda x: x - 1, x) @ weight

    return loop(body, x, flags)


def nested(x: Any, weight: Any, flags: Any) -> Any:
    def inner(x: Any) -> Any:
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ weight, lambda x: x + 1, x)

    return loop(lambda x, flag: jax.lax.cond(flag > 0, inner, lambda x: x * 2, x), x, flags)


def shared_by_inner(x: Any, weight: Any, flags: Any) -> Any:
    def outer(x: Any) -> Any:
        y = x @ weight
        return jax.lax.cond(x[0, 0] > 0, lambda x: y + x, lambda x: y - x, x)

    return loop(lambda x, flag: jax.lax.cond(flag > 0, outer, lambda x: x * 2, x), x, flags)


def two_results(x: Any, weight: Any, flags: Any) -> Any:
    def body(x: Any, flag: Any) -> Any:
        y = x @ weight
        left, right = jax.lax.cond(flag > 0, lambda x: (y, x), lambda x: (x, y), x)
        return left - right

    return loop(body, x, flags)


@pytest.mark.parametrize(
    ("function", "runs"),
    [
        (alone, STEPS), (with_a_loop, STEPS), (before, 0), (after, 0), (nested, STEPS),
        (two_results, 0), (shared_by_inner, STEPS),
    ],
)  # fmt: skip
def test_the_branch_around_a_product(function: Any, runs: int) -> None:
    arguments = (
        jax.ShapeDtypeStruct((8, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32"),
        jax.ShapeDtypeStruct((STEPS,), "int32"),
    )  # fmt: skip
    program = toast.analyze(function, *arguments, platform="tpu", cache=False).program
    found = branch_runs(program)[list(program.kinds).index("dot_general")]
    assert found == runs


def test_a_program_without_conditionals() -> None:
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    assert not branch_runs(toast.analyze(lambda x: x @ x, x, cache=False).program).any()
