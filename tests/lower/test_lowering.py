"""Device-local programs: their numbers are those of one device, their collectives the plan's."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import toast
from tests.helpers import analyzed, f32, mlp, random_states
from tests.regions.programs import CASES
from toast.apply import verify
from toast.cost import CostModel, Memo
from toast.errors import PlanError
from toast.hardware import COLLECTIVES, Mesh, load
from toast.lower import LocalProgram, local_forms
from toast.models import build
from toast.plan.shard import lowered_state
from toast.space import Space, States

MESHES = ("data=2", "model=4,data=2", "a=2,b=2,c=2")


def assert_as_predicted(model: CostModel, state: States, local: LocalProgram) -> None:
    """The collectives and the numbers of a device-local program."""
    assert not local.gathered
    assert local.counts() == model.local_collectives(state)
    program = local.program
    check = verify(program, local.shardings, module_of=lambda *_: local.module)
    assert check.equal, [output for output in check.outputs if not output.equal]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_random_states_run_as_priced(name: str, mesh: str) -> None:
    model = CostModel(Space(analyzed(name, small=True), Mesh.parse(mesh)), load("tpu-v5e"))
    for state in random_states(model.space, 3, seed=len(mesh)):
        assert_as_predicted(model, state, lowered_state(model, state))


def test_positions_are_rounded_once() -> None:
    """An iota of bfloat16 rounds: an offset must be added before."""
    rows = PartitionSpec("data")
    plan = toast.plan(
        lambda x: x * 0 + jnp.arange(1204, dtype=jnp.bfloat16),
        jax.ShapeDtypeStruct((1204,), jnp.bfloat16), mesh="data=4", hardware="tpu-v5e",
        lowering="local", constraints=toast.Constraints(pin={"x": rows, "result": rows}),
        settings=toast.Settings(rounds=1),
    )  # fmt: skip
    positions = plan.jit()(jnp.zeros(1204, jnp.bfloat16))
    np.testing.assert_array_equal(positions, jnp.arange(1204, dtype=jnp.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t2b", "moe", "gns", "unet", "itx", "itx-decode"])
def test_plans_of_the_zoo_run_as_priced(name: str) -> None:
    analysis = toast.analyze(build(name, small=True))
    hardware = toast.api.small_scale(analysis, Mesh.parse("data=2,model=2"), load("tpu-v5e"))
    plan = toast.plan(analysis, mesh="data=2,model=2", hardware=hardware)
    assert_as_predicted(plan.model, plan.state, plan.lowered())


@pytest.mark.parametrize("mesh", ["data=4,model=2", "tp=2,dp=4"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_manual_regions_are_inlined(name: str, mesh: str) -> None:
    case = CASES[name]
    plan = toast.plan(case.function, *case.arguments, mesh=mesh, hardware="tpu-v5e")
    local = plan.lowered()
    assert local.text.count("sdy.manual_computation") == 1
    assert local.counts() == plan.model.local_collectives(plan.state)
    random = np.random.default_rng(0)
    arguments = jax.tree.map(lambda a: random.normal(size=a.shape).astype(a.dtype), case.arguments)
    expected, actual = plan.jit()(*arguments), plan.jit(lowering="local")(*arguments)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_locations_name_the_value_the_op_and_the_steps() -> None:
    shapes = f32(512, 64), f32(64, 256), f32(256, 64)
    plan = toast.plan(
        mlp, *shapes, mesh="data=2,model=2", hardware="tpu-v5e",
        constraints=toast.Constraints(pin={"w1": PartitionSpec(None, "model")}),
    )  # fmt: skip
    local = plan.lowered()
    (collective,) = local.collectives
    assert collective.steps == (1, 3)
    assert (collective.kind, collective.axes) == ("all_gather", ("model",))
    assert '"all_gather of w1 for dot_general 3 (step 1, 3)"' in local.text


def test_locations_of_exchanges_between_neighbours_name_them_too() -> None:
    plan = toast.plan(
        lambda x: x[3:19] * 2, f32(64, 1024), mesh="data=4", hardware="tpu-v5e", lowering="local",
        constraints=toast.Constraints(pin={"x": PartitionSpec("data")}),
    )  # fmt: skip
    local = plan.lowered()
    edges = [collective for collective in local.collectives if collective.edges]
    assert edges
    for collective in edges:
        (step,) = collective.steps
        use = f"slice {collective.op}"
        assert f'"collective_permute of x for {use} (step {step})"("edges"(' in resolved(local.text)


def resolved(text: str) -> str:
    """The locations of a module, one a line, with those that they are made of."""
    known = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))
    return "\n".join(
        re.sub(r"#loc\d*", lambda m: known[m[0]], re.sub(r"#loc\d*", lambda m: known[m[0]], of))
        for of in known.values()
    )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_plan_runs_on_a_mesh_with_other_names(kind: AxisType) -> None:
    shapes = f32(512, 64), f32(64, 256), f32(256, 64)
    plan = toast.plan(mlp, *shapes, mesh="data=2,one=1,model=4", hardware="tpu-v5e")
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
    arguments = [np.random.default_rng(0).normal(size=s.shape).astype("f4") for s in shapes]
    result = plan.jit(mesh, lowering="local")(*arguments)
    assert result.sharding.mesh == mesh
    np.testing.assert_allclose(result, mlp(*map(jnp.asarray, arguments)), rtol=2e-5, atol=1e-4)


def test_donation_and_export() -> None:
    plan = toast.plan(
        lambda x, w: (x + 1, x @ w), f32(64, 32), f32(32, 8), mesh="data=4", hardware="tpu-v5e",
        donate=(0,),
    )  # fmt: skip
    run = plan.jit(lowering="local")
    assert (
        "jax.buffer_donor" in run.lower().as_text() or "tf.aliasing_output" in run.lower().as_text()
    )
    jitted = jax.jit(lambda x, w: run(x, w)[1] * 2)
    x, w = np.ones((64, 32), np.float32), np.ones((32, 8), np.float32)
    np.testing.assert_allclose(jitted(x, w), 64.0)


def test_a_wrong_local_form_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification finds an iota that begins with 0 on every device."""
    plan = toast.plan(
        lambda x: x + jnp.arange(64, dtype=jnp.float32), f32(64), mesh="data=4", hardware="tpu-v5e",
        constraints=toast.Constraints(pin={"x": PartitionSpec("data")}),
    )  # fmt: skip
    assert plan.verify(lowering="local").equal
    monkeypatch.delitem(local_forms.LOCAL_FORMS, "iota")
    assert not plan.verify(lowering="local").equal


