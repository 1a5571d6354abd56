"""The tree: colors, parts of colors, and regions of other states, behind trajectories."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.helpers import analyzed, model_of
from toast.evaluation.optimum import best_reachable, random_legal
from toast.search import (
    Budget,
    Ledger,
    Polishing,
    Search,
    SearchEnd,
    Settings,
    TreeSearch,
    region_changes,
)
from toast.search.ledger import length
from toast.search.regions import _regions

TREE = TreeSearch("regions", effort=256)


def ledger_of(name: str, mesh: str, **options: int) -> Ledger:
    ledger = Ledger(model_of(analyzed(name, **options), mesh), np.inf, action_cost=1e-4)
    ledger.starts = [ledger.begin()]
    return ledger


def test_regions_are_what_links_tie_together() -> None:
    links = np.array([[0, 1], [1, 2], [3, 4], [4, 5]])
    inside = np.array([True, True, False, True, True, True])
    assert [region.tolist() for region in _regions(inside, links)] == [[0, 1], [3, 4, 5]]
    assert [region.tolist() for region in _regions(inside, links[:0])] == [[0], [1], [3], [4], [5]]
    assert _regions(np.zeros(6, dtype=bool), links) == []


def test_changes_of_regions_make_them_the_targets() -> None:
    space = ledger_of("t2b-tiny", "d=2,m=2").model.space
    (target,) = random_legal(space, 1, np.random.default_rng(0))
    changes = list(region_changes(space, space.initial, target))
    assert changes
    for change in changes:
        state = space.initial
        for action in change:
            state = space.apply(state, action)
        changed = state != space.initial
        assert (state[changed] == target[changed]).all()


@pytest.mark.parametrize(("name", "layers"), [("t2b", {"layers": 1}), ("attention", {})])
def test_trajectories_are_legal_and_lead_where_they_say(name: str, layers: dict[str, int]) -> None:
    ledger = ledger_of(name, "d=2,m=2", **layers)
    space = ledger.model.space
    targets = random_legal(space, 3, np.random.default_rng(0))
    ledger.proposals = lambda _seconds: list(targets)
    offers = TREE(ledger, Budget(None))
    assert offers[1:] == [ledger.best]
    assert ledger.best.rank < offers[0].rank
    state = ledger.replay(ledger.best.actions)
    for k, rows in enumerate(space.choices):
        assert (rows == state[k]).all(axis=1).any()
    (key,), _ = ledger.price(state[None])
    assert ledger.rank(key, length(ledger.best.actions)) == ledger.best.rank


def test_two_states_that_are_good_in_different_places_make_a_better_one() -> None:
    ledger = ledger_of("t2b", "data=4,model=4", layers=2)
    initial = ledger.model.space.initial
    best = Search(ledger.model, memory_bytes=np.inf, settings=Settings(rounds=1)).run().state
    # One has the first half of the ops' shardings, one the second.
    half = len(best) // 2
    first, second = best.copy(), best.copy()
    first[half:], second[:half] = initial[half:], initial[:half]
    ranks = []
    for targets in ([first], [second], [first, second]):
        alone = ledger_of("t2b", "data=4,model=4", layers=2)
        alone.proposals = lambda _seconds, targets=targets: targets  # type: ignore[misc]
        dataclasses.replace(TREE, hottest=0, widest=0)(alone, Budget(None))
        ranks.append(alone.best.rank)
    assert ranks[2] <= min(ranks[:2])
    assert max(ranks) < ledger.best.rank


def test_without_proposals_there_is_nothing_to_take_over() -> None:
    ledger = ledger_of("t2b-tiny", "d=2,m=2")
    assert TREE(ledger, Budget(None)) == ledger.starts
    assert len(ledger) == 1


def test_the_end_of_time_is_an_end() -> None:
    ledger = ledger_of("t2b-tiny", "d=2,m=2")
    ledger.check = Budget(0.0).check
    with pytest.raises(SearchEnd):
        TreeSearch()(ledger, Budget(0.0))


def test_a_tree_goes_on_where_it_was() -> None:
    """In the next round, or where the stage comes again: what is known is not priced anew."""
    ledger = ledger_of("t2b", "data=4,model=4", layers=2)
    stage = TreeSearch("parts", effort=200)
    counts = []
    for _ in range(3):
        stage(ledger, Budget(None))
        counts.append(len(ledger))
    assert counts[0] < counts[1] < counts[2]
    assert len(ledger.memory) == 1


def test_colors_alone_reach_the_optimum_of_a_small_program() -> None:
    model = model_of(analyzed("mlp"), "a=2,b=2")
    result = Search(model, memory_bytes=np.inf, stages=[TreeSearch(), Polishing()]).run()
    optimum = best_reachable(model, np.inf, action_cost=1e-4)
    assert result.cost == pytest.approx(optimum.cost, rel=1e-9)


def test_chance_is_the_seeds() -> None:
    model = model_of(analyzed("t2b", layers=2), "data=4,model=4")
    stages = TreeSearch("parts", temperature=2.0), Polishing()
    counts = [
        Search(model, memory_bytes=1e9, settings=Settings(seed=seed), stages=stages).run().states
        for seed in (0, 0, 1)
    ]
    assert counts[0] == counts[1] != counts[2]
