"""Steps of sequences that loops read and write row by row."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import action
from toast.cost import CostModel, break_down
from toast.cost.step_rows import READ, READ_IN_LANES, row_accesses
from toast.hardware import Mesh, load
from toast.program import Program
from toast.space import Space


def recurrence(decay: Any, new: Any) -> Any:
    """A gated recurrence over ``[steps, batch, width]``."""

    def step(before: Any, now: Any) -> Any:
        after = now[0] * before + now[1]
        return after, after

    return jax.lax.scan(step, jnp.zeros_like(new[0]), (decay, new))[1]


def of_batches(decay: Any, new: Any) -> Any:
    """The same over ``[batch, steps, width]``."""
    return jnp.swapaxes(recurrence(jnp.swapaxes(decay, 0, 1), jnp.swapaxes(new, 0, 1)), 0, 1)


def of_sequences(decay: Any, new: Any) -> Any:
    """The same with arrays that the program computes."""
    return of_batches(jax.nn.sigmoid(decay), new * 2)


def analyzed(function: Any, *size: int) -> toast.Analysis:
    argument = jax.ShapeDtypeStruct(size, "float32")
    return toast.analyze(function, argument, argument, platform="tpu", cache=False)


def rows(analysis: toast.Analysis, relayout_bytes: float = 10.0) -> dict[str, float]:
    """Accesses in bytes, by the kind of the op."""
    program: Program = analysis.program
    names = analysis.names
    size = np.array([4.0 * math.prod(value.type.shape) for value in program.values])
    accesses = row_accesses(
        program, names.use_op, names.use_index, names.use_value, size, relayout_bytes
    )
    found: dict[str, float] = {}
    for use in accesses.nonzero()[0].tolist():
        kind = program.kind(int(names.use_op[use]))
        found[kind] = found.get(kind, 0.0) + accesses[use] * size[names.use_value[use]]
    return found


def test_loops_read_and_write_steps_of_transposed_arrays_as_rows() -> None:
    elements = 16 * 256
    found = rows(analyzed(of_sequences, 16, 32, 256))
    assert found == {
        "dynamic_slice": 2 * elements * 8 * 10.0, "dynamic_update_slice": elements * 4 * 10.0,
    }  # fmt: skip


def test_steps_in_front_are_whole_arrays() -> None:
    assert rows(analyzed(recurrence, 32, 16, 256)) == {}


def test_layers_of_arguments_are_no_rows() -> None:
    assert rows(analyzed(of_batches, 16, 32, 256)) == {}


def test_rows_take_no_longer_where_nothing_is_known_about_the_vector_unit() -> None:
    assert rows(analyzed(of_sequences, 16, 32, 256), relayout_bytes=0.0) == {}


def test_rows_take_longer_than_whole_arrays() -> None:
    def kernels(function: Any, *size: int) -> float:
        space = Space(analyzed(function, *size), Mesh.parse("a=2"), min_dimensions=0)
        found = break_down(CostModel(space, load("tpu-v5e")), space.unsharded)
        return float(found.memory_seconds.sum())

    whole, by_row = kernels(recurrence, 32, 16, 256), kernels(of_sequences, 16, 32, 256)
    moved = 32 * 16 * 256 * (2 * 8 + 4) / load("tpu-v5e").transposed_elements_per_s
    assert by_row - whole > 0.9 * moved


@pytest.mark.parametrize(("width", "in_lanes"), [(768, True), (1024, False)])
def test_steps_are_in_lanes_if_shards_of_rows_do_not_fill_them(width: int, in_lanes: bool) -> None:
    """A shard of 192 elements fills three quarters of the lanes; 256 steps fill them all."""
    space = Space(analyzed(of_sequences, 16, 256, width), Mesh.parse("a=4"), min_dimensions=0)
    model = CostModel(space, load("tpu-v5e"))

    def seconds(state: Any) -> float:
        return float(break_down(model, state).term_seconds["step reads"].sum())

    assert seconds(space.unsharded) == 0
    sharded = space.apply(space.initial, action(space, "decay", 2, "a"))
    read = 2 * 256 * 16 * width / 4 * (READ_IN_LANES - READ)
    expected = read / load("tpu-v5e").transposed_elements_per_s if in_lanes else 0.0
    assert seconds(sharded) == pytest.approx(expected, rel=0.01)


def test_a_stack_is_read_as_its_loop_needs_it() -> None:
    """Steps that devices compute apart are gathered first: a device reads them all."""
    space = Space(analyzed(of_sequences, 16, 256, 192), Mesh.parse("a=4"), min_dimensions=0)
    model = CostModel(space, load("tpu-v5e"))

    def seconds(state: Any) -> float:
        return float(break_down(model, state).term_seconds["step reads"].sum())

    by_steps = space.apply(space.initial, action(space, "decay", 1, "a"))
    assert seconds(by_steps) == seconds(space.unsharded) > 0
