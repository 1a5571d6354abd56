"""Axes of one device shard nothing: they are left out of the search, and plans have them."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import toast
from tests.helpers import f32, mlp
from toast.errors import MeshError, PinError
from toast.evaluation.compare import compare
from toast.hardware import Mesh, load
from toast.report.html import drawing
from toast.space import broken

SHAPES = (f32(4096, 512), f32(512, 2048), f32(2048, 512))
PLAIN = "data=4,model=2"
#: The axes of a MaxText mesh.
MANY = (
    "diloco=1,data=4,stage=1,fsdp=1,fsdp_transpose=1,sequence=1,context=1,tensor=1,"
    "tensor_transpose=1,tensor_sequence=1,model=2,expert=1,autoregressive=1"
)


def planned(mesh: str, **options: object) -> toast.Plan:
    return toast.plan(mlp, *SHAPES, mesh=mesh, hardware="tpu-v5e", **options)  # type: ignore[arg-type]


def jax_mesh(text: str, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    mesh = Mesh.parse(text)
    return jax.make_mesh(mesh.sizes, mesh.names, axis_types=(kind,) * len(mesh.axes))


def test_they_are_left_out_of_the_search_and_plans_have_them() -> None:
    plain, many = planned(PLAIN), planned(MANY)
    assert str(many.mesh) == str(many.shardings.mesh) == MANY
    assert str(many.model.space.mesh) == PLAIN
    assert many.arguments == plain.arguments
    assert (many.cost, many.after, many.states) == (plain.cost, plain.after, plain.states)
    assert (many.state == plain.state).all()
    assert [s.axis for s in many.steps] == [s.axis for s in plain.steps]
    assert many.in_shardings == plain.in_shardings
    assert many.explain_collectives() == plain.explain_collectives()
    assert many.explain_argument("x") == plain.explain_argument("x")


def test_plans_with_them_run_on_the_mesh_of_the_user() -> None:
    mesh = jax_mesh(MANY)
    plan = toast.plan(mlp, *SHAPES, mesh=mesh, hardware="tpu-v5e")
    arrays = [np.full(shape.shape, 0.01, np.float32) for shape in SHAPES]
    result = plan.jit(mesh)(*arrays)
    np.testing.assert_allclose(result, mlp(*map(jnp.asarray, arrays)), rtol=1e-4)
    assert result.sharding.mesh == mesh
    assert plan.verify().equal
    # A plan for the real axes alone runs there, too.
    again = planned(PLAIN).jit(mesh)(*arrays)
    assert again.sharding.is_equivalent_to(result.sharding, 2)
    assert again.sharding.mesh == mesh


def test_the_limit_is_on_axes_of_several_devices() -> None:
    ones = ",".join(f"one{number}=1" for number in range(40))
    mesh = Mesh.parse(f"{ones},a=2,b=2")
    assert mesh.real == Mesh.parse("a=2,b=2")
    assert Mesh.parse(f"{ones},a=2,b=2@b,{','.join(mesh.names[:40])},a").real.order == ("b", "a")
    assert Mesh.parse("a=1,b=1").real == Mesh.parse("a=1")
    with pytest.raises(MeshError, match="mesh of 65 axes, more than 64; leave out axes of size 1"):
        Mesh(tuple((f"one{number}", 1) for number in range(65)))


def test_pins_that_name_them_come_back_as_written() -> None:
    pin = {"x": P(("data", "fsdp")), "w1": P("fsdp", ("tensor", "model"))}
    plan = planned(MANY, constraints=toast.Constraints(pin=pin))
    assert plan.arguments["x"] == (("data", "fsdp"), ())
    assert plan.arguments["w1"] == (("fsdp",), ("tensor", "model"))
    plain = planned(
        PLAIN, constraints=toast.Constraints(pin={"x": P("data"), "w1": P(None, "model")})
    )
    assert plan.cost == plain.cost
    mesh = jax_mesh(MANY)
    arrays = [np.full(shape.shape, 0.01, np.float32) for shape in SHAPES]
    np.testing.assert_allclose(plan.jit(mesh)(*arrays), mlp(*arrays), rtol=1e-4)
    assert plan.shardings_for(mesh).in_shardings[0] == NamedSharding(
        mesh, P(("data", "fsdp"), None)
    )
    assert not broken(plan.analysis, plan.mesh, plan.constraints, plan.op_state)


def test_pins_that_differ_in_them_only_agree() -> None:
    pin = {"x": P(("data", "fsdp")), "*": P("data")}
    plan = planned(MANY, constraints=toast.Constraints(pin=pin))
    assert plan.arguments["x"] == (("data", "fsdp"), ())


def test_forbid_and_fix_along_them_change_nothing() -> None:
    constraints = toast.Constraints(forbid={"x": ["fsdp", "stage"]}, fix={"w1:0": "expert"})
    assert planned(MANY, constraints=constraints).arguments == planned(PLAIN).arguments


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        (P("fsdp", "fsdp"), "axis fsdp occurs twice; an axis can shard only one dimension"),
        (P("rows"), f"no axis rows in mesh {MANY}; use diloco, data"),
    ],
)
def test_wrong_pins_are_refused_as_ever(pin: P, message: str) -> None:
    with pytest.raises(PinError, match=message):
        planned(MANY, constraints=toast.Constraints(pin={"x": pin}))


def test_why_not_along_one_is_the_plan_itself() -> None:
    plan = planned(MANY)
    data = plan.arguments["x"][0]
    answer = plan.why_not("x", P((*data, "fsdp")), search=False)
    assert not answer.impossible
    assert answer.pinned is not None
    assert answer.pinned.arguments == ()
    assert answer.pinned.plan.after == plan.after


def test_the_program_s_own_shardings_may_name_them() -> None:
    mesh = jax_mesh(MANY)

    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        hidden = jax.lax.with_sharding_constraint(
            x @ w, NamedSharding(mesh, P(("data", "fsdp"), ("tensor", "model")))
        )
        return jnp.tanh(hidden)

    shapes = SHAPES[:2]
    for keep in (False, True):
        plan = toast.plan(
            function, *shapes, mesh=mesh, hardware="tpu-v5e",
            constraints=toast.Constraints(keep=keep),
        )  # fmt: skip
        assert plan.note == ""
    assert plan.shardings.results == ((("data",), ("model",)),)
    arrays = [np.full(shape.shape, 0.01, np.float32) for shape in shapes]
    np.testing.assert_allclose(
        plan.jit(mesh)(*arrays), function(*map(jnp.asarray, arrays)), rtol=1e-4
    )


def own(x: jax.Array, w: jax.Array) -> jax.Array:
    mesh = jax_mesh("fsdp=4,tensor=2")
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("fsdp")))
    return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("fsdp", "tensor")))


def test_a_note_says_what_becomes_of_shardings_along_other_axes() -> None:
    plan = toast.plan(own, *SHAPES[:2], mesh="data=4,tensor=2", hardware="tpu-v5e")
    assert plan.note == (
        "the program's own shardings name axes that mesh data=4,tensor=2 does not have (fsdp): "
        "the plan replaces all of them; to keep them, name the mesh's axes as the program does, "
        "and use keep=True or --keep-constraints"
    )
    assert toast.plan(own, *SHAPES[:2], mesh="fsdp=4,tensor=2", hardware="tpu-v5e").note == ""
    with pytest.raises(
        PinError,
        match=r"the program's sharding P\('fsdp', None\): .*: no axis fsdp in mesh data=4,tensor=2; "
        "name the mesh's axes as the program does",
    ):
        toast.plan(
            own, *SHAPES[:2], mesh="data=4,tensor=2", hardware="tpu-v5e",
            constraints=toast.Constraints(keep=True),
        )  # fmt: skip


@pytest.mark.parametrize(("first", "then"), [(PLAIN, MANY), (MANY, PLAIN), (MANY, MANY)])
def test_plan_files_apply_with_and_without_them(first: str, then: str) -> None:
    plan = planned(first)
    data = json.loads(json.dumps(plan.to_dict()))
    assert list(data["mesh"].items()) == list(Mesh.parse(first).axes)
    applied = toast.apply_plan(data, mlp, *SHAPES, mesh=then)
    assert applied.plan.arguments == plan.arguments
    assert (applied.notes, applied.changed, applied.actions_gone) == ((), (), ())
    assert str(applied.plan.mesh) == then
    assert applied.plan.after == plan.after
    again = planned(then, start=plan)
    assert again.note == ""
    assert again.cost <= plan.cost


def test_a_plan_applies_where_its_axes_have_one_device() -> None:
    constraints = toast.Constraints(pin={"x": P("data", "model")})
    data = planned("data=4,model=2", constraints=constraints).to_dict()
    applied = toast.apply_plan(data, mlp, *SHAPES, mesh="data=4,model=1")
    assert applied.plan.arguments["x"] == (("data",), ("model",))
    assert applied.changed == ()


def test_queries_and_reports_show_the_whole_mesh() -> None:
    plan = planned(MANY)
    frame = plan.query("mesh_axis(Axis,Size)")
    assert sorted(zip(frame["Axis"], frame["Size"], strict=True)) == sorted(Mesh.parse(MANY).axes)
    # Four rows of two, whichever axis is the last.
    assert drawing.mesh(plan.mesh.axes).count("<rect") == 8
    assert 'width="19" height="37"' in drawing.mesh(plan.mesh.axes)


@pytest.mark.parametrize("mesh", ["a=1", "a=1,b=1"])
def test_meshes_of_one_device_remain(mesh: str) -> None:
    plan = planned(mesh)
    assert str(plan.mesh) == mesh
    assert plan.shardings.uses == {}


def test_every_method_takes_them() -> None:
    analysis, machine = toast.analyze(mlp, *SHAPES), load("tpu-v5e")
    for method in ("shardy", "automap", "alpa"):
        costs = [
            row.plan.cost if row.plan else None
            for mesh in (PLAIN, MANY)
            for row in compare(analysis, Mesh.parse(mesh), machine, [method], limit=2)
        ]
        assert costs[0] is not None
        assert costs[0] == costs[1]
