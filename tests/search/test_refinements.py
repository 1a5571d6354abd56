"""Refinements: parts of a color that are sharded otherwise than the rest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import action, analyzed, f32, model_of, refinements
from toast.hardware import Mesh, load
from toast.models import build
from toast.plan.shard import shardings_of
from toast.search import Polishing, TreeSearch
from toast.space import Action, Scope, Space


def test_tokens_go_to_their_experts_by_all_to_all() -> None:
    """GShard's plan: gates by group, products by expert, with the experts' dimension one color."""
    analysis = toast.analyze(build("moe-scan", layers=2, experts=32))
    plan = toast.plan(analysis, mesh="devices=32", hardware="tpu-v3")
    count = {c.kind: c.count for c in plan.after.collectives}
    assert count["all_to_all"] > 0
    assert plan.arguments["params['pairs']['experts']['up']"][1] == ("devices",)
    assert any(step.part for step in plan.steps)
    plain = TreeSearch(), Polishing()
    without = toast.plan(analysis, mesh="devices=32", hardware="tpu-v3", stages=plain)
    assert plan.after.step_seconds < without.after.step_seconds


def test_refined_states_are_legal_and_stay_so_whatever_comes_next() -> None:
    model = model_of(analyzed("t2b-tiny"), "d=2,m=2")
    space, random = model.space, np.random.default_rng(0)
    offered = [
        *refinements(space, Scope.COLOR),
        *refinements(space, Scope.CLASS),
    ]
    assert refinements(space, Scope.COLOR)
    for _ in range(20):
        state = space.initial
        for number in random.integers(len(space.actions), size=2).tolist():
            state = space.apply(state, space.actions[number])
        for number in random.integers(len(offered), size=4).tolist():
            state = space.apply(state, offered[number])
        held = space.classes.divisor[np.arange(len(state))[:, None], np.maximum(state, 0)]
        shards = [
            np.prod([2 for other in row if other == factor and factor >= 0])
            for row in state.tolist() for factor in row
        ]  # fmt: skip
        assert (held.ravel() % np.array(shards) == 0).all()
        shardings_of(model, state).check(space.analysis.program)


def test_a_part_takes_the_axis_and_can_let_it_go() -> None:
    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    space = Space(toast.analyze(function, f32(16, 8), f32(8, 4)), Mesh.parse("d=4"))
    state = space.apply(space.initial, action(space, "x", 0, "d"))
    (product,) = (
        k for k, op in enumerate(space.classes.representative.tolist())
        if space.analysis.program.kind(op) == "dot_general"
    )  # fmt: skip
    assert state[product, 0] == 0
    taken = {
        a.part[0][1]: space.apply(state, a)[product, 0]
        for a in refinements(space, Scope.CLASS, product)
    }
    assert taken == {0: 0, 1: 1, 2: 2, -1: -1}
    # Five devices divide nothing here.
    other = Space(space.analysis, Mesh.parse("d=5"))
    forced = Action(0, (), 0, ((product, 1),))
    assert (other.apply(other.initial, forced) == other.initial).all()


@pytest.mark.parametrize("name", ["moe-tiny", "t2b-tiny"])
def test_refined_plans_run_with_equal_numbers(name: str) -> None:
    analysis = (
        analyzed("t2b-tiny") if name == "t2b-tiny" else toast.analyze(build("moe", small=True))
    )
    mesh = Mesh.parse("d=4,m=2")
    plan = toast.plan(
        analysis, mesh=mesh, hardware=toast.api.small_scale(analysis, mesh, load("tpu-v5e"))
    )
    assert plan.verify().equal


def test_classes_that_differ_in_sizes_only_are_refined_together() -> None:
    """What a refinement of several classes does is what those of the single ones do in turn."""
    analysis = toast.analyze(build("unet", small=True))
    space = Space(analysis, Mesh.parse("d=2,m=2"))
    numbers, counts = np.unique(space.alike, return_counts=True)
    assert (counts > 1).any()
    assert all(not refinements(space, Scope.ALIKE, n) for n in numbers[counts == 1].tolist())
    tried = 0
    for number in numbers[counts > 1].tolist():
        for chosen in refinements(space, Scope.ALIKE, number):
            classes = [k for k, _ in chosen.part]
            assert (space.alike[classes] == number).all()
            state = space.initial
            for pair in chosen.part:
                state = space.apply(state, chosen._replace(part=(pair,)))
            together = space.apply(space.initial, chosen)
            assert (together == state).all()
            tried += (together != space.initial).any()
    assert tried
