"""Pricing by what differs is pricing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import toast.cost.near
from tests.helpers import analyzed
from toast.cost import CostModel, Near
from toast.hardware import Mesh, load
from toast.search.exhaustive import random_legal
from toast.space import Action, Space, States

PROGRAMS = [
    ("t2b-tiny", {}),
    ("t2b-scan", {"small": True}),
    ("gns", {"small": True}),
    ("unet", {"small": True}),
    ("moe", {"small": True}),
    ("mlp", {}),
]


def changes(space: Space, random: np.random.Generator) -> list[Action]:
    """Of colors, of their parts and of single op classes."""
    single = [a for k in random.permutation(len(space.initial))[:20] for a in space.single(int(k))]
    parts = random.permutation(len(space.refinements))[:40]
    return [*space.actions, *(space.refinements[i] for i in parts), *single]


def near_ones(space: Space, state: States, random: np.random.Generator) -> States:
    """States that one or two changes make of a state, and the state itself."""
    offered = changes(space, random)
    once = space.refine_each(state, offered)
    twice = np.concatenate([space.refine_each(s, offered[-30:]) for s in once[-30::10]])
    return np.concatenate([state[None], once, twice])


@pytest.mark.parametrize(
    ("name", "options", "overlap"),
    [*((*program, "partial") for program in PROGRAMS), ("mlp", {}, "none"), ("mlp", {}, "full")],
)
def test_by_what_differs(
    name: str, options: dict[str, int], overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of states that sum, gather, trade places and keep copies, on two and three axes."""
    monkeypatch.setattr(toast.cost.near, "_OPENING", 0)  # also where it hardly pays
    monkeypatch.setattr(toast.cost.near, "_NEIGHBOURS", 0)
    random = np.random.default_rng(0)
    for mesh in ("a=2,b=2", "a=2,b=2,c=2"):
        space = Space(analyzed(name, **options), Mesh.parse(mesh), min_dimensions=0)
        model = CostModel(space, load("tpu-v5e"), overlap=overlap)  # type: ignore[arg-type]
        for state in (space.initial, *random_legal(space, 1, random)):
            batch = near_ones(space, state, random)
            whole, found = model.price(batch), Near(model, state).price(batch)
            for field in dataclasses.fields(whole):
                expected, got = getattr(whole, field.name), getattr(found, field.name)
                scale = np.abs(expected).max(initial=0.0) or 1.0
                np.testing.assert_allclose(got / scale, expected / scale, atol=1e-12)


def test_on_any_number_of_threads() -> None:
    space = Space(analyzed("t2b", layers=6), Mesh.parse("a=4,b=4"))
    model = CostModel(space, load("tpu-v5e"))
    random = np.random.default_rng(1)
    (state,) = random_legal(space, 1, random)
    batch = near_ones(space, state, random)
    found = []
    for model.threads in (1, 2, 3):
        found.append(Near(model, state).price(batch))
    for other in found[1:]:
        np.testing.assert_array_equal(found[0].seconds, other.seconds)
        np.testing.assert_array_equal(found[0].peak_bytes, other.peak_bytes)


def test_states_that_touch_the_same_go_together() -> None:
    touched = np.zeros((60, 4000), dtype=bool)
    touched[0::3, :100] = True
    touched[1::3, 90:200] = True
    touched[2::3, :] = True
    batches, rest = toast.cost.near._batches(touched)
    assert sorted(map(sorted, batches)) == [[*range(0, 60, 3)], [*range(1, 60, 3)]]
    assert sorted(rest) == [*range(2, 60, 3)]
