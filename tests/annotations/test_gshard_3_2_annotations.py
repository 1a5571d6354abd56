"""GShard 3.2: the annotation API ``replicate`` and ``split``; A.3: ``shard``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast

MESH = "data=4,model=2"


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def specs(function, *arguments, mesh: str = MESH):
    """The plan's sharding of each annotated value."""
    settings = toast.Settings(budget=0.2)
    plan = toast.plan(function, *arguments, mesh=mesh, hardware="tpu-v5e", settings=settings)
    program = plan.analysis.program
    values = [program.ops[op].results[0] for op in sorted(program.annotations)]
    return plan, [tuple(map(tuple, plan.shardings.of(program, value))) for value in values]


def test_an_annotation_is_the_identity_without_toast() -> None:
    x = jnp.arange(8.0)

    def f(x):
        return (toast.split(x, 0, 4) * toast.replicate(x)).sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(f))(x), 2 * x)
    np.testing.assert_array_equal(jax.vmap(lambda r: toast.split(r, 0, "a"))(x[None]), x[None])


def test_annotations_hold_also_for_cotangents() -> None:
    def loss(w, x):
        return (toast.split(x, 0, "data") @ toast.split(w, 1, 2)).sum()

    _, shardings = specs(jax.grad(loss), f32(16, 8), f32(32, 16))
    assert ((), ("model",)) in shardings
    assert shardings.count(((), ("model",))) >= 1


def test_a_device_assignment_is_mapped_to_axes() -> None:
    def f(x):
        return toast.shard(x, np.arange(8).reshape(4, 2).T) * 2

    plan, shardings = specs(f, f32(8, 16))
    assert shardings == [(("model",), ("data",))]
    assert "annotations that hold: shard(" in plan.note
    assert "test_gshard_3_2_annotations.py:" in plan.note


def test_annotations_hold_in_a_scan() -> None:
    def f(x, ws):
        return jax.lax.scan(lambda c, w: (toast.split(jnp.tanh(c @ w), 0, 4), None), x, ws)[0]

    _, shardings = specs(f, f32(16, 8), f32(3, 8, 8))
    assert shardings == [(("data",), ())]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: toast.split(x, 0, "rows"), "no axis rows in mesh data=4,model=2"),
        (lambda x: toast.split(x, 0, 3), "no axes of mesh data=4,model=2 have 3 devices"),
        (lambda x: toast.split(x, 2, "data"), "use a dimension below 2"),
        (lambda x: toast.split(x, 0, 32), "32 parts of dimension 0, which has 16 elements"),
        (lambda x: toast.shard(x, np.zeros((4, 2), int)), "no permutation of devices"),
        (lambda x: toast.shard(x, [[0, 1], [3, 2], [4, 5], [6, 7]]), "no tiling by the axes"),
    ],
)
def test_an_annotation_that_cannot_hold_is_one_line(function, message: str) -> None:
    with pytest.raises(toast.ToastError, match=message) as error:
        specs(function, f32(16, 8))
    assert "\n" not in str(error.value)


def test_an_ambiguous_number_of_parts_names_the_axes() -> None:
    with pytest.raises(toast.ToastError, match="2 parts may be along a or b of mesh a=2,b=2"):
        specs(lambda x: toast.split(x, 0, 2), f32(16, 8), mesh="a=2,b=2")


def test_an_annotation_that_contradicts_a_pin_names_both() -> None:
    with pytest.raises(toast.ToastError, match=r"split\(0, 'data'\) at .* contradicts pin x="):
        toast.plan(
            lambda x: toast.split(x, 0, "data"), f32(16, 8), mesh=MESH, hardware="tpu-v5e",
            constraints=toast.Constraints(pin={"x": "P('model')"}),
        )  # fmt: skip


def test_dispatch_and_combine_of_a_mixture_of_experts_are_all_to_alls() -> None:
    def moe(x, gate, inner, outer):
        x = toast.split(x, 0, "d")
        gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, toast.replicate(gate)))
        dispatched = toast.split(jnp.einsum("gse,gsm->egsm", gates, x), 0, "d")
        hidden = jax.nn.relu(jnp.einsum("egsm,emh->egsh", dispatched, inner))
        combined = toast.split(jnp.einsum("egsh,ehm->gsem", hidden, outer), 0, "d")
        return jnp.einsum("gsem,gse->gsm", combined, gates)

    shapes = (8, 16, 32), (32, 8), (8, 32, 64), (8, 64, 32)
    arrays = [jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes)]
    plan, _ = specs(moe, *arrays, mesh="d=8")
    assert [transfer.kind for transfer in plan.transfers] == ["all_to_all", "all_to_all"]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("d",))
    expected = np.array(moe(*arrays))
    np.testing.assert_allclose(np.array(plan.jit(mesh)(*arrays)), expected, rtol=1e-4, atol=1e-4)
