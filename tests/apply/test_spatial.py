"""Train steps of convolutions whose images are sharded along space: equal results, exchanged halos."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import toast
from tests.helpers import f32
from toast import apply
from toast.cost import CostModel
from toast.evaluation.validate import shardings_of
from toast.hardware import Mesh, load
from toast.plan.prediction import Prediction
from toast.space import Space, States


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def residual_network(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A strided stem, a residual block, and a head over the means of the image."""
    h = jax.nn.relu(convolve(x, weights["stem"], 2))
    scale = lax.rsqrt(jnp.var(h, axis=(0, 1, 2)) + 1e-3)
    h = (h - jnp.mean(h, axis=(0, 1, 2))) * scale
    h = h + convolve(jax.nn.relu(convolve(h, weights["one"])), weights["other"])
    return jnp.mean(h, axis=(1, 2)) @ weights["head"]


def u_net(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A level that halves the image, one that doubles it, and a connection between them."""
    h = jax.nn.silu(convolve(x, weights["stem"]))
    low = jax.nn.silu(convolve(h, weights["down"], 2))
    up = jnp.repeat(jnp.repeat(low, 2, axis=1), 2, axis=2)
    return convolve(jnp.concatenate([h, up], axis=3), weights["last"])


def step_of(network: Any) -> Any:
    def step(weights: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((network(w, x) - y) ** 2))(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), loss

    return step


STEPS: dict[str, tuple[Any, dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]] = {
    "residual network": (
        residual_network,
        {
            "stem": f32(3, 3, 3, 8), "one": f32(3, 3, 8, 8), "other": f32(3, 3, 8, 8),
            "head": f32(8, 10),
        },
        f32(4, 10),
    ),
    "u-net": (
        u_net,
        {"stem": f32(3, 3, 3, 4), "down": f32(3, 3, 4, 8), "last": f32(3, 3, 12, 3)},
        f32(4, 32, 32, 3),
    ),
}  # fmt: skip


def spatial(model: CostModel, path: str, axes: dict[int, str]) -> States:
    """The state after actions that shard dimensions of an argument along axes."""
    space = model.space
    names, program = space.analysis.names, space.analysis.program
    value = program.argument_values[program.arguments.index(path)]
    state = space.initial
    for d, axis in axes.items():
        color = space.color_group_of(names.def_name[int(names.value_dim[value]) + d])
        number = space.mesh.names.index(axis)
        state = space.apply(
            state, next(a for a in space.actions if (a.color, a.axis) == (color, number))
        )
    return state


@pytest.mark.parametrize("mesh", ["data=2,model=4", "data=4,model=2", "model=8"])
@pytest.mark.parametrize("name", STEPS)
def test_images_are_sharded_along_space(name: str, mesh: str) -> None:
    network, weights, target = STEPS[name]
    analysis = toast.analyze(step_of(network), weights, f32(4, 32, 32, 3), target)
    model = CostModel(Space(analysis, Mesh.parse(mesh), min_dimensions=0), load("tpu-v5e"))
    axes = {1: "model"} if mesh == "model=8" else {0: "data", 1: "model"}
    state = spatial(model, "x", axes)
    rules = [
        analysis.rules[analysis.names.signature[op]] for op in model.space.classes.representative
    ]
    held = [
        rules[k].factors[factor].label
        for k in range(len(state)) if model.space.products[k] and rules[k].factors
        for factor in [state[k][model.space.mesh.names.index("model")]] if factor >= 0
    ]  # fmt: skip
    assert {"space(0)", "window(0)"} <= {*held}
    verification = apply.verify(analysis.program, shardings_of(model, state))
    assert verification.equal
    predicted = Prediction.of(model.price(state[None])).collectives
    kinds = {collective.kind for collective in predicted if collective.count}
    assert {*verification.collectives} == kinds == {"collective_permute", "all_reduce"}
