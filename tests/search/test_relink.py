"""Path relinking: regions of another state behind a trajectory."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import analyzed, model_of
from toast.search import Search, Settings
from toast.search.exhaustive import random_legal
from toast.search.ledger import Ledger, Trajectory, length
from toast.search.local import replay
from toast.search.relink import _regions, relink


def never() -> bool:
    return False


def begun(name: str, mesh: str, **options: int) -> tuple[Ledger, Trajectory]:
    model = model_of(analyzed(name, **options), mesh)
    ledger = Ledger(model, np.inf, action_cost=1e-3)
    (key,), _ = ledger.price(model.space.initial[None])
    return ledger, ledger.offer(key, ())


def test_regions_are_what_links_tie_together() -> None:
    links = np.array([[0, 1], [1, 2], [3, 4], [4, 5]])
    inside = np.array([True, True, False, True, True, True])
    assert [region.tolist() for region in _regions(inside, links)] == [[0, 1], [3, 4, 5]]
    assert [region.tolist() for region in _regions(inside, links[:0])] == [[0], [1], [3], [4], [5]]
    assert _regions(np.zeros(6, dtype=bool), links) == []


@pytest.mark.parametrize("name", ["t2b-tiny", "attention"])
def test_never_worse_and_always_legal(name: str) -> None:
    ledger, origin = begun(name, "d=2,m=2")
    space = ledger.model.space
    for target in random_legal(space, 6, np.random.default_rng(0)):
        found = relink(ledger, origin, target, depth=30, stop=never)
        assert found.rank <= origin.rank
        state = replay(ledger, found.actions)
        for k, rows in enumerate(space.choices):
            assert (rows == state[k]).all(axis=1).any()
        (key,), _ = ledger.price(state[None])
        assert ledger.rank(key, length(found.actions)) == found.rank


def test_two_states_that_are_good_in_different_places_make_a_better_one() -> None:
    ledger, origin = begun("t2b", "data=4,model=4", layers=2)
    initial = ledger.model.space.initial
    best = Search(ledger.model, memory_bytes=np.inf, settings=Settings(rounds=1)).run().state
    # One has the first half of the ops' shardings, one the second.
    half = len(best) // 2
    first, second = best.copy(), best.copy()
    first[half:], second[:half] = initial[half:], initial[:half]
    one = relink(ledger, origin, first, depth=30, stop=never)
    both = relink(ledger, one, second, depth=30, stop=never)
    assert both.rank < one.rank < origin.rank


def test_an_end_of_time_is_an_end() -> None:
    ledger, origin = begun("t2b-tiny", "d=2,m=2")
    target = random_legal(ledger.model.space, 1, np.random.default_rng(0))[0]
    assert relink(ledger, origin, target, depth=30, stop=lambda: True) is origin
