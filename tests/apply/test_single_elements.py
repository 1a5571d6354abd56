"""Ops on one element of a sharded dimension, of an array that was resharded just before."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.helpers import f32
from toast import api
from toast.apply import annotate, verify
from toast.hardware import Mesh
from toast.program import Program, Shardings, Spec

INTEGERS, INTEGER = jax.ShapeDtypeStruct((64,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
HALF, WHOLE = ("data",), ("data", "model")


def accesses(x: Any, y: Any, i: Any, update: Any) -> tuple[Any, ...]:
    """Each way to access element ``i``, of resharded arrays and of products of them."""
    return tuple(
        result
        for array in (x * 5, y + 1)
        for result in (
            array.at[i].set(update),
            array.at[i].add(update),
            jax.lax.dynamic_update_slice(array, update[None], (i,)),
            jnp.take(array, i[None]),
        )
    )


def resharded(program: Program, before: tuple[str, ...], after: tuple[str, ...]) -> Shardings:
    """Sums and arguments in the sharding ``before``; products and what is indexed in ``after``."""
    indexing = ("gather", "scatter", "dynamic_update_slice")
    values: dict[int, Spec] = {}
    uses: dict[tuple[int, int], Spec] = {}
    for number, op in enumerate(program.ops):
        kind = program.kind(number)
        for value in op.results:
            if program.values[value].type.shape == (64,):
                values[value] = (after if kind in (*indexing, "multiply") else before,)
        if kind in indexing:
            uses[number, 0] = (after,)
        elif kind == "multiply":
            uses[number, 0] = uses[number, 1] = (after,)
    results = tuple(values.get(v, ((),)) for v in program.result_values)
    return Shardings(Mesh.parse("data=4,model=2"), values, uses, results)


@pytest.mark.parametrize(("before", "after"), [(HALF, WHOLE), ((), WHOLE), ((), HALF)])
def test_single_elements_of_resharded_arrays(
    before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    """XLA merges the slice of the reshard with the slice of one element, and did so wrongly."""
    program = api.program_of(accesses, INTEGERS, INTEGERS, INTEGER, INTEGER)
    shardings = resharded(program, before, after)
    for seed in range(2):
        assert verify(program, shardings, seed=seed).equal


def test_guards_stand_where_a_device_slices_one_element() -> None:
    def function(table: Any, ids: Any, row: Any, one: Any) -> tuple[Any, ...]:
        doubled = table * 2
        return doubled[ids], doubled.at[one].set(row), table.at[one].add(row)

    one, ids = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((16,), jnp.int32)
    program = api.program_of(function, f32(64, 8), ids, f32(1, 8), one)

    def barriers(spec: Spec, of_ids: Spec) -> int:
        tables = [v for v, x in enumerate(program.values) if x.type.shape == (64, 8)]
        (gather,) = [op for op in range(len(program.ops)) if program.kind(op) == "gather"]
        (indices,) = program.ops[gather].operands[1:]
        shardings = Shardings(
            Mesh.parse("d=2,m=16"), {**dict.fromkeys(tables, spec), indices: of_ids}, {},
            (((), ()), spec, spec),
        )  # fmt: skip
        return str(annotate(program, shardings)).count("stablehlo.optimization_barrier")

    whole: Spec = ((), ())
    assert barriers(whole, whole) == 0
    assert barriers(((), ("d",)), whole) == 0  # the indexed dimension is whole
    assert barriers((("d",), ()), whole) == 1  # that of the scatter into a product
    assert barriers((("d",), ()), (("m",), ())) == 2  # each device looks up one row
