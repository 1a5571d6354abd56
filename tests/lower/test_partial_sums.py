"""Partial sums stay partial as long as ops are linear (GShard, 3.3): one collective for all."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import toast
from tests.helpers import f32, random_states
from tests.lower.test_lowering import assert_as_predicted
from toast.cost import CostModel
from toast.hardware import COLLECTIVES, Mesh, load
from toast.plan.shard import lowered_state
from toast.space import Space

X, W = f32(16, 64), f32(64, 16)


def branches(x: Any, a: Any, b: Any, c: Any) -> Any:
    """The gradients of the inputs of queries, keys and values look like this."""
    return x @ a + x @ b + x @ c


#: Functions of (x, a, b, c), and the sums over devices that remain if the columns of x are sharded.
CASES: dict[str, tuple[Callable[..., Any], int]] = {
    "three_products": (branches, 1),
    "difference": (lambda x, a, b, c: x @ a - (x @ b) * 2 - x @ c / 3, 1),
    "negated": (lambda x, a, b, c: -(x @ a) + x @ b, 1),
    "used_twice": (lambda x, a, b, c: (x @ a + x @ b, x @ a), 2),
    "not_linear": (lambda x, a, b, c: jnp.tanh(x @ a) + x @ b + x @ c, 3),
    "with_another_value": (lambda x, a, b, c: (x @ a + 1) + x @ b, 2),
    "reduced": (lambda x, a, b, c: (x @ a).sum(0), 1),
    "reduced_by_groups": (lambda x, a, b, c: (x @ a).reshape(4, 4, 16).sum(1) + 1, 1),
    "masked_and_reduced": (lambda x, a, b, c: ((x @ a) * jnp.cos(x[:, :16])).sum(1), -1),
    "sliced": (lambda x, a, b, c: (x @ a)[:8] * 2, 1),
    "added_and_reduced": (lambda x, a, b, c: (x @ a + x @ b).sum(0) - (x @ c).sum(0), -1),
    "smaller_product": (lambda x, a, b, c: (x @ a) @ jnp.ones((16, 2)), 1),
    "larger_product": (lambda x, a, b, c: (x[:, :16].T @ x[:, :16]) @ jnp.ones((16, 99)), -1),
    "rounded": (lambda x, a, b, c: (x @ a).astype(jnp.bfloat16), 1),
    "widened_and_reduced": (
        lambda x, a, b, c: jnp.sum((x @ a).astype(jnp.bfloat16), 0, initial=3),
        1,
    ),
    "in_a_loop": (
        lambda x, a, b, c: jax.lax.scan(lambda s, _: (s + x @ a + x @ b, None), x @ c, length=3)[0],
        -1,
    ),
    "in_a_branch": (
        lambda x, a, b, c: jax.lax.cond(
            x[0, 0] > 0, lambda p: p + x @ b, lambda p: p - x @ c, x @ a
        ),
        -1,
    ),
}


@pytest.mark.parametrize("lowering", ["xla", "local"])
@pytest.mark.parametrize("name", CASES)
def test_gshard_3_3_sums_wait_for_one_another(name: str, lowering: Any) -> None:
    function, sums = CASES[name]
    plan = toast.plan(
        function, X, W, W, W, mesh="data=4", hardware="tpu-v5e", lowering=lowering,
        overlap="none", constraints=toast.Constraints(
            pin={"x": P(None, "data"), **dict.fromkeys("abc", P("data"))}
        ),
        settings=toast.Settings(rounds=1),
    )  # fmt: skip
    local = plan.lowered()
    kinds = [c.kind for c in local.collectives for _ in range(c.repeats)]
    if sums >= 0:
        assert len([kind for kind in kinds if kind in ("all_reduce", "reduce_scatter")]) == sums
    assert_as_predicted(plan.model, plan.state, local)


#: Functions of (x, a), and the value that devices reduce: its shape, unsharded.
SMALLER: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "rows": (lambda x, a: (x @ a).sum(0), (512,)),
    "groups": (lambda x, a: (x @ a).reshape(16, 256, 512).sum(1) + 1, (16, 512)),
    "part": (lambda x, a: (x @ a)[:8], (8, 512)),
    "product": (lambda x, a: (x @ a) @ jnp.ones((512, 2)), (4096, 2)),
}


@pytest.mark.parametrize("name", SMALLER)
def test_gshard_3_3_sums_are_reduced_where_they_are_smallest(name: str) -> None:
    function, shape = SMALLER[name]
    plan = toast.plan(
        function, f32(4096, 1024), f32(1024, 512), mesh="data=4",
        hardware="tpu-v5e", lowering="local",
        constraints=toast.Constraints(pin={"x": P(None, "data"), "a": P("data")}),
        settings=toast.Settings(rounds=1),
    )  # fmt: skip
    local = plan.lowered()
    counts = local.counts()
    assert counts == plan.model.local_collectives(plan.state)
    size = 4.0 * math.prod(shape)
    sums = {key: times for key, times in counts.items() if "reduce" in key[0]}
    assert sums in ({("all_reduce", ("data",), size): 1}, {("reduce_scatter", ("data",), size): 1})
    (sent,) = plan.model.price(plan.state[None]).sent_bytes
    assert sent < 8 * size


@pytest.mark.parametrize("mesh", ["data=4", "a=2,b=4"])
@pytest.mark.parametrize("name", CASES)
def test_gshard_3_3_random_shardings(name: str, mesh: str) -> None:
    function, _ = CASES[name]

    def gradients(*arguments: Any) -> Any:
        return jax.grad(lambda *x: sum(jnp.sum(y**2) for y in jax.tree.leaves(function(*x))))(
            *arguments
        )

    analysis = toast.analyze(gradients, X, W, W, W)
    model = CostModel(Space(analysis, Mesh.parse(mesh)), load("tpu-v5e"))
    for state in random_states(model.space, 2, seed=5):
        assert_as_predicted(model, state, lowered_state(model, state))


def started(x: Any, number: float) -> Any:
    return jax.lax.reduce(x, jnp.asarray(number, x.dtype), jax.lax.add, (0,))


#: Functions of x (rows of real numbers) and n (integers), whose sums are not those of products:
#: their local forms mask rows, or begin with a number.
OTHER_SUMS: dict[str, Callable[..., Any]] = {
    "rows_of_a_table": lambda x, n: x[n[:, 0] % 12] + x[n[:, 1] % 12],
    "rounded_rows": lambda x, n: x[n[:, 0] % 12].astype(jnp.bfloat16)[:2].reshape(-1),
    "initial_value": lambda x, n: started(x, 3)[:5],
    "initial_values": lambda x, n: started(x, 3) + started(x * x, 4) / 2,
    "added_rows": lambda x, n: x[:4].at[n[:12, 0] % 4].add(x)[:2] * 3,
    "segments": lambda x, n: jax.ops.segment_sum(x, n[:12, 0] % 4, 4).sum(0),
    "one_row": lambda x, n: jax.lax.dynamic_slice_in_dim(x, n[0, 0] % 12, 2) - x[n[:2, 1] % 12],
    "quotients_of_integers": lambda x, n: jax.lax.div(n.sum(0), 3) - jax.lax.div((n * n).sum(0), 7),
    "products_of_integers": lambda x, n: n.sum(0) * 3 - (n * n).sum(0),
    "in_a_branch": lambda x, n: jax.lax.cond(
        n[0, 0] > 0, lambda y: y[n[:, 0] % 12] * 2, lambda y: y[n[:, 1] % 12] - 1, x
    ),
}


@pytest.mark.parametrize("name", OTHER_SUMS)
def test_gshard_3_3_other_sums_than_those_of_products(name: str) -> None:
    function = OTHER_SUMS[name]
    analysis = toast.analyze(
        function, f32(12, 8), jax.ShapeDtypeStruct((16, 4), jnp.int32), lowering="local"
    )
    model = CostModel(Space(analysis, Mesh.parse("a=2,b=2")), load("tpu-v5e"))
    single = [model.space.apply(model.space.initial, action) for action in model.space.actions]
    for state in (*single, *random_states(model.space, 6, seed=2)):
        assert_as_predicted(model, state, lowered_state(model, state))


def test_gshard_3_3_sums_are_not_rounded_to_types_of_a_smaller_range() -> None:
    x = jnp.concatenate([jnp.full((16, 32), -3e3), jnp.full((16, 32), 3e3)], 1).astype(jnp.bfloat16)
    plan = toast.plan(
        lambda x, a: (x @ a).astype(jnp.float16)[:8], x, jnp.ones((64, 16), jnp.bfloat16),
        mesh="data=4", hardware="tpu-v5e", lowering="local",
        constraints=toast.Constraints(pin={"x": P(None, "data"), "a": P("data")}),
        settings=toast.Settings(rounds=1),
    )  # fmt: skip
    assert not plan.jit()(x, jnp.ones((64, 16), jnp.bfloat16)).any()


@pytest.mark.parametrize("mesh", ["a=2,b=2,c=2", "a=4,b=2"])
def test_prices_have_the_sums_that_are_emitted(mesh: str) -> None:
    """Sums that wait, and those that a reshard on the way keeps from waiting."""

    def function(x: Any, w: Any, y: Any) -> Any:
        z = (x @ w).reshape(16, 32, 512) * y.reshape(16, 32, 512)
        return z.transpose(1, 0, 2).sum((0, 1))

    analysis = toast.analyze(
        function, f32(512, 256), f32(256, 512), f32(512, 512), lowering="local"
    )  # fmt: skip
    model = CostModel(Space(analysis, Mesh.parse(mesh)), load("tpu-v5e"))
    waiting = 0
    for state in random_states(model.space, 60, seed=3):
        counts = model.local_collectives(state)
        waiting += bool(model.joint_sums(state))
        emitted = sum(key[2] * n for key, n in counts.items() if key[0] == "all_reduce")
        prices = model.price(state[None])
        priced = float(prices.collective_bytes[0, COLLECTIVES.index("all_reduce")])
        assert priced >= 0.9 * emitted
    assert waiting


def test_gshard_3_3_totals_whose_shards_change_places() -> None:
    """Sums scattered along axes that the order of the mesh puts before others."""
    analysis = toast.analyze(branches, X, W, W, W)
    model = CostModel(Space(analysis, Mesh.parse("a=2,b=2,c=2")), load("tpu-v5e"))
    permutes = 0
    for state in random_states(model.space, 60, seed=1):
        local = lowered_state(model, state)
        assert local.counts() == model.local_collectives(state)
        if model.joint_sums(state):
            permutes += sum(c.kind == "collective_permute" for c in local.collectives)
    assert permutes


def test_the_total_names_the_value_and_the_steps() -> None:
    plan = toast.plan(
        branches, X, W, W, W, mesh="data=4", hardware="tpu-v5e",
        constraints=toast.Constraints(pin={"x": P(None, "data"), **dict.fromkeys("abc", P("data"))}),
        settings=toast.Settings(rounds=1),
    )  # fmt: skip
    (total, *_) = (c for c in plan.lowered().collectives if "reduce" in c.kind)
    program = plan.analysis.program
    assert program.kind(total.op) == "add"
    assert program.kind(program.values[total.value].op) == "dot_general"


#: The call by which JAX solves triangular systems on CPUs, as ``ij, jk -> ik``: every dimension stays whole.
SOLVE = """custom_call_rule("lapack_strsm_ffi").
%! solve(Op): a call of it.
solve(Op) :- op(Op,custom_call), attribute(Op,call_target_name,"lapack_strsm_ffi").
factor(Op,(T,D),T,D)       :- solve(Op), tensor_dim(Op,T,D,_).
need_replication(Op,(T,D)) :- solve(Op), tensor_dim(Op,T,D,_).
"""


@pytest.mark.parametrize(
    ("stated", "rows"),
    [("", 64), ("linear(Op,1) :- solve(Op).\n", 8), ("linear(Op,0) :- solve(Op).\n", 64)],
)
def test_sums_pass_a_custom_call_whose_rule_says_that_it_is_linear(
    stated: str, rows: int, tmp_path: pathlib.Path
) -> None:
    def function(a: Any, x: Any, w: Any) -> Any:
        a = jnp.eye(64) + jnp.tril(a) / 64
        return jax.lax.linalg.triangular_solve(a, x @ w, left_side=True, lower=True)[:8]

    rule = tmp_path / "solve.lp"
    rule.write_text(SOLVE + stated)
    analysis = toast.analyze(
        function, f32(64, 64), f32(64, 16), f32(16, 32), rules=[rule], lowering="local"
    )
    model = CostModel(Space(analysis, Mesh.parse("data=4")), load("tpu-v5e"))
    sums = []
    for action in model.space.actions:
        state = model.space.apply(model.space.initial, action)
        counts = model.local_collectives(state)
        if reduced := [size for kind, _, size in counts if kind == "all_reduce"]:
            sums += reduced
            assert_as_predicted(model, state, lowered_state(model, state))
    assert sums == [4.0 * rows * 32]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "uint64"])
@pytest.mark.parametrize("reduction", [jnp.max, jnp.min])
def test_extremes_of_types_without_infinities(dtype: str, reduction: Callable[..., Any]) -> None:
    with jax.enable_x64(True):
        plan = toast.plan(
            lambda x: reduction(x, axis=1), jax.ShapeDtypeStruct((3, 16), dtype),
            mesh="a=4", hardware="tpu-v5e", lowering="local",
            constraints=toast.Constraints(pin={"x": P(None, "a")}),
            settings=toast.Settings(rounds=1),
        )  # fmt: skip
        assert plan.verify().equal


def test_a_reduction_that_a_device_computes_whole_begins_as_on_one_device() -> None:
    """The products underflow unless they begin with the large number."""

    def function(x: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.reduce(x, start * 1e30, jax.lax.mul, (1,))

    plan = toast.plan(
        function, f32(8, 35), f32(), mesh="a=4", hardware="tpu-v5e", lowering="local",
        settings=toast.Settings(rounds=1),
    )  # fmt: skip
    assert plan.verify().equal
