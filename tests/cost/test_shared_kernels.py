"""Kernels that write stacks, and values in fast memory, as XLA's TPU compiler has them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import model_of
from toast.cost import CostModel, break_down
from toast.cost.liveness import liveness
from toast.cost.terms.kernels import access_share
from toast.hardware import Mesh, load
from toast.space import Space

V5E = load("tpu-v5e")
LAYERS, ROWS, WIDTH = 4, 4096, 4096


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def normed(x: Any) -> Any:
    return x / x.sum(axis=1, keepdims=True)


def stacking(keep: bool, x: Any, weights: Any) -> Any:
    """Layers of which a stack may keep the normed inputs."""

    def layer(x: Any, weight: Any) -> Any:
        inner = normed(x)
        return jnp.tanh(inner * weight), inner if keep else None

    return jax.lax.scan(layer, x, weights)


def reads(*, keep: bool) -> float:
    """Seconds of reads and of writes into stacks, if the vector unit bounds nothing."""
    fast = dataclasses.replace(
        V5E, vector_elements_per_s=math.inf, transposed_elements_per_s=math.inf
    )
    arguments = shape(ROWS, WIDTH), shape(LAYERS, WIDTH)
    analysis = toast.analyze(
        lambda *given: stacking(keep, *given), *arguments, platform="tpu", cache=False
    )
    model = CostModel(Space(analysis, Mesh.parse("a=2"), min_dimensions=0), fast)
    return float(break_down(model, model.space.initial).term_seconds["reads"].sum())


def test_a_normed_value_in_a_stack_is_read_again() -> None:
    """The kernel of the sum has read it; the kernel that writes the stack needs the sum.

    Stacks are written as slowly as products move their operands.
    """
    read = LAYERS * 4 * ROWS * WIDTH / V5E.memory_bytes_per_s
    longer = reads(keep=True) - reads(keep=False)
    assert longer == pytest.approx(read + read / V5E.products.memory_share, rel=0.05)


def test_ops_that_follow_a_reduction_have_a_kernel_of_their_own_if_a_stack_needs_them() -> None:
    analysis = toast.analyze(
        lambda *given: stacking(True, *given), shape(8, 64), shape(LAYERS, 64),
        platform="tpu", cache=False,
    )  # fmt: skip
    program, names = analysis.program, analysis.names
    live = liveness(program, names.use_op, names.use_value, lanes=128)
    kinds = list(program.kinds)
    added = kinds.index("reduce")
    update = kinds.index("dynamic_update_slice")
    written = program.makers[program.ops[update].operands[1]]
    assert live.early[written] == added
    assert live.kernel[written] != live.kernel[added]
    assert live.kernel[added] == added
    whole = liveness(program, names.use_op, names.use_value)
    assert whole.kernel[written] == whole.kernel[added]  # without tiles


@pytest.mark.parametrize("hardware", ["tpu-v5e", "tpu-v6e"])
def test_small_float32_values_stay_in_fast_memory(hardware: str) -> None:
    """Arguments and results do not."""

    def steps(x: Any) -> Any:
        return jnp.cumsum(jnp.cumsum(x, axis=0), axis=0)

    model = model_of(toast.analyze(steps, shape(1024, 1024), platform="tpu"), "a=2", hardware)
    values, fast = model.tables.values, model.hardware.products.fast_bytes
    inside = np.flatnonzero(~values.outer & (values.element == 4))
    assert len(inside)
    sizes = np.array([[0.0], [0.25 * fast], [fast]]) * np.ones(len(values))
    shares = np.asarray(access_share(model.hardware, values, sizes))
    assert shares[0, inside] == pytest.approx(model.hardware.vector_bytes / 8)
    assert (shares[0] < 1).sum() == len(inside) < len(values)
    assert (shares[1, inside] > shares[0, inside]).all()
    assert (shares[2] == 1).all()


def test_other_hardware_has_no_fast_memory() -> None:
    model = model_of(toast.analyze(normed, shape(64, 64)), "a=2", "h100")
    assert access_share(model.hardware, model.tables.values, np.zeros(1)) == 1.0
