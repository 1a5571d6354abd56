"""Constants that uses need in several shardings: a device computes its shard anew."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.helpers import f32


def zeros(x: Any, rows: Any) -> Any:
    base = jnp.zeros((64, 32))
    return base.at[rows].add(x), toast.split(base, 1, "b") + 1, toast.split(base, 0, "a") - 1


def mask(x: Any, rows: Any) -> Any:
    ones = jnp.tril(jnp.ones((64, 32)))
    return toast.split(ones, 0, "a") * x[:64], toast.split(ones, 1, "b") @ x[:32], ones


def product(x: Any, rows: Any) -> Any:
    numbers = jax.lax.broadcasted_iota(jnp.float32, (32, 64), 1)
    cut = toast.split(numbers, 0, "a") * 2
    return toast.replicate(numbers) @ toast.split(x[:64], 1, "b"), cut


def in_a_loop(x: Any, rows: Any) -> Any:
    base = toast.split(jnp.full((128, 32), 3.0), 0, ("a", "b"))

    def body(total: Any, row: Any) -> Any:
        return total + toast.split(base, 1, "a") * row, base.sum()

    return jax.lax.scan(body, x, jnp.arange(3.0))


def of_branches(x: Any, rows: Any) -> Any:
    """A branch returns constants alone, but which branch runs is no constant."""
    chosen = jax.lax.cond(rows[0] > 3, lambda: jnp.zeros((64, 32)), lambda: jnp.ones((64, 32)))
    return toast.split(chosen, 0, "a") * 2, toast.split(chosen, 1, "b") + 1


def of_regions(x: Any, rows: Any) -> Any:
    """A constant inside a manual region is that of one device."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def inner(x: Any) -> tuple[Any, Any]:
        return x * 2, jax.lax.broadcasted_iota(jnp.float32, (32, 64), 0)

    y, numbers = jax.shard_map(
        inner, mesh=mesh, in_specs=jax.P("a"), out_specs=(jax.P("a"), jax.P("a")), axis_names={"a"}
    )(x)
    return toast.split(y, 1, "b"), toast.split(numbers, 0, "b") * 2


@pytest.mark.parametrize("function", [zeros, mask, product, in_a_loop, of_branches, of_regions])
def test_no_device_sends_a_constant(function: Any) -> None:
    plan = toast.plan(
        function,
        f32(128, 32),
        jax.ShapeDtypeStruct((128,), "int32"),
        mesh="a=2,b=2",
        hardware="tpu-v5e",
        lowering="local",
    )
    local = plan.lowered()
    moved = {local.program.kind(local.program.values[c.value].op) for c in local.collectives}
    assert not moved & {"broadcast_in_dim", "iota", "constant", "composite", "select"}
    assert local.counts() == plan.model.local_collectives(plan.state)
    assert plan.verify(lowering="local").equal


def test_what_the_constant_costs_is_not_a_collective() -> None:
    """Two shardings of one mask: XLA's partitioner would send it, the local program does not."""

    def masked(x: Any) -> Any:
        ones = jnp.tril(jnp.ones((64, 64)))
        return toast.split(x * ones, 0, "a"), toast.split((x + 1) * ones, 1, "a")

    plan = toast.plan(masked, f32(64, 64), mesh="a=4", hardware="tpu-v5e", lowering="local")
    assert {t.kind for t in plan.transfers} <= {"all_to_all"}  # of x
    assert plan.lowered().counts() == plan.model.local_collectives(plan.state)
