"""How often values are resharded in loops, as XLA's TPU compiler does it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.helpers import action
from toast.cost import CostModel
from toast.cost.argument_views import argument_views
from toast.cost.reshard_runs import reshard_runs
from toast.cost.rounding import carries_rounded
from toast.hardware import COLLECTIVES, Mesh, load
from toast.space import Space

STEPS, ROWS, WIDTH = 12, 64, 512
GATHER = COLLECTIVES.index("all_gather")


def recurrence(weight: Any, first: Any, steps: Any, *, barrier: bool = False) -> Any:
    def body(state: Any, step: Any) -> tuple[Any, Any]:
        by = weight.astype(jnp.bfloat16)
        if barrier:
            by, state = jax.lax.optimization_barrier((by, state))
        state = jnp.tanh((state.astype(jnp.bfloat16) @ by).astype(jnp.float32)) + step
        return state, state

    return jax.lax.scan(body, first, steps)[1]


def analyzed(*, barrier: bool = False) -> toast.Analysis:
    def step(weight: Any, first: Any, steps: Any) -> Any:
        return recurrence(weight, first, steps, barrier=barrier)

    shapes = [
        jax.ShapeDtypeStruct(size, "float32")
        for size in ((WIDTH, WIDTH), (ROWS, WIDTH), (STEPS, ROWS, WIDTH))
    ]
    return toast.analyze(step, *shapes, platform="tpu", cache=False)


def runs(analysis: toast.Analysis, kind: str, index: int) -> list[int]:
    """How often a step reshards an operand of ops of a kind, where values have two dimensions."""
    program, names = analysis.program, analysis.names
    each = zip(
        names.use_op.tolist(), names.use_index.tolist(), names.use_value.tolist(),
        reshard_runs(program, names.use_op, names.use_value, partitioned=True).tolist(), strict=True,
    )  # fmt: skip
    return [
        times for op, place, value, times in each
        if program.kind(op) == kind and place == index
        and len(program.values[value].type.shape) == 2
    ]  # fmt: skip


@pytest.mark.parametrize("barrier", [False, True])
def test_what_a_loop_does_not_change_is_resharded_once(barrier: bool) -> None:
    """Unless a barrier keeps it in the loop."""
    analysis = analyzed(barrier=barrier)
    assert runs(analysis, "dot_general", 1) == [STEPS if barrier else 1]
    assert runs(analysis, "convert", 0)[:1] == [1]  # of the weight


def test_the_state_is_resharded_in_each_step() -> None:
    """For the body, and for the next step; the filled stack is not."""
    analysis = analyzed()
    assert runs(analysis, "dot_general", 0) == [STEPS]
    assert runs(analysis, "yield", 0) == [STEPS]
    program, names = analysis.program, analysis.names
    for op, value, times in zip(
        names.use_op.tolist(), names.use_value.tolist(),
        reshard_runs(program, names.use_op, names.use_value, partitioned=True).tolist(), strict=True,
    ):  # fmt: skip
        if program.kind(op) == "yield" and len(program.values[value].type.shape) == 3:
            assert times == 1


def test_a_weight_that_is_gathered_for_a_loop_is_sent_once() -> None:
    space = Space(analyzed(), Mesh.parse("d=4"), min_dimensions=0)
    model = CostModel(space, load("tpu-v5e"))
    state = space.apply(space.initial, action(space, "first", 0, "d"))
    program = space.analysis.program
    state[space.classes.of_op[program.values[program.argument_values[0]].op], 0] = 0
    price = model.price(state[None])
    assert price.collective_count[0, GATHER] == 1
    assert price.collective_bytes[0, GATHER] == WIDTH * WIDTH * 4


def test_the_next_step_receives_a_state_as_its_products_round_it() -> None:
    program = analyzed().program
    (share,) = carries_rounded(program, 2.0).values()
    assert share == 0.5


def test_a_loop_reads_the_same_argument_once() -> None:
    """And a part of a stack in each iteration."""

    def step(stack: Any, weight: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, layer: (x @ layer @ weight, None), x, stack)[0]

    shapes = [
        jax.ShapeDtypeStruct(size, "bfloat16")
        for size in ((STEPS, WIDTH, WIDTH), (WIDTH, WIDTH), (ROWS, WIDTH))
    ]
    program = toast.analyze(step, *shapes, platform="tpu", cache=False).program
    views = argument_views(program)
    changes = [
        float(views[op.operands[1]])
        for number, op in enumerate(program.ops)
        if program.kind(number) == "dot_general"
    ]
    assert changes == [STEPS, 1]
