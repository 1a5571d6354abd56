"""Refinements as arrays do what they say, one by one."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from tests.helpers import after_each, analyzed
from toast.hardware import Mesh
from toast.space import FREE, NONE, Action, Constraints, Scope, Space, States

MESHES = ("a=2,b=2", "a=4", "a=1,b=2,c=2", "a=3,b=2", "a=2,b=1,c=2,d=2,e=1,f=2,g=1,h=2")


def plainly(space: Space, state: States, action: Action) -> States:
    """What a refinement makes of a state, pair by pair."""
    after, sizes = state.copy(), space.axis_sizes.tolist()
    for k, factor in action.part:
        if space.fixed[k, action.axis] != FREE:
            continue
        held = [
            size for axis, size in enumerate(sizes)
            if axis != action.axis and state[k, axis] == factor
        ]  # fmt: skip
        shards = math.prod(held) * sizes[action.axis]
        fits = space.classes.divisor[k, factor] % shards == 0 and not space._shut[k, factor]
        if factor == NONE or fits:
            after[k, action.axis] = factor
    return after


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("pinned", [False, True])
def test_a_table_and_its_actions_change_states_alike(mesh: str, pinned: bool) -> None:
    axis = next(name for name, size in Mesh.parse(mesh).axes if size == 2 or mesh == "a=4")
    constraints = Constraints(pin={"tokens": f"P('{axis}')"} if pinned else {})
    space = Space(analyzed("t2b-tiny"), Mesh.parse(mesh), constraints=constraints)
    table, random = space.refinements, np.random.default_rng(0)
    rows = np.sort(random.permutation(len(table))[:300])
    actions = table.actions(rows.tolist())
    assert {action.axis for action in actions} == set(np.flatnonzero(space.axis_sizes > 1).tolist())
    state = space.initial
    for turn in range(4):
        changing, after = space.refine(state, rows)
        each = after_each(space, state, actions)
        assert (each == np.stack([plainly(space, state, action) for action in actions])).all()
        changed = (each != state).any(axis=(1, 2))
        assert changing.tolist() == rows[changed].tolist()
        assert (after == each[changed]).all()
        state = after[int(random.integers(len(after)))]
        if turn == 2:  # nothing is taken from these any more
            for k in range(0, len(state), 3):
                space.hold(k, space.axis_sizes.argmax())


@pytest.mark.parametrize("scope", list(Scope))
def test_rows_come_in_the_order_of_what_they_are_asked_for(scope: Scope) -> None:
    table = Space(analyzed("t2b-tiny"), Mesh.parse("a=2,b=2")).refinements
    numbers = np.unique(table.number[table.scope == scope])[::-1]
    rows = table.rows(scope, numbers)
    assert sorted(rows.tolist()) == np.flatnonzero(table.scope == scope).tolist()
    assert (np.diff(table.number[rows]) <= 0).all()
    assert not len(table.rows(scope, np.array([int(numbers.max(initial=0)) + 1])))
    pairs = table.pairs(rows[:3])
    parts = [action.part for action in table.actions(rows[:3].tolist())]
    assert pairs.action.tolist() == [i for i, part in enumerate(parts) for _ in part]
    found = zip(pairs.op_class.tolist(), pairs.factor.tolist(), strict=True)
    assert list(found) == [pair for part in parts for pair in part]


def test_parts_of_colors_come_by_what_is_spent_in_them() -> None:
    space = Space(analyzed("t2b-tiny"), Mesh.parse("a=2,b=2"))
    seconds = np.random.default_rng(0).random(len(space.initial))
    rows = space.parts_by(seconds)
    assert sorted(rows.tolist()) == np.flatnonzero(space.refinements.scope == Scope.COLOR).tolist()
    actions = space.refinements.actions(rows.tolist())
    spent = [sum(seconds[k] for k, _ in action.part) for action in actions]
    assert (np.diff(spent) <= 1e-9).all()
    assert [action.axis for action in actions[:4]] == [0, 1, 0, 1]


def test_a_space_for_a_search_has_the_same() -> None:
    space = Space(analyzed("t2b-tiny"), Mesh.parse("a=2,b=2"))
    every = np.arange(len(space.refinements))
    rows, after = space.refine(space.initial, every)
    sent = pickle.dumps(space.for_search())
    assert len(sent) < 2**20
    received: Space = pickle.loads(sent)
    again = received.refine(received.initial, every)
    assert (again[0] == rows).all()
    assert (again[1] == after).all()


def test_a_mesh_of_one_device_has_none() -> None:
    space = Space(analyzed("t2b-tiny"), Mesh.parse("a=1"))
    assert not len(space.refinements)
    rows, after = space.refine(space.initial, np.empty(0, dtype=np.int64))
    assert not len(rows)
    assert after.shape == (0, *space.initial.shape)
    assert not len(space.parts_by(np.ones(len(space.initial))))
