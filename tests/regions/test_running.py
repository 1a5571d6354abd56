"""Plans of programs with ``jax.shard_map`` compute what JAX computes on the program's own mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import toast
from tests.helpers import f32
from tests.regions.programs import CASES, RING, Case, shard_map
from toast.apply import annotate, collectives_in
from toast.evaluation.oracle.explicit import explicit_collectives
from toast.hardware import Mesh, load
from toast.search import TreeSearch


@functools.cache
def planned(name: str, mesh: str = "data=4,model=2") -> toast.Plan:
    case = CASES[name]
    return toast.plan(
        case.function, *case.arguments, mesh=mesh, hardware="tpu-v5e", donate=case.donate,
        settings=toast.Settings(rounds=1), stages=(TreeSearch(effort=24),),
    )  # fmt: skip


def random_values(case: Case) -> Any:
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: (0.3 * random.standard_normal(x.shape)).astype(np.float32), case.arguments
    )


def check_against_jax(name: str, mesh: str) -> None:
    """The plan on ``mesh`` and JAX, on the mesh of the program, compute the same."""
    case, plan = CASES[name], planned(name, mesh)
    values = random_values(case)
    sizes = (4,) if name == "branches" else (4, 2)
    names = ("data", "model")[: len(sizes)]
    own = jax.make_mesh(
        sizes, names, axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[: int(np.prod(sizes))],
    )  # fmt: skip
    replicated = jax.sharding.NamedSharding(own, P())
    expected = jax.jit(case.function)(*jax.device_put(values, replicated))
    actual = plan.jit()(*jax.tree.map(jnp.array, values))
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(CASES))
def test_plans_compute_what_jax_computes(name: str) -> None:
    check_against_jax(name, "data=4,model=2")


@pytest.mark.parametrize("name", ["megatron", "nested", "ring", "every_collective", "branches"])
@pytest.mark.parametrize("mesh", ["model=2,data=4", "one=1,data=4,tp=2"])
def test_numbers_of_devices_are_those_of_the_plans_mesh(name: str, mesh: str) -> None:
    check_against_jax(name, mesh)


@pytest.mark.parametrize("name", ["over_data", "experts", "nested", "train_step"])
def test_verify_runs_the_program_on_its_own_mesh(name: str) -> None:
    assert planned(name).verify().equal


def test_verify_needs_no_more_devices_than_the_axes_of_regions() -> None:
    mesh = AbstractMesh((64, 4), ("pod", "data"), axis_types=(AxisType.Auto,) * 2)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    def rolled(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, "data", RING) + lax.axis_index("data")

    plan = toast.plan(rolled, f32(16, 8), mesh="data=4,model=2", hardware="tpu-v5e")
    assert plan.verify().equal


#: Collectives by kind in XLA's text, where a loop counts once and equal sums are combined.
COMPILED = {
    "megatron": {"all_reduce": 1},
    "over_data": {"all_reduce": 1},
    "ring": {"collective_permute": 1},
    "experts": {"all_to_all": 2},
    "nested": {"all_reduce": 1},
    "every_collective": {
        "all_gather": 1, "all_reduce": 1, "reduce_scatter": 1, "all_to_all": 1,
        "collective_permute": 1,
    },
    "scanned": {"all_reduce": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(COMPILED))
def test_xla_adds_no_collective_to_those_of_the_program(name: str) -> None:
    plan = planned(name)
    assert collectives_in(plan.jit().compiled_text()) == COMPILED[name]
    predicted = {c.kind for c in plan.after.collectives if c.count}
    assert predicted == set(COMPILED[name])


@pytest.mark.parametrize("name", ["megatron", "over_data", "experts", "nested", "train_step"])
def test_reshards_at_the_boundary_are_those_of_shardy(name: str) -> None:
    plan = planned(name)
    found = explicit_collectives(plan.analysis.program, plan.shardings)
    assert found == plan.model.reshards(plan.state)


def test_axes_that_pass_through_shard_the_body() -> None:
    plan = planned("over_data")
    program = plan.analysis.program
    axes = {
        axis
        for value, spec in plan.shardings.values.items()
        if program.kind(program.values[value].op) == "dot_general"
        for dims in spec for axis in dims
    }  # fmt: skip
    assert axes == {"model"}


def test_donated_buffers_are_reused() -> None:
    plan = planned("train_step")
    assert plan.analysis.program.aliases == (-1, 0, 1)
    runnable = plan.jit()
    params, x = jax.tree.map(jnp.array, random_values(CASES["train_step"]))
    params = jax.device_put(params, plan.shardings_for().in_shardings[0])
    losses = []
    for _ in range(3):
        old = params
        value, params = runnable(params, x)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True)


def test_a_plan_runs_on_a_mesh_of_other_names() -> None:
    """The names of the running mesh replace those of the plan in the region too."""
    plan = planned("megatron")
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    values = random_values(CASES["megatron"])
    np.testing.assert_allclose(plan.jit(mesh)(*values), plan.jit()(*values), rtol=1e-6, atol=1e-6)


def test_collectives_of_regions_have_channels_of_their_own() -> None:
    plan = planned("every_collective")
    text = str(annotate(plan.analysis.program, plan.shardings))
    assert [f"handle = {n}," in text for n in range(1, 7)] == [True] * 5 + [False]


def test_a_file_with_a_region_runs(tmp_path: Any) -> None:
    case = CASES["megatron"]
    path = tmp_path / "region.mlir"
    path.write_text(jax.jit(case.function).lower(*case.arguments).as_text())
    plan = toast.plan(
        path, mesh="model=2,data=4", hardware="tpu-v5e", stages=(TreeSearch(effort=24),)
    )
    values = random_values(case)
    np.testing.assert_allclose(
        plan.jit()(*values)[0], planned("megatron").jit()(*values), rtol=1e-5, atol=1e-6
    )


def test_a_region_on_devices_in_another_order() -> None:
    """Groups of numbers, as JAX 0.10 writes them, and devices that a mesh lists itself."""
    text = """module {
      sdy.mesh @mesh = <["data"=4, "model"=2], device_ids=[7, 6, 5, 4, 3, 2, 1, 0]>
      func.func public @main(%x: tensor<8x4xf32>) -> tensor<2x4xf32> {
        %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"data"}, {}]>]
            out_shardings=[<@mesh, [{}, {}]>] manual_axes={"data", "model"}
            (%a: tensor<2x4xf32>) {
          %1 = "stablehlo.all_reduce"(%a) <{
              channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
              replica_groups = dense<[[7, 5, 3, 1], [6, 4, 2, 0]]> : tensor<2x4xi64>,
              use_global_device_ids}> ({
            ^bb0(%b: tensor<f32>, %c: tensor<f32>):
              %2 = stablehlo.add %b, %c : tensor<f32>
              stablehlo.return %2 : tensor<f32>
          }) : (tensor<2x4xf32>) -> tensor<2x4xf32>
          sdy.return %1 : tensor<2x4xf32>
        } : (tensor<8x4xf32>) -> tensor<2x4xf32>
        return %0 : tensor<2x4xf32>
      }
    }"""
    from toast.frontend import mlir, stablehlo

    program = stablehlo.from_module(mlir.parse(text, "region"), name="region")
    plan = toast.plan(program, mesh="data=4,model=2", hardware="tpu-v5e")
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    (result,) = plan.jit()(x)
    np.testing.assert_allclose(result, x.reshape(4, 2, 4).sum(0))
    (kind,) = [t for t in plan.transfers if t.kind == "all_reduce"]
    assert kind.axes == ("data",)


def collective(body: Callable[[jax.Array], jax.Array], out: Any) -> Callable[..., Any]:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return jax.shard_map(
        body, mesh=mesh, in_specs=P("data"), out_specs=out, axis_names={"data"}, check_vma=False
    )


#: One collective each, and whether XLA runs it on shards along an axis that the region lets pass.
ALONE = {
    "all_reduce": (collective(lambda x: lax.psum(x, "data"), P()), True),
    "collective_permute": (collective(lambda x: lax.ppermute(x, "data", RING), P("data")), True),
    "all_gather": (collective(lambda x: lax.all_gather(x, "data", tiled=True), P()), False),
    "reduce_scatter": (
        collective(lambda x: lax.psum_scatter(x, "data", tiled=True), P("data")), False,
    ),
    "all_to_all": (
        collective(lambda x: lax.all_to_all(x.reshape(4, 2, 16), "data", 0, 0), P("data")), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(ALONE))
def test_rules_of_collectives_in_regions_are_what_xla_does(kind: str) -> None:
    function, passes = ALONE[kind]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharded = jax.sharding.NamedSharding(mesh, P("data", "model"))
    lowered = jax.jit(function, in_shardings=sharded).lower(f32(32, 16))
    gathered = collectives_in(lowered.compile().as_text()).get("all_gather", 0)
    assert gathered == (kind == "all_gather") + (not passes)
    analysis = toast.analyze(function, f32(32, 16))
    program = analysis.program
    (op,) = [n for n in range(len(program.ops)) if program.kind(n) == kind]
    factors = analysis.rules[program.ops[op].signature].factors
    assert any(factor.shardable for factor in factors) == passes


@pytest.mark.parametrize("mesh", ["data=4,model=2", "model=2,data=4"])
def test_regions_that_split_dimensions_in_contradictory_orders(mesh: str) -> None:
    """A plan has one order of axes; the others change places at the boundary, and are priced."""
    first, then = P(("data", "model")), P(("model", "data"))

    def both(x: jax.Array) -> jax.Array:
        places = ("data", "model")
        one = shard_map(lambda a: a * (1 + lax.axis_index(places)), in_specs=first, out_specs=first)
        two = shard_map(lambda a: a + lax.axis_index("model"), in_specs=then, out_specs=then)
        return two(one(x))

    plan = toast.plan(
        both, f32(32, 16), mesh=mesh, hardware="tpu-v5e", stages=(TreeSearch(effort=16),)
    )
    found = plan.verify()
    assert found.equal
    predicted = {c.kind: c.count for c in plan.after.collectives if c.count}
    assert found.collectives == predicted
    (moved,) = {e.why for e in plan.explain_collectives()}
    assert moved.startswith("a region needs shards in another order of ")


@pytest.mark.parametrize("lowering", ["xla", "local"])
def test_a_program_that_is_manual_over_some_axes_is_planned_over_the_others(lowering: Any) -> None:
    """A train step: gradients are summed by hand over ``data``; the search shards ``model``."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

    def step(weights: Any, x: jax.Array, y: jax.Array) -> Any:
        def by_hand(weights: Any, x: jax.Array, y: jax.Array) -> Any:
            def loss(weights: Any) -> jax.Array:
                return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1] - y) ** 2)

            weights = jax.tree.map(lambda w: jax.lax.pcast(w, "data", to="varying"), weights)
            return jax.tree.map(lambda g: jax.lax.pmean(g, "data"), jax.grad(loss)(weights))

        gradients = jax.shard_map(
            by_hand, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(),
            axis_names={"data"},
        )(weights, x, y)  # fmt: skip
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    random = np.random.default_rng(0)
    shapes = ((16, 64), (64, 16)), (8, 16), (8, 16)
    arguments = jax.tree.map(
        lambda shape: random.normal(size=shape).astype("f4"), shapes,
        is_leaf=lambda leaf: isinstance(leaf[0], int),
    )  # fmt: skip
    analysis = toast.analyze(step, *arguments, lowering=lowering)
    hardware = toast.api.small_scale(analysis, Mesh.parse("data=4,model=2"), load("tpu-v5e"))
    plan = toast.plan(analysis, mesh="data=4,model=2", hardware=hardware)
    assert "model" in {axis for axes in plan.arguments["weights[0]"] for axis in axes}
    assert "manual over data at " in plan.note
    for result, expected in zip(plan.jit(mesh)(*arguments), step(*arguments), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert plan.lowered().counts() == plan.model.local_collectives(plan.state)
