"""Steps of sequences that loops read and write row by row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import action
from toast.cost import CostModel, break_down
from toast.cost.step_rows import WRITTEN, step_rows
from toast.hardware import Mesh, load
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


def rows(analysis: toast.Analysis, lanes: int = 128) -> dict[str, tuple[float, float]]:
    """Elements that move by rows in a step, and the kernels that move them, by kind of op."""
    program, names = analysis.program, analysis.names
    by_product = np.zeros(len(program.ops), dtype=bool)
    moved = step_rows(program, names.use_op, names.use_index, by_product, lanes)
    found: dict[str, tuple[float, float]] = {}
    for use in moved.kernels.nonzero()[0].tolist():
        kind = program.kind(int(names.use_op[use]))
        elements, kernels = found.get(kind, (0.0, 0.0))
        size = program.elements[int(names.use_value[use])]
        found[kind] = elements + float(moved.moves[use]) * size, kernels + moved.kernels[use]
    return found


def test_loops_read_and_write_steps_of_transposed_arrays_as_rows() -> None:
    elements = 16 * 32 * 256
    found = rows(analyzed(of_sequences, 16, 32, 256))
    assert found == {
        "dynamic_slice": (2 * elements, 64), "dynamic_update_slice": (elements, 32),
    }  # fmt: skip


def test_steps_in_front_are_whole_arrays() -> None:
    assert rows(analyzed(recurrence, 32, 16, 256)) == {}


def test_layers_of_arguments_are_no_rows() -> None:
    assert rows(analyzed(of_batches, 16, 32, 256)) == {}


def test_arrays_without_tiles_have_no_rows() -> None:
    assert rows(analyzed(of_sequences, 16, 32, 256), lanes=1) == {}


def test_updates_of_products_are_no_rows() -> None:
    """The kernel of a product writes its result into a stack whose steps are whole."""
    analysis = analyzed(of_sequences, 16, 32, 256)
    program, names = analysis.program, analysis.names
    written = np.array([kind == "dynamic_update_slice" for kind in program.kinds])
    moved = step_rows(program, names.use_op, names.use_index, written, 128)
    assert not moved.updates.any()
    assert moved.kernels.sum() == 64


def layered(product: bool, weights: Any, x: Any) -> Any:
    """The gradient of a scan of two layers, each a recurrence, perhaps with a product."""

    def layer(x: Any, weight: Any) -> Any:
        def step(before: Any, now: Any) -> Any:
            kept = jnp.tanh(before @ weight) if product else before
            after = now[0] * kept + now[1]
            return after, after

        moved = [jnp.swapaxes(part, 0, 1) for part in (jax.nn.sigmoid(x * weight[0]), x * 2)]
        scanned = jax.lax.scan(step, jnp.zeros_like(moved[0][0]), tuple(moved))[1]
        return x + jnp.swapaxes(scanned, 0, 1), None

    return jnp.sum(jax.lax.scan(layer, x, weights)[0])


@pytest.mark.parametrize(("product", "slices"), [(False, 5), (True, 4)])
def test_residuals_of_layers_are_read_by_rows(product: bool, slices: int) -> None:
    """Forward, both inputs; backward, the gradient, the decay and, without products, the state."""
    shapes = (
        jax.ShapeDtypeStruct((2, 256, 256), "float32"),
        jax.ShapeDtypeStruct((16, 32, 256), "float32"),
    )
    analysis = toast.analyze(
        jax.grad(lambda *given: layered(product, *given)), *shapes, platform="tpu", cache=False
    )
    assert rows(analysis)["dynamic_slice"][1] == slices * 2 * 32


def seconds(device: str, batch: int, width: int = 256) -> float:
    """Seconds of rows of 128 steps on a device of two."""
    space = Space(analyzed(of_sequences, batch, 128, width), Mesh.parse("a=2"), min_dimensions=0)
    broken = break_down(CostModel(space, load(device)), space.unsharded)
    return float(broken.term_seconds["step rows"].sum())


@pytest.mark.parametrize(("device", "reading"), [("tpu-v5e", 2), ("tpu-v6e", 1), ("tpu-v4", 2)])
def test_each_kernel_moves_one_step(device: str, reading: int) -> None:
    """On v6e, one kernel reads the steps of both arrays."""
    hardware = load(device)
    moved = 128 * 16 * 256 * (2 + 1 / WRITTEN) / hardware.row_elements_per_s
    expected = moved + 128 * (reading + 1) * hardware.kernel_latency_s
    assert seconds(device, 16) == pytest.approx(expected)


def test_other_kernels_move_the_steps_of_a_single_sequence() -> None:
    assert seconds("tpu-v5e", 1) == 0
    assert seconds("tpu-v5e", 2) > 0


def test_a_gpu_has_no_rows() -> None:
    assert seconds("h100", 16) == 0


def test_updates_have_no_other_latency() -> None:
    """The kernel that writes rows is one more, but not two."""
    space = Space(analyzed(of_sequences, 16, 128, 256), Mesh.parse("a=2"), min_dimensions=0)
    broken = break_down(CostModel(space, load("tpu-v5e")), space.unsharded)
    updates = [kind == "dynamic_update_slice" for kind in space.analysis.program.kinds]
    assert broken.term_seconds["latencies"][updates].sum() == 0


@pytest.mark.parametrize(("width", "in_lanes"), [(768, True), (1024, False)])
def test_steps_are_in_lanes_if_shards_of_rows_do_not_fill_them(width: int, in_lanes: bool) -> None:
    """A shard of 192 elements fills three quarters of the lanes; 256 steps fill them all.

    Then other kernels write the steps.
    """
    space = Space(analyzed(of_sequences, 16, 256, width), Mesh.parse("a=4"), min_dimensions=0)
    hardware = load("tpu-v5e")
    model = CostModel(space, hardware)
    sharded = space.apply(space.initial, action(space, "decay", 2, "a"))
    found = float(break_down(model, sharded).term_seconds["step rows"].sum())
    elements, latency = 256 * 16 * width / 4, 256 * hardware.kernel_latency_s
    reading, writing = 2 * elements / hardware.row_elements_per_s, 0.0
    if in_lanes:
        reading = 2 * elements / hardware.lane_elements_per_s
    else:
        writing = elements / hardware.row_elements_per_s / WRITTEN + latency
    assert found == pytest.approx(reading + 2 * latency + writing)


def test_a_stack_is_read_as_its_loop_needs_it() -> None:
    """Steps that devices compute apart are gathered first: a device reads them all."""
    space = Space(analyzed(of_sequences, 16, 256, 192), Mesh.parse("a=4"), min_dimensions=0)
    model = CostModel(space, load("tpu-v5e"))

    def spent(state: Any) -> float:
        return float(break_down(model, state).term_seconds["step rows"].sum())

    by_steps = space.apply(space.initial, action(space, "decay", 1, "a"))
    assert spent(by_steps) == spent(space.unsharded) > 0


def test_a_kernel_of_v6e_reads_one_array_alone() -> None:
    """Pairs of arrays share a kernel; one of three has its own."""

    def of(arrays: int) -> Any:
        def function(*arguments: Any) -> Any:
            moved = [jnp.swapaxes(jax.nn.sigmoid(x), 0, 1) for x in arguments[:arrays]]
            step = lambda before, now: (before + sum(now), before)  # noqa: E731
            return jax.lax.scan(step, jnp.zeros_like(moved[0][0]), tuple(moved))[0]

        shape = jax.ShapeDtypeStruct((16, 128, 256), "float32")
        analysis = toast.analyze(function, *[shape] * arrays, platform="tpu", cache=False)
        program, names = analysis.program, analysis.names
        none = np.zeros(len(program.ops), dtype=bool)
        return step_rows(program, names.use_op, names.use_index, none, 128).pairs.sum() / 128

    assert [of(arrays) for arrays in (1, 2, 3, 4)] == pytest.approx([1, 1, 2, 2])


def test_lanes_are_no_faster_than_rows() -> None:
    """In a file that has the rate of rows alone, lanes have it, too."""
    for name in ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"):
        hardware = load(name)
        assert hardware.lane_elements_per_s < hardware.row_elements_per_s < np.inf
