"""Factors that are not sharded together: every way to change a state keeps to it."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import toast
from tests.helpers import action, f32
from toast import Constraints
from toast.hardware import Mesh
from toast.space import NONE, Space


def forward(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def gradient(x: jax.Array, y: jax.Array) -> jax.Array:
    """The gradient of a kernel of 3x3: the window is the image."""
    return lax.conv_general_dilated(
        x, y, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("CHWN", "IHWO", "HWNC")
    )


FORWARD = forward, (f32(8, 16, 16, 8), f32(3, 3, 8, 16))
GRADIENT = gradient, (f32(8, 16, 16, 8), f32(8, 16, 16, 16))


def space_of(program: Any, mesh: str, **options: Any) -> Space:
    function, types = program
    return Space(toast.analyze(function, *types), Mesh.parse(mesh), min_dimensions=0, **options)


def convolution_of(space: Space, state: Any) -> list[str]:
    """The factor of the convolution that holds each axis."""
    (k,) = np.flatnonzero(space.products).tolist()
    analysis = space.analysis
    rule = analysis.rules[analysis.names.signature[space.classes.representative[k]]]
    return [rule.factors[f].label if f != NONE else "" for f in state[k]]


def test_actions_keep_excluded_factors_apart() -> None:
    space = space_of(FORWARD, "a=2,b=2")
    image, features = action(space, "x", 1, "a"), action(space, "kernel", 3, "b")
    state = space.apply(space.initial, image)
    assert convolution_of(space, state) == ["space(0)", ""]
    both = space.apply(state, features)
    assert convolution_of(space, both) == ["space(0)", ""]
    # The kernel itself takes the axis, and is gathered for the convolution.
    assert (both != state).any()
    number = space.actions.index(features)
    np.testing.assert_array_equal(space.apply_each(state, [number])[0], both)
    other_way = space.apply(space.apply(space.initial, features), image)
    assert convolution_of(space, other_way) == ["", "output"]


def test_windows_of_gradients_need_every_axis() -> None:
    space = space_of(GRADIENT, "a=2,b=2")
    image, batch = action(space, "x", 1, "a"), action(space, "x", 0, "b")
    alone = space.apply(space.initial, image)
    assert convolution_of(space, alone) == ["", ""]
    state = space.apply(space.apply(space.initial, batch), image)
    assert convolution_of(space, state) == ["window(0)", "input"]
    space = space_of(GRADIENT, "a=2")
    assert convolution_of(space, space.apply(space.initial, action(space, "x", 1, "a"))) == [
        "window(0)"
    ]


@pytest.mark.parametrize("program", [FORWARD, GRADIENT], ids=["forward", "gradient"])
def test_refinements_and_choices_keep_to_it(program: Any) -> None:
    space = space_of(program, "a=2,b=2")
    every = np.arange(len(space.initial))
    random = np.random.default_rng(0)
    rows = np.arange(len(space.refinements))
    state = space.initial
    for _ in range(40):
        changed, states = space.refine(state, rows)
        assert all(space.restrictions.allow(states, every).reshape(-1))
        state = states[random.integers(len(changed))]
    (k,) = np.flatnonzero(space.products).tolist()
    allowed = {tuple(row) for row in space.choices[k].tolist()}
    factors = range(-1, space.classes.divisor.shape[1])
    for row in itertools.product(factors, repeat=2):
        held = np.array([row], dtype=np.int8)
        if not space.restrictions.allow(held, np.array([k])).all():
            assert row not in allowed
            broken = space.initial.copy()
            broken[k] = row
            assert space.restrictions.allow(space.within(broken), every).all()


@pytest.mark.parametrize("pattern", ["images", "result*"])
def test_pinned_values_are_resharded_after_the_convolution(pattern: str) -> None:
    """A pin holds for an op of its own, so the convolution can be sharded in another way."""

    def named(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return checkpoint_name(forward(x, kernel), "images")

    pins = Constraints(pin={pattern: "P(None, 'a', None, 'b')"})
    space = space_of((named, FORWARD[1]), "a=2,b=2", constraints=pins)
    assert convolution_of(space, space.initial) == ["", ""]
    assert (space.initial >= 0).any()