def test_ops_without_a_local_form_run_whole_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_forms, "slides", lambda *_: False)
    plan = toast.plan(
        lambda x: x[::-1] + 1, f32(64, 8), mesh="data=4", hardware="tpu-v5e",
        constraints=toast.Constraints(pin={"x": PartitionSpec("data")}),
    )  # fmt: skip
    local = plan.lowered()
    (gathered,) = local.gathered
    assert local.program.kind(gathered.op) == "reverse"
    assert [(c.kind, c.gathers) for c in local.collectives] == [("all_gather", True)]


COMBINATIONS: dict[str, Any] = {
    "argmax": lambda x: jnp.argmax(x, 0),
    "argmax_in_parts": lambda x: jnp.argmax(x, 0) * 2 + jnp.argmax(x + 1, 0),
    "bits": lambda x: jnp.bitwise_xor.reduce(x.astype(int), axis=0) * 2,
    "an_initial_value": lambda x: jax.lax.reduce(x, x[0, 0], jax.lax.mul, (0,)),
}


@pytest.mark.parametrize("mesh", ["a=4", "a=2,b=2"])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_gshard_3_3_2_partial_results_are_combined(name: str, mesh: str) -> None:
    """By a collective if one has the combiner; if not, they are gathered, or exchanged in parts."""
    analysis = toast.analyze(COMBINATIONS[name], f32(16, 8))
    model = CostModel(Space(analysis, Mesh.parse(mesh)), load("tpu-v5e"))
    for state in random_states(model.space, 3, seed=2):
        assert_as_predicted(model, state, lowered_state(model, state))


