"""Prices against numbers worked out by hand, and laws that any price must obey."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import action, analyzed, f32, mlp, model_of
from toast.cost import CostModel
from toast.hardware import COLLECTIVES, Collectives, load
from toast.space import States

#: The bytes of a short-lived value in the heap, with the gap beside it, over those of the value.
SHORT = 1 + load("tpu-v5e").heap_gaps


def apply(model: CostModel, *actions: object) -> States:
    state = model.space.initial
    for chosen in actions:
        state = model.space.apply(state, chosen)  # type: ignore[arg-type]
    return state


def collectives(model: CostModel, state: States) -> dict[str, tuple[int, float]]:
    prices = model.price(state[None])
    return {
        kind: (int(prices.collective_count[0, k]), float(prices.collective_bytes[0, k]))
        for k, kind in enumerate(COLLECTIVES)
        if prices.collective_count[0, k]
    }


@pytest.fixture(scope="module")
def figure_2() -> CostModel:
    analysis = toast.analyze(mlp, f32(256, 32), f32(32, 64), f32(64, 16))
    return model_of(analysis, "b=4,m=2")


def test_batch_partitioning_needs_no_communication(figure_2: CostModel) -> None:
    """Figure 2b."""
    state = apply(figure_2, action(figure_2.space, "x", 0, "b"))
    assert collectives(figure_2, state) == {}
    # x and the result by 4; weights whole; 64 elements of each in 128 lanes.
    elements = 256 * 32 / 4 + 32 * 64 + 64 * 16
    assert figure_2.price(state[None]).argument_bytes[0] == 4 * 2 * elements


def test_megatron_ends_in_one_all_reduce(figure_2: CostModel) -> None:
    """Figure 2c: the all-reduce is of w : [256{b}, 16]."""
    space = figure_2.space
    state = apply(figure_2, action(space, "x", 0, "b"), action(space, "w1", 1, "m"))
    assert collectives(figure_2, state) == {"all_reduce": (1, 4 * 256 / 4 * 16)}


def test_all_reduce_time_is_that_of_a_ring(figure_2: CostModel) -> None:
    space = figure_2.space
    state = apply(figure_2, action(space, "w1", 1, "m"))
    whole = 4 * 256 * 16
    ring = Collectives(load("tpu-v5e"), space.mesh).cheapest("all_reduce", whole, ["m"])
    expected = ring.seconds(whole)
    spent = figure_2.price(state[None]).collective_seconds.sum()
    np.testing.assert_allclose(spent, expected)


def test_fully_sharded_weights_are_gathered_where_used(figure_2: CostModel) -> None:
    space = figure_2.space
    state = apply(figure_2, action(space, "x", 0, "b"), action(space, "w1", 1, "b"))
    rounded = 2 * (32 * 64 + 64 * 16)  # to bf16, in which the TPU multiplies
    assert collectives(figure_2, state) == {"all_gather": (2, rounded)}


def test_gradients_of_sharded_weights_are_reduce_scattered() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    analysis = toast.analyze(step, f32(64, 32), f32(256, 64), donate=(0,))
    model = model_of(analysis, "d=4", min_dimensions=0)
    space = model.space
    state = apply(model, action(space, "x", 0, "d"), action(space, "w", 1, "d"))
    found = collectives(model, state)
    assert found["reduce_scatter"] == (1, 4 * 64 * 32 / 4)
    assert found["all_gather"] == (1, 2 * 64 * 32)  # rounded to bf16 before it is sent
    assert "all_reduce" not in found


def test_conflicting_dimensions_exchange_by_all_to_all() -> None:
    """Two resolutions of one conflict on either side of a def-use edge."""
    analysis = toast.analyze(lambda x: jnp.tanh(x @ x.T) @ x, f32(128, 32))
    model = model_of(analysis, "s=4", min_dimensions=0)
    states = [apply(model, action(model.space, "x", 0, "s", bit)) for bit in (0, 1)]
    kinds = [collectives(model, state) for state in states]
    # One side gathers x for the second product, the other reduces its partial sums.
    assert any("reduce_scatter" in k or "all_reduce" in k for k in kinds)
    assert kinds[0] != kinds[1]


def test_two_uses_share_one_gathered_copy() -> None:
    def twice(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w + y @ w

    analysis = toast.analyze(twice, f32(256, 64), f32(256, 64), f32(64, 64))
    model = model_of(analysis, "d=4", min_dimensions=0)
    state = apply(model, action(model.space, "x", 0, "d"), action(model.space, "w", 1, "d"))
    assert collectives(model, state)["all_gather"][0] == 1


def test_donated_results_cost_no_memory() -> None:
    def step(w: jax.Array) -> jax.Array:
        return w * 2.0

    kept = model_of(toast.analyze(step, f32(1024, 1024)), "d=4")
    donated = model_of(toast.analyze(step, f32(1024, 1024), donate=(0,)), "d=4")
    size = 4 * 1024 * 1024
    assert donated.initial_peak == size
    assert kept.initial_peak == size + kept.machine.in_memory(np.array(SHORT * size))


@pytest.mark.parametrize("stored", [0.0, 2.0**20, 2.0**30])
def test_the_most_temporaries_are_those_that_leave_so_much_beside_fast_memory(
    stored: float,
) -> None:
    for hardware in ("tpu-v5e", "h100"):
        model = model_of(toast.analyze(lambda x: x + 1.0, f32(64, 64)), "d=4", hardware=hardware)
        machine = model.machine
        most = machine.most_temporaries(stored)
        assert machine.in_memory(np.array(most)) == pytest.approx(stored)
        assert most >= stored


def test_fused_values_do_not_exist() -> None:
    def chain(x: jax.Array) -> jax.Array:
        for _ in range(5):
            x = x * 2.0 + 1.0
        return x

    model = model_of(toast.analyze(chain, f32(1024, 1024)), "d=4")
    size = 4 * 1024 * 1024
    assert model.initial_peak == size + model.machine.in_memory(np.array(SHORT * size))


def test_batches_price_like_single_states() -> None:
    model = model_of(analyzed("t2b-tiny"), "d=2,m=2")
    space = model.space
    states = space.apply_each(space.initial, range(len(space.actions)))
    together = model.price(states)
    for index, state in enumerate(states):
        alone = model.price(state[None])
        np.testing.assert_allclose(together.seconds[index], alone.seconds[0])
        np.testing.assert_allclose(together.peak_bytes[index], alone.peak_bytes[0])


def test_cost_is_relative_and_penalises_memory() -> None:
    """C(s) = RT(s) + MP(s) of section 4.5."""
    model = model_of(analyzed("t2b-tiny"), "d=2,m=2")
    prices = model.price(model.space.initial[None])
    assert model.cost(prices, 2 * model.initial_peak)[0] == 1.0
    assert model.cost(prices, model.initial_peak / 2)[0] == pytest.approx(1.0 + 10.0 * 0.5)


def pool(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3), (1, 1), "SAME")


#: A function of 8 rows of 64, and the elements of a row that each of 4 shards needs of others.
SHIFTS = {
    "pool": (pool, 2),
    "shift": (lambda x: jax.lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 0))), 1),
    "every other": (lambda x: x[:, ::2], 0),
    "first half": (lambda x: x[:, :32], 32),
    "cumulative sum": (lambda x: jnp.cumsum(x, axis=1), 63),
    "reverse": (lambda x: x[:, ::-1], 16),
    "small part": (lambda x: x[:, 32:40], 8),
}


def test_halos_of_convolutions_are_those_of_the_image() -> None:
    """The image has 2 features and the result 16: neighbours exchange two rows of the image."""

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )

    model = model_of(toast.analyze(convolve, f32(8, 64, 2), f32(3, 2, 16)), "s=4", min_dimensions=0)
    state = apply(model, action(model.space, "x", 1, "s"))
    assert collectives(model, state) == {"collective_permute": (1, 4.0 * 8 * 2 * 2)}


@pytest.mark.parametrize("case", SHIFTS)
def test_permutations_exchange_their_halo(case: str) -> None:
    function, halo = SHIFTS[case]
    model = model_of(toast.analyze(function, f32(8, 64)), "s=4", min_dimensions=0)
    state = apply(model, action(model.space, "x", 1, "s"))
    expected = {"collective_permute": (1, 4.0 * 8 * halo)} if halo else {}
    assert collectives(model, state) == expected


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, y: x @ y, [(8, 0), (0, 8)]),
        (lambda x: (), [(8, 8)]),
        (lambda x: x, [(0, 4)]),
    ],
    ids=["no depth", "no results", "no elements"],
)
@pytest.mark.parametrize("mesh", ["a=2", "a=1"])
def test_programs_with_next_to_nothing_in_them(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], mesh: str
) -> None:
    plan = toast.plan(function, *(f32(*s) for s in shapes), mesh=mesh, hardware="tpu-v5e")
    for side in (plan.before, plan.after):
        assert np.isfinite([side.step_seconds, side.peak_bytes, side.argument_bytes]).all()


def test_the_heap_has_gaps_beside_short_lived_values() -> None:
    """The gap of a short-lived value, and what is in fast memory, are in the peak."""

    def long(x: jax.Array, w: jax.Array) -> jax.Array:
        first = jnp.tanh(x @ w)
        y = first
        for _ in range(60):
            y = jnp.tanh(y @ w)
        return y @ first

    model = model_of(toast.analyze(long, f32(1024, 1024), f32(1024, 1024)), "d=4")
    size = 4 * 1024 * 1024
    # At the peak: the result, which has memory from the beginning, the first value and the last
    # two.  The first value waits for more than 80 ops.
    line = model.timeline(model.space.initial)
    assert line.gap_bytes == pytest.approx(2 * (SHORT - 1) * size)
    share, room = model.machine.fast_memory
    assert line.fast_bytes == pytest.approx(min(room, share * (4 * size + line.gap_bytes)))
    assert line.peak_bytes == 2 * size + 4 * size + line.gap_bytes - line.fast_bytes
    assert model.price(model.space.initial[None]).peak_bytes[0] == line.peak_bytes
