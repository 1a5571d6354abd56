"""Uneven dimensions (GShard, 3.3.1): padded programs give the results of the programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import toast
from tests.helpers import f32, random_states
from tests.lower.test_lowering import assert_as_predicted
from toast import api
from toast.apply.verify import _reference, random_arguments
from toast.assurance import instances
from toast.cost import CostModel
from toast.cost.residuals import residuals_of
from toast.errors import PlanError, SearchError
from toast.hardware import Mesh, load
from toast.plan.shard import lowered_state
from toast.program import survey
from toast.space import Space
from toast.uneven import padded_program


class Case(NamedTuple):
    """A function of arrays of these shapes."""

    function: Callable[..., Any]
    shapes: tuple[Any, ...]


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k))
    return jnp.einsum("bhqk,bhkd->bhqd", scores, v)


def train(w: Any, x: Any, y: Any) -> Any:
    def loss(w: Any) -> Any:
        logits = jax.nn.log_softmax(jnp.tanh(x @ w[0]) @ w[1])
        return -logits[jnp.arange(len(y)), y].mean()

    value, gradient = jax.value_and_grad(loss)(w)
    return value, jax.tree.map(lambda a, b: a - 0.1 * b, w, gradient)


def reductions(x: Any) -> Any:
    return x.argmax(1), x.max(0), x.min(1), x.prod(0), jnp.sort(x, 1), jnp.cumsum(x, 0)


def integers(x: Any) -> Any:
    return x.max(0), x.min(), (x > 3).any(1), (x > 3).all(0), jnp.bitwise_xor.reduce(x, axis=1)


CASES = {
    "mlp": Case(lambda x, w: jax.nn.relu(x @ w), (f32(7, 16), f32(16, 13))),
    "heads": Case(attention, (f32(3, 12, 9, 8),) * 3),
    "train": Case(
        train, ((f32(30, 21), f32(21, 57)), f32(14, 30), jax.ShapeDtypeStruct((14,), "int32"))
    ),
    "scan": Case(
        lambda x, w: lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, w),
        (f32(7, 10), f32(3, 10, 10)),
    ),
    "reductions": Case(reductions, (f32(7, 13),)),
    "integers": Case(integers, (jax.ShapeDtypeStruct((7, 13), "int32"),)),
    "unsigned": Case(lambda x: (x.max(0), x.min(1)), (jax.ShapeDtypeStruct((7, 13), "uint8"),)),
    "infinite_padding": Case(
        lambda x, y: ((x / y) @ y.T, jnp.exp(1 / x).sum(1), jnp.log(x).max(0)),
        (f32(7, 13), f32(7, 13)),
    ),
    "reshape": Case(
        lambda x, w: x.reshape(5, 3, 7, 4).transpose(0, 2, 1, 3).reshape(35, 12) @ w,
        (f32(15, 28), f32(12, 9)),
    ),
    "convolution": Case(
        lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        (f32(3, 9, 9, 5), f32(3, 3, 5, 7)),
    ),
    "embedding": Case(
        lambda e, i: e[i] @ e.T, (f32(57, 10), jax.ShapeDtypeStruct((5, 9), "int32"))
    ),
    "update": Case(
        lambda x, u, i: (lax.dynamic_update_slice(x, u, (i, 0)), x.at[i, :3].add(1)),
        (f32(13, 7), f32(3, 7), jax.ShapeDtypeStruct((), "int32")),
    ),
    "constants": Case(
        lambda x: x * np.arange(21, dtype="f4").reshape(7, 3) + jnp.arange(3), (f32(7, 3),)
    ),
    "branches": Case(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, lambda x: -x, x), (f32(7, 13),)),
    "bits": Case(
        lambda k, x: x + jax.random.uniform(jax.random.wrap_key_data(k), (7, 13)),
        (jax.ShapeDtypeStruct((2,), "uint32"), f32(7, 13)),
    ),
}  # fmt: skip


def arrays(shapes: Any) -> Any:
    random = np.random.default_rng(0)

    def array(shape: Any) -> Any:
        if np.issubdtype(shape.dtype, np.integer):
            return random.integers(0, 9, shape.shape).astype(shape.dtype)
        return random.uniform(0.5, 1.5, size=shape.shape).astype(shape.dtype)

    return jax.tree.map(array, shapes)


@pytest.mark.parametrize("mesh", ["a=4", "a=2,b=4"])
@pytest.mark.parametrize("name", CASES)
def test_gshard_3_3_1_padded_programs(name: str, mesh: str) -> None:
    """The padded program equals the program, and random states of it run as priced."""
    function, shapes = CASES[name]
    padded = padded_program(toast.analyze(function, *shapes), Mesh.parse(mesh), 1.0)
    assert padded is not None
    analysis = toast.analyze(padded.program)
    model = CostModel(Space(analysis, Mesh.parse(mesh)), load("tpu-v5e"))
    inputs = arrays(shapes)
    expected = jax.tree.leaves(jax.jit(function)(*inputs))
    plan = toast.plan(
        analysis, mesh=mesh, hardware="tpu-v5e", settings=toast.Settings(rounds=1),
        stages=(toast.search.TreeSearch(effort=8),),
    )  # fmt: skip
    for lowering in ("xla", "local"):
        results = jax.tree.leaves(plan.jit(lowering=lowering)(*inputs))
        for result, value in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, value, rtol=2e-5, atol=1e-5)
    for state in random_states(model.space, 1, seed=5):
        assert_as_predicted(model, state, lowered_state(model, state))


def test_conditions_of_loops_read_no_padding() -> None:
    """Elements of the padding, which are arbitrary, do not decide how often a loop runs."""

    def grow(x: Any) -> Any:
        return lax.while_loop(
            lambda state: (state[0].min() < 9) & (state[1] < 50),
            lambda state: (state[0] * 1.5, state[1] + 1),
            (x, 0),
        )

    padded = padded_program(toast.analyze(grow, f32(7, 13)), Mesh.parse("a=4"), 1.0)
    assert padded is not None
    (x,) = arrays((f32(7, 13),))
    results = _reference(padded.program, padded.program.source)(x)
    for result, value in zip(results, jax.jit(grow)(x), strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-5)


def test_plans_pad_where_it_pays() -> None:
    """Padding lets a product of matrices with odd dimensions be sharded."""
    shapes = f32(4097, 2049), f32(2049, 4097), f32(8)

    def product(x: Any, w: Any, bias: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w)) + bias

    even = toast.plan(product, *shapes, mesh="a=4", hardware="tpu-v5e", uneven=0)
    plan = toast.plan(product, *shapes, mesh="a=4", hardware="tpu-v5e", uneven=0.1)
    assert plan.after.step_seconds < even.after.step_seconds
    assert not any(axes for axes in even.arguments["x"])
    assert "padded, as the axes do not divide them: " in plan.note
    program = plan.analysis.program
    assert program.values[program.argument_values[0]].type.shape == (4097, 2049)


def test_plans_stay_even_where_padding_does_not_pay() -> None:
    shapes = f32(4096, 512), f32(512, 513)
    plan = toast.plan(lambda x, w: x @ w, *shapes, mesh="a=4", hardware="tpu-v5e", uneven=0.5)
    assert "padded" not in plan.note


def test_nothing_to_pad() -> None:
    analysis = toast.analyze(lambda x: x * 2, f32(8, 16))
    assert padded_program(analysis, Mesh.parse("a=4"), 1.0) is None


@pytest.mark.parametrize("share", [-0.1, 2, float("nan"), "half"])
def test_shares_that_are_none(share: Any) -> None:
    with pytest.raises(SearchError, match="use a share of added elements from 0 to 1"):
        toast.plan(lambda x: x, f32(8), mesh="a=2", hardware="tpu-v5e", uneven=share)


def test_fact_bases_cannot_be_padded() -> None:
    analysis = toast.analyze(lambda x: x * 2, f32(7, 16))
    without = dataclasses.replace(
        analysis, program=dataclasses.replace(analysis.program, source=None)
    )
    with pytest.raises(PlanError, match="is a fact base and has no program to pad"):
        padded_program(without, Mesh.parse("a=4"), 1.0)


#: Kinds that this machine runs on one device.
KINDS = (
    "add", "and", "broadcast_in_dim", "chlo_conj", "chlo_erf", "clamp", "concatenate",
    "convolution", "dot_general", "gather", "iota", "pad", "reduce", "reduce_window", "reshape",
    "reverse", "scatter", "select", "slice", "sort", "transpose",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_padded_ops_of_each_kind(kind: str) -> None:
    """Random ops of a kind give the same results in a padded program."""
    program = instances.program_of(instances.draw(kind, 4, 3), kind)
    padded = padded_program(toast.analyze(program), Mesh.parse("a=4"), 1.0)
    if padded is None:
        return
    with jax.enable_x64(True):
        arguments = random_arguments(program, 0)
        expected = _reference(program, program.source)(*arguments)
        results = _reference(padded.program, padded.program.source)(*arguments)
    for result, value in zip(results, expected, strict=True):
        wide = (np.asarray(array).astype("complex128") for array in (result, value))
        np.testing.assert_allclose(*wide, rtol=1e-4, atol=1e-5)


def test_a_padded_program_with_a_roll_is_that_which_was_given() -> None:
    """Shifts are rewritten before the padding: plans and checks refer to the user's program."""

    def rolled(x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.roll(x, 1, 0))

    given = api.program_of(rolled, jax.ShapeDtypeStruct((64, 50), jnp.float32))
    analysis = toast.analyze(given, lowering="local")
    larger = padded_program(analysis, Mesh.parse("data=4"), 1.0)
    assert larger is not None
    kinds = {larger.program.kind(op) for op in range(len(larger.program.ops))}
    assert "concatenate" not in kinds
    assert larger.program.padding
    assert larger.program.origin_digest == analysis.program.origin_digest == given.digest
    assert larger.program.source.whole is given.source


@pytest.mark.parametrize("shared", [False, True])
def test_surveys_keep_the_names_of_residuals(shared: bool) -> None:
    """Their names are no ops: the operations that give them take the padded types."""
    table = np.arange(13.0, dtype=np.float32)[:, None]

    @toast.checkpoint
    def layer(x: jax.Array, w: jax.Array, t: jax.Array) -> jax.Array:
        return x + (jnp.sin(x @ w) * t) @ w.T

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            tables = (table, table) if shared else (table, 2.0 * table)
            return jnp.mean(layer(layer(x, weights[0], tables[0]), weights[1], tables[1]) ** 2)

        return jax.grad(loss)(weights)

    analysis = toast.analyze(step, f32(2, 64, 128), f32(13, 64), remat=survey())
    larger = padded_program(analysis, Mesh.parse("a=4"), 0.5)
    assert larger is not None
    assert "x:0 from 13 to 16 elements (+23 %)" in [str(d.record) for d in larger.dimensions]
    whole, program = analysis.program, larger.program
    assert sorted(program.labels.values()) == sorted(whole.labels.values())
    names = [
        [(r.name, len(r.forward), len(r.again)) for r in residuals_of(each, {}).named]
        for each in (whole, program)
    ]
    assert names[0] == names[1]
