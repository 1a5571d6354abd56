"""What loops cost besides their products: updates, first values, rounded stacks, small kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.helpers import f32
from toast.cost import CostModel
from toast.cost.liveness import allocated_only
from toast.hardware import Hardware, Mesh, load
from toast.space import Space

LAYERS, ROWS, WIDTH = 6, 256, 128
STACK_BYTES = 4 * LAYERS * ROWS * WIDTH

#: One byte per second, without any latency.
V5E = load("tpu-v5e")
SLOW = dataclasses.replace(
    V5E, memory_bytes_per_s=1.0, single_op_share=0.5, kernel_latency_s=0.0,
    products=dataclasses.replace(V5E.products, fast_bytes=0.0),
)  # fmt: skip


def recurrence(x: jax.Array, ws: jax.Array) -> jax.Array:
    """A loop that stacks its states."""
    return jax.lax.scan(lambda h, w: (jnp.tanh(h * w), h), x, ws)[1]


def backward(x: jax.Array, ws: jax.Array) -> jax.Array:
    """The same from the last element of the stacks to the first."""
    return jax.lax.scan(lambda h, w: (jnp.tanh(h * w), h), x, ws, reverse=True)[1]


def layers(x: jax.Array, ws: jax.Array) -> jax.Array:
    """A loop over layers."""
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]


def model_of(
    function: Callable[..., object], *shapes: jax.ShapeDtypeStruct, hardware: Hardware = SLOW
) -> CostModel:
    space = Space(toast.analyze(function, *shapes), Mesh.parse("data=2"))
    return CostModel(space, hardware)


def seconds_of(model: CostModel, name: str) -> float:
    """Of one term, without shards."""
    layout = model.layout(model.space.initial[None])
    return sum(float(s.sum()) for term, s in model.work(layout) if term.name == name)


@pytest.mark.parametrize(("function", "allocated"), [(recurrence, True), (backward, False)])
def test_a_stack_has_first_values_if_its_loop_runs_backward(
    function: Callable[..., object], allocated: bool
) -> None:
    model = model_of(function, f32(ROWS, WIDTH), f32(LAYERS, ROWS, WIDTH))
    program = model.space.analysis.program
    (value,) = {
        program.ops[program.values[program.ops[op].operands[0]].op].operands[0]
        for op in range(len(program.ops))
        if program.kind(op) == "dynamic_update_slice"
    }
    assert allocated_only(program)[value] == allocated
    written = seconds_of(model, "writes")
    # A kernel of one op, with half of the rate, writes them.
    assert (written >= 2 * STACK_BYTES) != allocated


def test_a_computed_first_value_is_written() -> None:
    def filled(x: jax.Array) -> jax.Array:
        def write(i: jax.Array, stack: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(stack, x[0] * 2, i, 0)

        return jax.lax.fori_loop(0, LAYERS, write, jnp.exp(x))

    model = model_of(filled, f32(LAYERS, ROWS, WIDTH))
    assert seconds_of(model, "writes") >= STACK_BYTES


def test_an_update_is_written_into_its_buffer() -> None:
    """As much as it has elements, in every iteration; the whole buffer is written once at most."""
    model = model_of(recurrence, f32(ROWS, WIDTH), f32(LAYERS, ROWS, WIDTH))
    uses, names = model.tables.uses, model.space.analysis.names
    program = model.space.analysis.program
    updates = [
        use
        for use, (op, index) in enumerate(zip(names.use_op, names.use_index, strict=True))
        if program.kind(int(op)) == "dynamic_update_slice" and index == 1
    ]
    assert uses.reads[model.tables.use_class[updates]].sum() == LAYERS


@pytest.mark.parametrize("name", ["tpu-v5e", "h100"])
def test_stacks_that_products_round_are_copied_once(name: str) -> None:
    hardware = dataclasses.replace(load(name), memory_bytes_per_s=1.0, single_op_share=0.5)
    model = model_of(layers, f32(ROWS, WIDTH), f32(LAYERS, WIDTH, WIDTH), hardware=hardware)
    # Four bytes of each element are read, and two are written.
    expected = 6 * LAYERS * WIDTH * WIDTH / 0.5 if hardware.product_operands else 0.0
    assert seconds_of(model, "roundings") == pytest.approx(expected)


def test_every_kernel_of_an_iteration_takes_a_latency() -> None:
    hardware = dataclasses.replace(SLOW, memory_bytes_per_s=1e30, kernel_latency_s=1.0)
    model = model_of(recurrence, f32(ROWS, WIDTH), f32(LAYERS, ROWS, WIDTH), hardware=hardware)
    # The new state, and the update of the stack.
    assert seconds_of(model, "latencies") == 2 * LAYERS
