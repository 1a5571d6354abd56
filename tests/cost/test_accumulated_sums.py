"""All-reduces of what a loop accumulates: XLA for TPUs moves them behind the loop."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.helpers import action
from toast.cost import CostModel
from toast.cost.accumulated_sums import sum_runs
from toast.hardware import Mesh, load
from toast.space import Space

STEPS = 12


def gradient(weight: Any, steps: Any, *, also: bool = False) -> Any:
    """The gradient of the weight of a recurrence; ``also`` if each step needs the one so far."""

    def body(total: Any, x: Any) -> tuple[Any, Any]:
        total = total + jnp.einsum("bi,bo->io", x, jnp.tanh(x @ weight))
        return total, total.mean() if also else jnp.float32(0)

    return jax.lax.scan(body, jnp.zeros_like(weight), steps)


def analyzed_on_shapes(step: Any) -> toast.Analysis:
    shapes = [jax.ShapeDtypeStruct(size, "float32") for size in ((64, 64), (STEPS, 128, 64))]
    return toast.analyze(step, *shapes, platform="tpu", cache=False)


def analyzed(also: bool) -> toast.Analysis:
    return analyzed_on_shapes(lambda weight, steps: gradient(weight, steps, also=also))


def moved(analysis: toast.Analysis) -> set[str]:
    """The kinds of ops whose sums are moved behind a loop."""
    program = analysis.program
    runs = sum_runs(program, analysis.rules)
    return {
        program.kinds[op]
        for op, run in zip(program.makers, runs, strict=True)
        if run != program.repeats[op]
    }


@pytest.mark.parametrize("also", [False, True])
def test_only_sums_that_a_loop_does_nothing_with_are_moved_behind_it(also: bool) -> None:
    assert moved(analyzed(also)) == (set() if also else {"dot_general"})


def accumulated(part: Any) -> set[str]:
    """The kinds of ops whose sums are moved, in a loop that adds a part of each step to a total."""

    def step(weight: Any, steps: Any) -> Any:
        def body(total: Any, x: Any) -> tuple[Any, None]:
            return total + part(x @ weight), None

        total = jax.eval_shape(part, jax.ShapeDtypeStruct((128, 64), "float32"))
        return jax.lax.scan(body, jnp.zeros(total.shape, total.dtype), steps)

    return moved(analyzed_on_shapes(step))


def test_parts_of_a_maximum_are_not_added() -> None:
    assert accumulated(lambda x: x.max(axis=0)) == set()


def test_sums_pass_no_conversion_to_integers() -> None:
    assert accumulated(lambda x: x.sum(axis=0).astype("int32")) == set()


def test_sums_of_barriers_pass_with_their_values() -> None:
    def part(x: Any) -> Any:
        total, _ = jax.lax.optimization_barrier((x.sum(axis=0), x.max(axis=0)))
        return total

    assert accumulated(part) == {"reduce"}


@pytest.mark.parametrize(("also", "times"), [(False, 1), (True, STEPS)])
def test_devices_sum_a_gradient_once(also: bool, times: int) -> None:
    analysis = analyzed(also)
    space = Space(analysis, Mesh.parse("data=4"), min_dimensions=0)
    model = CostModel(space, load("tpu-v5e"))
    state = space.apply(space.initial, action(space, "steps", 1, "data"))
    price = model.price(state[None])
    gradients = 64 * 64 * 4 * 2 * 3 / 4  # bytes sent around a ring of four
    assert price.sent_bytes[0] == pytest.approx(gradients * times, rel=0.1)


def test_a_sum_outside_of_loops_is_computed_once() -> None:
    def step(weight: Any, steps: Any) -> Any:
        total = (steps[0] @ weight).sum(axis=0)

        def outer(before: Any, _: Any) -> tuple[Any, None]:
            after, _ = jax.lax.scan(lambda t, _: (t + total, None), before, None, length=3)
            return after * 0.5, None

        return jax.lax.scan(outer, jnp.zeros_like(total), None, length=5)[0]

    analysis = analyzed_on_shapes(step)
    runs = sum_runs(analysis.program, analysis.rules)
    sums = [
        v for v, op in enumerate(analysis.program.makers) if analysis.program.kinds[op] == "reduce"
    ]
    assert [runs[value] for value in sums] == [1]
