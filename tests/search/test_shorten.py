"""Shorter trajectories to the same state."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import action, analyzed, model_of, refinements
from toast.search import Budget, Ledger, Shortening, shortest
from toast.search.ledger import length
from toast.space import Action, Scope, Space


def replayed(space: Space, actions: tuple[Action, ...]) -> np.ndarray:
    state = space.initial
    for one in actions:
        state = space.apply(state, one)
    return state


def test_a_detour_is_left_out() -> None:
    """The batch, part by part: one action on its color says it all."""
    model = model_of(analyzed("mlp"), "d=2,m=2")
    space = model.space
    whole = action(space, "x", 0, "d")
    target = replayed(space, (whole,))
    parts = tuple(
        Action(space.color_of(k, factor), (), 0, ((k, factor),))
        for k, factor in enumerate(target[:, 0].tolist()) if factor >= 0
    )  # fmt: skip
    assert (replayed(space, parts) == target).all()
    assert shortest(space, target) == (whole,)


@pytest.mark.parametrize("name", ["t2b-tiny", "attention"])
def test_random_states_are_reached_by_no_more_actions(name: str) -> None:
    space = model_of(analyzed(name), "d=2,m=2").space
    random = np.random.default_rng(0)
    parts = [*refinements(space, Scope.COLOR), *refinements(space, Scope.CLASS)]
    exact = 0
    for _ in range(20):
        drawn = [space.actions[n] for n in random.integers(len(space.actions), size=3).tolist()]
        drawn += [parts[n] for n in random.integers(len(parts), size=3).tolist()]
        target = replayed(space, tuple(drawn))
        actions = shortest(space, target)
        if (replayed(space, actions) == target).all():
            exact += 1
            assert length(actions) <= length(drawn)
    assert exact >= 15  # elsewhere axes change places within an op


def test_the_stage_keeps_the_state() -> None:
    model = model_of(analyzed("t2b-tiny"), "d=2,m=2")
    ledger = Ledger(model, np.inf, 1e-4)
    # Each action twice: the second one changes nothing.
    trajectory = ledger.begin(tuple(one for one in model.space.actions[:4] for _ in range(2)))
    Shortening()(ledger, Budget(None))
    assert length(ledger.best.actions) < length(trajectory.actions)
    assert (ledger.replay(ledger.best.actions) == ledger.replay(trajectory.actions)).all()


def test_nothing_to_shard_is_no_action() -> None:
    space = model_of(analyzed("mlp"), "d=2").space
    assert shortest(space, space.initial) == ()
