"""Arguments in fast memory before their products run, as XLA's TPU compiler does it."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest

import toast
from toast.cost import CostModel
from toast.cost.fetched_arguments import fetched_uses
from toast.hardware import Mesh, load
from toast.space import Space

V5E = load("tpu-v5e")


def shape(*sizes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def layers(x: Any, weights: Any) -> Any:
    for weight in weights:
        x = jax.nn.relu(x @ weight)
    return x


def fetched(function: Any, *arguments: Any) -> list[str]:
    """The arguments, or what follows from them, that are in fast memory before a product."""
    analysis = toast.analyze(function, *arguments, platform="tpu", cache=False)
    program, names = analysis.program, analysis.names
    uses = np.flatnonzero(fetched_uses(program, names.use_op, names.use_value))
    return [program.value_names[int(value)] for value in names.use_value[uses]]


def weights(*widths: int) -> list[jax.ShapeDtypeStruct]:
    return [shape(*pair) for pair in itertools.pairwise(widths)]


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ((2048,) * 2, [0]),  # the largest is there when the program begins
        ((2048,) * 5, [0, 3]),  # nothing computes before the second one, which has no time
        ((2048, 2048, 2048, 2048, 8192, 2048), [3]),
        ((512, 512, 512, 32768), [2]),
    ],
)
def test_the_largest_are_fetched_as_far_as_time_allows(
    widths: tuple[int, ...], expected: list[int]
) -> None:
    found = fetched(layers, shape(8, widths[0]), weights(*widths))
    named = [int(name.split("[")[1].split("]")[0]) for name in found if "weights" in name]
    assert {*expected} <= {*named}
    assert 1 not in named


def test_layers_of_other_sizes_are_fetched_as_well() -> None:
    same = fetched(layers, shape(8, 2048), weights(*[2048] * 8))
    other = fetched(layers, shape(8, 2048), weights(*range(2048, 2056)))
    assert len(same) == len(other) > 3


def test_branches_and_slices_are_not_fetched() -> None:
    def branches(flag: Any, x: Any, weights: Any) -> Any:
        first = jax.nn.relu(x @ weights[0])
        return jax.lax.cond(
            flag, lambda: layers(first, weights[1:3]), lambda: layers(first, weights[3:])
        )

    def stacked(x: Any, stack: Any) -> Any:
        return layers(x, [stack[number] for number in range(4)])

    flag = shape(dtype="bool")
    found = fetched(branches, flag, shape(8, 2048), weights(*[2048] * 6))
    assert [name for name in found if "weights" in name] == ["weights[0]"]
    assert not [
        name for name in fetched(stacked, shape(8, 2048), shape(4, 2048, 2048)) if name != "x"
    ]


def test_copies_take_time_beside_the_schedule() -> None:
    """At the rate of the memory; the compiler's schedule has no time for them."""
    arguments = shape(8, 2048), weights(*[2048] * 9)
    analysis = toast.analyze(layers, *arguments, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=2"), min_dimensions=0)
    real, seen = (
        float(CostModel(space, hardware).price(space.initial[None]).matmul_seconds[0])
        for hardware in (V5E, V5E.as_scheduled_for)
    )
    assert real >= 8 * 2 * 2048 * 2048 / V5E.memory_bytes_per_s
    assert seen < 0.8 * real


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reads_of_gathered_weights_are_in_the_schedule(dtype: str) -> None:
    """Products wait for their gathers, not for copies."""
    arguments = (
        shape(8, 2048, dtype=dtype),
        [shape(2048, 2048, dtype=dtype) for _ in range(8)],
    )
    analysis = toast.analyze(layers, *arguments, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=4"), min_dimensions=0)
    program, gathered = analysis.program, space.initial.copy()
    for weight in program.argument_values[1:]:
        gathered[space.classes.of_op[program.values[weight].op], 0] = 0
    whole, parts = (
        CostModel(space, V5E.as_scheduled_for).price(state[None]).matmul_seconds[0]
        for state in (space.initial, gathered)
    )
    assert whole < 0.8 * parts
