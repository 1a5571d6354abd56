"""How often values are resharded in loops, as XLA's TPU compiler does it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import action
from toast.cost import CostModel, break_down
from toast.cost.argument_views import argument_views
from toast.cost.program_loops import loops_of
from toast.cost.reshard_runs import reshard_runs
from toast.cost.rounding import carries_rounded
from toast.cost.terms.kernels import arguments_alike, memory_share
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


def test_a_breakdown_adds_up_to_the_price_where_reshards_are_before_a_loop() -> None:
    """And the copy of a weight that is gathered before a loop stays until the loop ends."""
    space = Space(analyzed(), Mesh.parse("d=4"), min_dimensions=0)
    model = CostModel(space, load("tpu-v5e"))
    state = space.apply(space.initial, action(space, "first", 0, "d"))
    program = space.analysis.program
    state[space.classes.of_op[program.values[program.argument_values[0]].op], 0] = 0
    found, price = break_down(model, state), model.price(state[None])
    seconds = sum(each.seconds for each in found.collectives)
    assert seconds == pytest.approx(price.collective_seconds.sum())
    kept = [
        each for each in model.timeline(state).buffers
        if each.what == "copy" and program.values[each.value].type.shape == (WIDTH, WIDTH)
    ]  # fmt: skip
    (loop,) = loops_of(program)
    assert [(each.start <= loop.begin, each.end > loop.end) for each in kept] == [(True, True)]


def test_a_loop_in_a_loop_reshards_what_only_the_outer_one_changes_before_it() -> None:
    def step(weight: Any, first: Any, steps: Any) -> Any:
        def outer(scale: Any, step: Any) -> tuple[Any, Any]:
            by = weight * scale

            def inner(state: Any, row: Any) -> tuple[Any, Any]:
                return jnp.tanh(state @ by) + row, None

            return scale * 2, jax.lax.scan(inner, step[0], step)[0]

        return jax.lax.scan(outer, first, steps)[1]

    shapes = [
        jax.ShapeDtypeStruct(size, "float32")
        for size in ((WIDTH, WIDTH), (), (3, STEPS, ROWS, WIDTH))
    ]
    analysis = toast.analyze(step, *shapes, platform="tpu", cache=False)
    assert runs(analysis, "dot_general", 1) == [3]
    assert runs(analysis, "dot_general", 0) == [3 * STEPS]


def caching(weight: Any, cache: Any, steps: Any) -> Any:
    """A loop that fills a cache and reads it in each iteration."""

    def body(carried: Any, step: Any) -> tuple[Any, Any]:
        cache, number = carried
        cache = jax.lax.dynamic_update_slice_in_dim(cache, (step @ weight)[None], number, 0)
        return (cache, number + 1), jnp.einsum("bk,tbk->bt", step, cache)

    return jax.lax.scan(body, (cache, jnp.int32(0)), steps)


def filling_twice(weight: Any, cache: Any, steps: Any) -> Any:
    """A loop that fills two rows of a cache in each iteration, and reads none."""

    def body(carried: Any, step: Any) -> tuple[Any, None]:
        cache, number = carried
        for row in (step @ weight, step):
            cache = jax.lax.dynamic_update_slice_in_dim(cache, row[None], number, 0)
            number = number + 1
        return (cache, number), None

    return jax.lax.scan(body, (cache, jnp.int32(0)), steps)[0]


@pytest.mark.parametrize(("function", "times"), [(caching, STEPS), (filling_twice, 1)])
def test_a_stack_that_a_loop_reads_is_resharded_in_each_iteration(
    function: Any, times: int
) -> None:
    shapes = [
        jax.ShapeDtypeStruct(size, "bfloat16")
        for size in ((WIDTH, WIDTH), (2 * STEPS, ROWS, WIDTH), (STEPS, ROWS, WIDTH))
    ]
    analysis = toast.analyze(function, *shapes, platform="tpu", cache=False)
    program, names = analysis.program, analysis.names
    each = reshard_runs(program, names.use_op, names.use_value, partitioned=True)
    updated = [
        runs for value, runs in zip(names.use_value.tolist(), each.tolist(), strict=True)
        if program.kinds[program.makers[value]] == "dynamic_update_slice"
        and program.values[value].type.shape[0] == 2 * STEPS
    ]  # fmt: skip
    assert updated == [times] * 2


def test_what_a_conditional_of_a_loop_returns_is_resharded_in_each_iteration() -> None:
    def step(one: Any, other: Any, steps: Any) -> Any:
        def body(number: Any, step: Any) -> tuple[Any, Any]:
            weight = jax.lax.cond(number % 2 == 0, lambda: one, lambda: other)
            return number + 1, step @ weight

        return jax.lax.scan(body, jnp.int32(0), steps)[1]

    shapes = [
        jax.ShapeDtypeStruct(size, "bfloat16")
        for size in ((WIDTH, WIDTH), (WIDTH, WIDTH), (STEPS, ROWS, WIDTH))
    ]
    analysis = toast.analyze(step, *shapes, platform="tpu", cache=False)
    assert runs(analysis, "dot_general", 1) == [STEPS]


def test_programs_of_one_device_keep_their_collectives_in_the_loop() -> None:
    analysis = analyzed()
    program, names = analysis.program, analysis.names
    each = reshard_runs(program, names.use_op, names.use_value, partitioned=False)
    assert (each >= np.array(program.repeats)[names.use_op]).all()


@pytest.mark.parametrize(("dtype", "shares"), [("float32", [0.5]), ("int32", [])])
def test_the_next_step_receives_a_state_as_its_products_round_it(
    dtype: str, shares: list[float]
) -> None:
    """Products round float32 alone."""

    def step(weight: Any, first: Any, steps: Any) -> Any:
        return jax.lax.scan(lambda state, step: (state @ weight + step, None), first, steps)[1]

    shapes = [
        jax.ShapeDtypeStruct(size, dtype)
        for size in ((WIDTH, WIDTH), (ROWS, WIDTH), (STEPS, ROWS, WIDTH))
    ]
    for program in (
        toast.analyze(step, *shapes, platform="tpu", cache=False).program,
        *([analyzed().program] if shares else []),
    ):
        assert [*carries_rounded(program, {"dot_general": 2.0}).values()] == shares
    # Nothing rounds it where products do not.
    assert shares or not carries_rounded(program, {})


@pytest.mark.parametrize(
    ("dtype", "rounded", "sharded", "viewed"),
    [
        ("bfloat16", False, False, 1.0),  # the argument itself
        ("bfloat16", False, True, 1 / STEPS),  # gathered before the loop
        ("float32", False, False, 1 / STEPS),  # rounded by products
        ("float32", True, False, 1 / STEPS),  # by the program
    ],
)
def test_loops_read_copies_of_arguments_from_memory_once(
    dtype: str, rounded: bool, sharded: bool, viewed: float
) -> None:
    """As compiled for v5e: a copy stays in fast memory."""

    def step(weight: Any, first: Any, steps: Any) -> Any:
        def body(state: Any, step: Any) -> tuple[Any, None]:
            by = weight.astype(jnp.bfloat16) if rounded else weight
            return jnp.tanh(state @ by).astype(state.dtype) + step, None

        return jax.lax.scan(body, first, steps)[0]

    kept = "bfloat16" if rounded else dtype
    shapes = [
        jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype), jax.ShapeDtypeStruct((ROWS, WIDTH), kept),
        jax.ShapeDtypeStruct((STEPS, ROWS, WIDTH), kept),
    ]  # fmt: skip
    analysis = toast.analyze(step, *shapes, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("d=4"), min_dimensions=0)
    model, state = CostModel(space, load("tpu-v5e")), space.initial.copy()
    if sharded:
        program = analysis.program
        state[space.classes.of_op[program.values[program.argument_values[0]].op], 0] = 0
    layout, tensors = model.layout(state[None]), model.tables.tensors
    shares = memory_share(tensors, arguments_alike(layout))[0]
    assert shares.max() == pytest.approx(viewed)  # the other one is the state


def test_a_loop_reads_a_part_of_a_stack_in_each_iteration() -> None:
    def step(stack: Any, weight: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, layer: (x @ layer @ weight, None), x, stack)[0]

    shapes = [
        jax.ShapeDtypeStruct(size, "bfloat16")
        for size in ((STEPS, WIDTH, WIDTH), (WIDTH, WIDTH), (ROWS, WIDTH))
    ]
    program = toast.analyze(step, *shapes, platform="tpu", cache=False).program
    views = argument_views(program)
    copied = [
        float(views[op.operands[1]])
        for number, op in enumerate(program.ops)
        if program.kind(number) == "dot_general"
    ]
    assert copied == [STEPS, 1]


def test_branches_reshard_in_each_iteration() -> None:
    """XLA moves nothing out of a conditional."""

    def step(one: Any, other: Any, first: Any, numbers: Any) -> Any:
        def body(state: Any, number: Any) -> tuple[Any, None]:
            branches = (lambda x: x @ one), (lambda x: x @ other)
            return jax.lax.cond(number % 2 == 0, *branches, state), None

        return jax.lax.scan(body, first, numbers)[0]

    shapes = [
        *[jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * 2,
        jax.ShapeDtypeStruct((ROWS, WIDTH), "float32"), jax.ShapeDtypeStruct((STEPS,), "int32"),
    ]  # fmt: skip
    analysis = toast.analyze(step, *shapes, platform="tpu", cache=False)
    assert runs(analysis, "dot_general", 1) == [STEPS, STEPS]


@pytest.mark.parametrize("read", [False, True])
def test_a_stack_that_its_loop_reads_is_resharded_in_each_iteration(read: bool) -> None:
    def step(stack: Any, rows: Any) -> Any:
        def body(carry: Any, row: Any) -> tuple[Any, None]:
            number, stack = carry
            new = row + stack.sum(axis=0) if read else row
            stack = jax.lax.dynamic_update_slice(stack, new[None], (number, 0))
            return (number + 1, stack), None

        return jax.lax.scan(body, (0, stack), rows)[0][1]

    shapes = [jax.ShapeDtypeStruct((STEPS, WIDTH), "float32")] * 2
    analysis = toast.analyze(step, *shapes, platform="tpu", cache=False)
    each = [times for times in runs(analysis, "yield", 0) if times > 0]
    assert each == [STEPS if read else 1]


@pytest.mark.parametrize(
    ("dtype", "sliced", "size"),
    [("float32", False, 2), ("bfloat16", False, 2), ("bfloat16", True, 2)],
)
def test_loops_read_slices_and_rounded_weights_from_fast_memory(
    dtype: str, sliced: bool, size: int
) -> None:
    """XLA copies a slice before the loop, and products round float32 copies."""

    def step(weight: Any, first: Any, steps: Any) -> Any:
        by = weight[:WIDTH] if sliced else weight
        return jax.lax.scan(lambda s, row: (jnp.tanh(s @ by) + row, None), first, steps)[0]

    rows = 2 * WIDTH if sliced else WIDTH
    shapes = [
        jax.ShapeDtypeStruct(sizes, dtype)
        for sizes in ((rows, WIDTH), (ROWS, WIDTH), (STEPS, ROWS, WIDTH))
    ]
    analysis = toast.analyze(step, *shapes, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("d=4"), min_dimensions=0)
    model = CostModel(space, load("tpu-v5e"))
    layout, tensors = model.layout(space.initial[None]), model.tables.tensors
    weight = np.flatnonzero(tensors.bytes == size * WIDTH * WIDTH)
    (share,) = memory_share(tensors, arguments_alike(layout))[0, weight]
    assert share == pytest.approx(1.0 if dtype == "bfloat16" and not sliced else 1 / STEPS)