def test_devices_agree_on_the_condition_of_a_loop() -> None:
    """It needs the largest element of all devices; the arrays that it uses are gathered."""

    def halved(x: jax.Array, limit: jax.Array) -> jax.Array:
        return jax.lax.while_loop(
            lambda x: jnp.max(x - limit) > 0, lambda x: x * 0.5 - x.sum() / 1e6, x
        )

    plan = toast.plan(
        halved, f32(64, 8), f32(8), mesh="a=4,b=2", hardware="tpu-v5e",
        constraints=toast.Constraints(pin={"x": PartitionSpec("a", "b")}),
    )  # fmt: skip
    x, limit = jnp.arange(512.0).reshape(64, 8), jnp.ones(8)
    expected = halved(x, limit)
    np.testing.assert_allclose(plan.jit(lowering="local")(x, limit), expected, rtol=1e-5)
    local = plan.lowered()
    assert local.counts() == plan.model.local_collectives(plan.state)
    # The condition of a loop without a trip count runs twice, its body once.
    gathers = [
        times for (kind, _, size), times in local.counts().items()
        if (kind, size) == ("all_gather", 64 * 8 * 4.0)
    ]  # fmt: skip
    assert sum(gathers) == 3


@pytest.mark.parametrize("trips", [3, 7])
def test_gathers_for_the_condition_of_a_loop_are_priced(trips: int) -> None:
    """Each time that it runs; XLA needs none of them.  So the plan gathers before the loop."""

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: jnp.max(x) > 0, lambda x: x - 1, x)

    counts = {}
    for lowering in ("xla", "local"):
        plan = toast.plan(
            step, f32(64, 8), mesh="a=4", hardware="tpu-v5e", trip_counts=trips,
            lowering=lowering, constraints=toast.Constraints(pin={"x": PartitionSpec("a")}),
        )  # fmt: skip
        space = plan.model.space
        states = np.stack([space.apply(space.initial, action) for action in space.actions])
        prices = plan.model.price(states)
        gathers = prices.collective_count[:, COLLECTIVES.index("all_gather")]
        planned = sum(c.count for c in plan.after.collectives if c.kind == "all_gather")
        counts[lowering] = int(gathers.max()), planned
        np.testing.assert_allclose(Memo(plan.model).price(states).seconds, prices.seconds)
    assert counts == {"xla": (0, 0), "local": (1 + trips, 1)}


def test_unknown_lowerings_are_refused() -> None:
    plan = toast.plan(mlp, f32(8, 8), f32(8, 8), f32(8, 8), mesh="data=2", hardware="tpu-v5e")
    with pytest.raises(PlanError, match="lowering 'gspmd': use xla or local"):
        plan.jit(lowering="gspmd")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["complex64", "int8", "bfloat16", "float8_e4m3fn"])
def test_element_types_of_slices_and_gathers(dtype: str) -> None:
    """Splat constants, fill values and edges of all element types."""
    shape = jax.ShapeDtypeStruct((16, 4), dtype)
    plan = toast.plan(
        lambda i, x: jnp.concatenate([x[1:15] * x.dtype.type(2), jnp.pad(x[i], ((1, 0), (0, 0)))]),
        jax.ShapeDtypeStruct((5,), "int32"), shape, mesh="a=4", hardware="tpu-v5e",
        constraints=toast.Constraints(pin={"x": PartitionSpec("a")}),
    )  # fmt: skip
    check = plan.verify(lowering="local")
    assert check.equal, check.outputs


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32"])
def test_start_indices_of_any_type(dtype: str) -> None:
    """Indices beyond the ends, and shards whose positions their type cannot hold."""
    index = jax.ShapeDtypeStruct((3,), dtype)
    x, u = f32(400, 4), f32(9, 4)

    def update(i: jax.Array, x: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = x[:100].at[i].get(mode="clip")
        return jax.lax.dynamic_update_slice(x, u, (i[0], i[1])), rows

    plan = toast.plan(
        update, index, x, u, mesh="a=4", hardware="tpu-v5e",
        constraints=toast.Constraints(pin={"x": PartitionSpec("a")}),
    )  # fmt: skip
    random = np.random.default_rng(0)
    arrays = [random.normal(size=s.shape).astype("f4") for s in (x, u)]
    lowest = 0 if dtype == "int8" else np.iinfo(dtype).min  # JAX adds 400 to negative indices
    for first in (0, 100, np.iinfo(dtype).max, lowest):
        # XLA before jax 0.11 clamps int8 to a limit that int8 cannot hold: it gets wide indices.
        indices = np.array([first, 1, 120], dtype=dtype)
        wide = indices.astype("int32") if dtype == "int8" else indices
        expected = update(*map(jnp.asarray, (wide, *arrays)))
        for a, b in zip(plan.jit(lowering="local")(indices, *arrays), expected, strict=True):
            np.testing.assert_array_equal(a, b)
