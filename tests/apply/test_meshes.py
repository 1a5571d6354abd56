"""Plans on the meshes of users: their axis types, names and devices stay."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import toast
from tests.helpers import f32, mlp
from toast.errors import PlanError

SHAPES = (f32(512, 64), f32(64, 256), f32(256, 64))
KINDS = {
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "auto": (AxisType.Auto, AxisType.Auto),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}


def arrays() -> list[Any]:
    return [np.full(shape.shape, 0.1, np.float32) for shape in SHAPES]


def set_or_not(mesh: jax.sharding.Mesh, wanted: bool) -> Any:
    return jax.set_mesh(mesh) if wanted else contextlib.nullcontext()


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_usable_in_the_next_op(kind: str, wanted: bool) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=KINDS[kind])
    plan = toast.plan(mlp, *SHAPES, mesh=mesh, hardware="tpu-v5e")
    run = plan.jit(mesh)
    expected = np.asarray(mlp(*arrays()))
    other = jax.device_put(np.ones((512, 64), np.float32), NamedSharding(mesh, plan.out_shardings))
    with set_or_not(mesh, wanted):
        result = run(*arrays())
        assert result.sharding == NamedSharding(mesh, plan.out_shardings)
        np.testing.assert_allclose(result + other, expected + 1, rtol=1e-5)
        np.testing.assert_allclose(jax.jit(lambda y: 2 * y)(result), 2 * expected, rtol=1e-5)
        np.testing.assert_allclose(run(result, *arrays()[1:]).shape, expected.shape)
        inside = jax.jit(lambda *a: run(*a) * 2)(*arrays())
        np.testing.assert_allclose(inside, 2 * expected, rtol=1e-5)


def test_arrays_of_a_mesh_with_other_axis_types_are_taken() -> None:
    explicit, auto = (
        jax.make_mesh((4, 2), ("data", "model"), axis_types=KINDS[kind])
        for kind in ("explicit", "auto")
    )
    run = toast.plan(mlp, *SHAPES, mesh=explicit, hardware="tpu-v5e").jit(explicit)
    given = [jax.device_put(array, NamedSharding(auto, P("model"))) for array in arrays()]
    np.testing.assert_allclose(run(*given), mlp(*arrays()), rtol=1e-5)


@pytest.mark.parametrize("wanted", [False, True])
def test_donated_steps_on_an_explicit_mesh(wanted: bool) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=KINDS["explicit"])

    def step(params: Any, key: jax.Array, x: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])
            return jnp.mean((hidden + jax.random.normal(key, hidden.shape)) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    params, x = {"w": jnp.full((3, 64, 64), 0.01)}, jnp.ones((64, 64))
    key = jax.random.key(0)
    plan = toast.plan(step, params, key, x, donate=0, mesh=mesh, hardware="tpu-v5e")
    run, mine, theirs = plan.jit(mesh), jax.tree.map(jnp.copy, params), params
    with set_or_not(mesh, wanted):
        for _ in range(3):
            mine, value = run(mine, key, x)
            assert mine["w"].sharding.mesh == mesh
    for _ in range(3):
        theirs, expected = step(theirs, key, x)
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_a_program_planned_while_an_explicit_mesh_is_set() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=KINDS["explicit"])

    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.sharding.reshard(jnp.tanh(x @ w), P("data", "model"))

    x = jax.device_put(np.full((512, 64), 0.1, np.float32), NamedSharding(mesh, P("data")))
    w = jax.device_put(np.full((64, 128), 0.1, np.float32), NamedSharding(mesh, P(None, "model")))
    with jax.set_mesh(mesh):
        for keep in (False, True):
            plan = toast.plan(
                function, x, w, mesh=mesh, hardware="tpu-v5e",
                constraints=toast.Constraints(keep=keep),
            )  # fmt: skip
            np.testing.assert_allclose(plan.jit(mesh)(x, w), function(x, w), rtol=1e-5)
    assert plan.in_shardings == (P("data", None), P(None, "model"))
    assert plan.out_shardings == P("data", "model")


def test_axes_are_those_of_the_same_name_or_place() -> None:
    plan = toast.plan(
        mlp, *SHAPES, mesh="a=2,b=2", hardware="tpu-v5e",
        constraints=toast.Constraints(pin={"x": P("a", "b")}),
    )  # fmt: skip
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    for names, spec in ((("b", "a"), P("a", "b")), (("rows", "columns"), P("rows", "columns"))):
        mesh = jax.sharding.Mesh(devices, names)
        assert plan.shardings_for(mesh).in_shardings[0] == NamedSharding(mesh, spec)
        result = plan.jit(mesh)(*arrays())
        np.testing.assert_allclose(result, mlp(*arrays()), rtol=1e-5)
        assert result.sharding.mesh == mesh
    with pytest.raises(PlanError, match="the plan is for mesh a=2,b=2, not a=4; make a new plan"):
        plan.jit(jax.sharding.Mesh(devices.reshape(4), ("a",)))


class Granule:
    """A device of a system of two slices or hosts, in place of a CPU device."""

    def __init__(self, device: Any, slices: int = 2) -> None:
        self.id, self.device_kind, self.platform = device.id, device.device_kind, device.platform
        self.slice_index = self.process_index = device.id * slices // 8


def hybrid(kind: AxisType) -> jax.sharding.Mesh:
    """A mesh of the CPU devices as two hosts of four: the axis data goes over both."""
    cpus = {device.id: device for device in jax.devices()[:8]}
    grid = mesh_utils.create_hybrid_device_mesh(
        (2, 2), (2, 1), [Granule(device) for device in cpus.values()]
    )
    real = np.vectorize(lambda granule: cpus[granule.id], otypes=[object])(grid)
    return jax.sharding.Mesh(real, ("data", "model"), axis_types=(kind, kind))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_hybrid_meshes_keep_their_devices(kind: AxisType) -> None:
    mesh = hybrid(kind)
    plan = toast.plan(mlp, *SHAPES, mesh=mesh, hardware="h100")
    assert plan.mesh.axes == (("data", 4), ("model", 2))
    run = plan.jit(mesh)
    result = run(*arrays())
    np.testing.assert_allclose(result, mlp(*arrays()), rtol=1e-5)
    assert result.sharding.mesh == mesh
    assert (result.sharding.mesh.devices == mesh.devices).all()
