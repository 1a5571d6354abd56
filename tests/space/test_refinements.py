"""Refinements as arrays do what they do as actions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import analyzed
from toast.hardware import Mesh
from toast.space import Constraints, Of, Space

MESHES = ("a=2,b=2", "a=4", "a=1,b=2,c=2")


@pytest.mark.parametrize("mesh", MESHES)
def test_a_table_and_its_actions_change_states_alike(mesh: str) -> None:
    constraints = Constraints(pin={"tokens": "P('b')"} if "b" in mesh else {})
    space = Space(analyzed("t2b-tiny"), Mesh.parse(mesh), constraints=constraints)
    table, random = space.refinements, np.random.default_rng(0)
    every = np.arange(len(table))
    actions = table.actions(every.tolist())
    assert len(set(actions)) > 0
    assert {action.axis for action in actions} == set(np.flatnonzero(space.axis_sizes > 1).tolist())
    state = space.initial
    for _ in range(4):
        rows, after = space.refine(state, every)
        each = space.refine_each(state, actions)
        changed = (each != state).any(axis=(1, 2))
        assert rows.tolist() == every[changed].tolist()
        assert (after == each[changed]).all()
        one = int(random.integers(len(rows)))
        assert (space.apply(state, actions[rows[one]]) == after[one]).all()
        state = after[one]


@pytest.mark.parametrize("of", list(Of))
def test_rows_come_in_the_order_of_what_they_are_asked_for(of: Of) -> None:
    table = Space(analyzed("t2b-tiny"), Mesh.parse("a=2,b=2")).refinements
    numbers = np.unique(table.number[table.of == of])[::-1]
    rows = table.rows(of, numbers)
    assert sorted(rows.tolist()) == np.flatnonzero(table.of == of).tolist()
    assert (np.diff(table.number[rows]) <= 0).all()
    assert not len(table.rows(of, np.array([int(numbers.max(initial=0)) + 1])))
    pairs = table.pairs(rows[:3])
    parts = [action.part for action in table.actions(rows[:3].tolist())]
    assert pairs.action.tolist() == [i for i, part in enumerate(parts) for _ in part]
    found = zip(pairs.op_class.tolist(), pairs.factor.tolist(), strict=True)
    assert list(found) == [pair for part in parts for pair in part]


def test_a_mesh_of_one_device_has_none() -> None:
    space = Space(analyzed("t2b-tiny"), Mesh.parse("a=1"))
    assert not len(space.refinements)
    rows, after = space.refine(space.initial, np.empty(0, dtype=np.int64))
    assert not len(rows)
    assert after.shape == (0, *space.initial.shape)
    assert not len(space.parts_by(np.ones(len(space.initial))))
