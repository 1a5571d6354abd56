"""Predicted collectives against those that Shardy's partitioner makes explicit."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.helpers import f32, mlp
from toast.cost import CostModel
from toast.evaluation.oracle.explicit import explicit_collectives
from toast.evaluation.validate import states_to_compare
from toast.hardware import Mesh, load
from toast.models import ZOO, build
from toast.plan.shard import shardings_of
from toast.space import Space


def trained(w: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    def loss(w: list[jax.Array]) -> jax.Array:
        y = x
        for up, down in zip(w[::2], w[1::2], strict=True):
            y = y + jax.nn.gelu(y @ up) @ down
        return jnp.mean(y**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))


ANALYSES = {
    "transformer": lambda: toast.analyze(build("t2b", small=True)),
    "MLP": lambda: toast.analyze(mlp, f32(256, 32), f32(32, 64), f32(64, 16)),
    "residual MLP": lambda: toast.analyze(trained, [f32(32, 64), f32(64, 32)] * 2, f32(64, 32)),
}


@pytest.mark.parametrize("mesh", ["a=2,b=2", "a=4,b=2,c=2", "a=8"])
@pytest.mark.parametrize("name", ANALYSES)
def test_collectives_are_those_of_shardy(name: str, mesh: str) -> None:
    """Kind, axes, bytes and number, in found plans, experts' plans, and random states."""
    analysis = ANALYSES[name]()
    model = CostModel(Space(analysis, Mesh.parse(mesh)), load("tpu-v5e"))
    strategies = ZOO["t2b"].strategies if name == "transformer" else {}
    for label, state in states_to_compare(model, plans=6, strategies=strategies, seed=1):
        ours = model.reshards(state)
        theirs = explicit_collectives(analysis.program, shardings_of(model, state))
        assert theirs is None or same(ours) == same(theirs), label


def same(reshards: Counter[tuple[str, tuple[str, ...], float]]) -> dict[object, int]:
    """Without the number of permutes: the pass makes one for each use of a value; XLA merges them."""
    return {key: 1 if key[0] == "collective_permute" else n for key, n in reshards.items()}
