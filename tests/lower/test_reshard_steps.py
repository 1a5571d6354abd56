"""Steps between shardings, run on arrays of tiles instead of devices."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toast
from tests.helpers import f32
from tests.lower.test_lowering import assert_as_predicted
from toast import api
from toast.apply.device_meshes import on_devices
from toast.apply.module_functions import flat_jit
from toast.assurance.local_proofs import random_state
from toast.cost import CostModel
from toast.cost.reshard_steps import (
    ReshardStep,
    crowded_dimensions,
    exchanged_dimensions,
    reshard_steps,
    sum_steps,
)
from toast.hardware import Mesh, load
from toast.lower import OpFactors, lower
from toast.lower.device_groups import groups
from toast.plan.shard import lowered_state
from toast.program import Shardings, Spec
from toast.space import Space

AXES = ("a", "b", "c")
MESH = Mesh((("a", 2), ("b", 2), ("c", 2)))


@st.composite
def specs(draw: st.DrawFn, rank: int = 3) -> Spec:
    """A sharding of a value with ``rank`` dimensions on the axes."""
    order = draw(st.permutations(AXES))
    places = [draw(st.integers(-1, rank - 1)) for _ in order]
    return tuple(
        tuple(axis for axis, place in zip(order, places, strict=True) if place == d)
        for d in range(rank)
    )


def steps_between(before: Spec, after: Spec) -> tuple[ReshardStep, ...]:
    """The steps where the axes divide every dimension."""
    exchanged = exchanged_dimensions(before, after, dict(MESH.axes))
    return reshard_steps(before, after, exchanged=exchanged)


@given(specs(), specs())
@settings(max_examples=200, deadline=None)
def test_steps_lead_from_one_sharding_to_the_other(before: Spec, after: Spec) -> None:
    spec = before
    for step in steps_between(before, after):
        assert step.before == spec
        spec = step.after
    assert spec == after


@given(specs(), specs())
@settings(max_examples=15, deadline=None)
def test_devices_have_the_right_elements(before: Spec, after: Spec) -> None:
    array = np.arange(8**3, dtype=np.float32).reshape(8, 8, 8)
    analysis = identity()
    program = analysis.program
    shardings = Shardings(
        MESH, {program.argument_values[0]: before, program.result_values[0]: before}, {}, (after,)
    )
    held = np.full((len(program.ops), len(AXES)), -1, dtype=np.int8)
    local = lower(analysis, shardings, OpFactors(AXES, held, np.zeros(held.shape, dtype=np.int64)))
    mesh, _ = on_devices(shardings)
    (result,) = flat_jit(program, local.module, mesh, shardings)(array)
    np.testing.assert_array_equal(result, array)


@functools.cache
def identity() -> toast.Analysis:
    return toast.analyze(api.program_of(lambda x: x, f32(8, 8, 8)))


@given(specs(), specs())
@settings(max_examples=100, deadline=None)
def test_no_step_has_more_than_both_ends(before: Spec, after: Spec) -> None:
    """Values between steps are not larger than the larger one of both ends."""
    sizes = dict(MESH.axes)

    def shards(spec: Spec) -> int:
        return math.prod(sizes[axis] for axes in spec for axis in axes if axis in sizes)

    least = min(shards(before), shards(after))
    assert all(shards(step.after) >= least for step in steps_between(before, after))


@given(specs(), specs(), st.randoms())
@settings(max_examples=100, deadline=None)
def test_only_permutes_depend_on_the_order_of_axes(before: Spec, after: Spec, random: Any) -> None:
    """Prices of other collectives do not depend on the order."""

    def others(*ends: Spec) -> list[tuple[str, frozenset[str]]]:
        steps = steps_between(*ends)
        return [(s.kind, s.axes) for s in steps if s.kind not in ("slice", "collective_permute")]

    def shuffled(spec: Spec) -> Spec:
        return tuple(tuple(random.sample(axes, len(axes))) for axes in spec)

    assert others(before, after) == others(shuffled(before), shuffled(after))


def test_axes_that_a_dimension_cannot_have_together_are_gathered_first() -> None:
    """Two elements on ``a``, then on ``b``: four devices cannot have parts of both."""
    before, after = (("a",), ("c",)), (("b",), ("c",))
    crowded = crowded_dimensions((2, 8), before, after, dict(MESH.axes))
    assert crowded == {0}
    assert [s.kind for s in reshard_steps(before, after, crowded)] == ["all_gather", "slice"]
    assert [s.kind for s in reshard_steps(before, after)] == [
        "slice", "collective_permute", "all_gather",
    ]  # fmt: skip


def test_shards_change_places_if_a_dimension_cannot_have_both_axes() -> None:
    """Two elements on ``a``, then on ``b`` of the same size: nothing is gathered."""
    sizes = {"a": 2, "b": 2, "c": 4}
    before, after = (("a",), ()), (("b",), ("c",))
    crowded = crowded_dimensions((2, 8), before, after, sizes)
    exchanged = exchanged_dimensions(before, after, sizes)
    steps = reshard_steps(before, after, crowded, exchanged)
    assert [(s.kind, s.axes) for s in steps] == [
        ("collective_permute", {"a", "b"}), ("slice", {"c"}),
    ]  # fmt: skip
    for other in ((("c",), ()), (("b",), ("a",))):  # of another size; `a` moves
        assert not exchanged_dimensions(before, other, sizes)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((("a",), ()), (("b",), ())),
        ((("a", "c"), ()), (("b", "c"), ())),
        ((("a",), ("b",)), (("b",), ("a",))),
        ((("a",), ("b",)), (("c",), ("a",))),
        ((("a", "b"), ()), (("d",), ())),
    ],
)
def test_one_permute_is_enough_if_dimensions_have_as_many_shards(before: Spec, after: Spec) -> None:
    """As Shardy and XLA do it."""
    sizes = {"a": 2, "b": 2, "c": 2, "d": 4}
    steps = reshard_steps(before, after, exchanged=exchanged_dimensions(before, after, sizes))
    assert [step.kind for step in steps] == ["collective_permute"]


def halved(x: jax.Array) -> jax.Array:
    return toast.split(toast.split(x * 2, 0, "a"), 0, "b") + 1


def test_shards_that_change_places_have_the_same_numbers() -> None:
    analysis = toast.analyze(halved, f32(2, 64))
    model = CostModel(Space(analysis, Mesh.parse("a=2,b=2")), load("tpu-v5e"))
    local = lowered_state(model, model.space.pinned)
    assert [c.kind for c in local.collectives] == ["collective_permute", "all_gather"]
    assert_as_predicted(model, model.space.pinned, local)


@pytest.mark.parametrize("mesh", ["a=2,b=2,c=2", "a=4,b=2"])
def test_prices_are_those_of_the_steps(mesh: str) -> None:
    """Also where axes change places in a cycle of dimensions."""
    model = CostModel(Space(two_ops(), Mesh.parse(mesh)), load("tpu-v5e"))
    random = np.random.default_rng(0)
    for _ in range(30):
        state = random_state(model.space, random)
        assert lowered_state(model, state).counts() == model.local_collectives(state)


def branching(x: jax.Array, n: jax.Array) -> jax.Array:
    """Branches that use the same values, next to a use outside of them, and one in another branch."""

    def nested(x: jax.Array) -> jax.Array:
        return jax.lax.cond(n > 2, jnp.tanh, lambda x: x * 2 + y, x)

    y = jnp.exp(x)
    chosen = jax.lax.switch(n, [jnp.sin, lambda x: jnp.cos(x) + y, nested, lambda x: y], x)
    return chosen + jnp.sqrt(x)


def many_uses(x: jax.Array, ws: list[jax.Array]) -> list[jax.Array]:
    return [jnp.tanh(x) @ w for w in ws]


#: Programs in which several uses need the same copy.
SHARING = {
    "branches": (branching, f32(8, 24), jax.ShapeDtypeStruct((), "int32")),
    "many_uses": (many_uses, f32(16, 8), [f32(8, 4 * n) for n in range(2, 16)]),
}


@pytest.mark.parametrize("name", SHARING)
def test_uses_that_need_the_same_copy_share_it(name: str) -> None:
    """Also more of them than prices compare, and uses in branches."""
    function, *shapes = SHARING[name]
    model = CostModel(
        Space(toast.analyze(function, *shapes), Mesh.parse("a=4,b=2")), load("tpu-v5e")
    )
    random = np.random.default_rng(0)
    for number in range(12):
        state = random_state(model.space, random)
        local = lowered_state(model, state)
        assert local.counts() == model.local_collectives(state)
        if number < 2:
            assert_as_predicted(model, state, local)


@functools.cache
def two_ops() -> toast.Analysis:
    return toast.analyze(lambda x: jax.numpy.sin(x) + 1, f32(8, 6, 24))


def test_steps_of_each_kind() -> None:
    steps = reshard_steps((("a",), ()), (("a", "b"), ()))
    assert [step.kind for step in steps] == ["slice"]
    assert [step.kind for step in reshard_steps((("a",), ()), ((), ("a",)))] == ["all_to_all"]
    assert [step.kind for step in reshard_steps((("a", "b"), ()), (("b", "a"), ()))] == [
        "collective_permute"
    ]
    assert [step.kind for step in reshard_steps((("a", "b"), ()), ((), ()))] == ["all_gather"]
    assert reshard_steps((("a",), ()), (("a",), ())) == ()


def test_gshard_3_3_2_sums_are_scattered_where_uses_want_parts() -> None:
    steps = sum_steps(((), ()), ((), ("a",)), frozenset({"a", "b"}))
    assert [(step.kind, set(step.axes)) for step in steps] == [
        ("reduce_scatter", {"a"}), ("all_reduce", {"b"}),
    ]  # fmt: skip


@pytest.mark.parametrize(("axes", "expected"), [
    (("c",), [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]),
    (("a",), [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]),
    (("c", "a"), [[0, 6, 1, 7], [2, 8, 3, 9], [4, 10, 5, 11]]),
])  # fmt: skip
def test_groups_of_devices(axes: tuple[str, ...], expected: list[list[int]]) -> None:
    mesh = Mesh((("a", 2), ("b", 3), ("c", 2)))
    assert groups(mesh, axes).tolist() == expected


def test_axes_that_move_past_others_need_no_permute() -> None:
    """Shards stay where they are if the parts of a dimension can be put in order on a device."""
    apart, together = ((), ("a", "b")), (("a",), ())
    assert [step.kind for step in reshard_steps(apart, together)] == ["all_to_all", "all_gather"]
    assert [step.kind for step in reshard_steps(together, apart)] == ["slice", "all_to_all"]
