"""The integer program of memory policies, against all policies."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from toast.cost import Choices, PolicyCosts, Recomputation
from toast.search.policy_program import best_choice

RESIDUALS = 5


def graph(random: np.random.Generator) -> tuple[PolicyCosts, Recomputation]:
    """Residuals among nodes, each of which needs some of the earlier ones; two moments."""
    nodes = 2 * RESIDUALS
    needs = []
    for node in range(nodes):
        number = node // 2 if node % 2 else -1
        users = {node + 1, *random.integers(node + 1, nodes + 1, 2).tolist()}
        needs += [(user if user < nodes else -1, node, number) for user in sorted(users)]
    user, node, residual = np.array(needs).T
    kept = random.integers(1, 9, (RESIDUALS, 2)).astype(float)
    node_bytes = random.integers(0, 3, (nodes, 2)).astype(float)
    costs = PolicyCosts(
        node_seconds=random.uniform(0.1, 2.0, nodes),
        node_bytes=node_bytes,
        keep_seconds=random.uniform(0.0, 0.3, RESIDUALS),
        move_seconds=random.uniform(0.5, 4.0, RESIDUALS),
        share_seconds=np.zeros(RESIDUALS),
        kept_bytes=kept,
        freed_bytes=np.zeros((RESIDUALS, 2)),
        shared_bytes=np.zeros((RESIDUALS, 2)),
        bytes=10.0 + node_bytes.sum(axis=0),
        busy_seconds=20.0,
    )
    return costs, Recomputation(nodes, user, node, residual, np.full(len(user), -1))


def price(costs: PolicyCosts, graph: Recomputation, choices: Choices) -> tuple[float, float]:
    """Seconds beyond those of the survey, and the peak."""
    runs = graph.running(choices)[0]
    keep, move = choices.keep[0], choices.move[0]
    bytes_ = costs.bytes - costs.node_bytes[~runs].sum(axis=0)
    bytes_ = bytes_ + costs.kept_bytes[keep].sum(axis=0) - costs.freed_bytes[move].sum(axis=0)
    bytes_ = bytes_ + costs.shared_bytes[choices.shared[0]].sum(axis=0)
    seconds = costs.busy_seconds - costs.node_seconds[~runs].sum()
    seconds += costs.keep_seconds[keep | move].sum() - costs.share_seconds[choices.shared[0]].sum()
    waiting = max(0.0, costs.move_seconds[move].sum() - seconds)
    return float(seconds + waiting), float(bytes_.max())


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_best_of_all_policies(seed: int) -> None:
    costs, needs = graph(np.random.default_rng(seed))
    none = np.zeros((1, RESIDUALS), dtype=bool)
    for limit in (12.0, 20.0, 30.0, 99.0):
        best = math.inf
        for words in itertools.product(("recompute", "keep", "offload"), repeat=RESIDUALS):
            keep, move = (np.array([[word == w for word in words]]) for w in ("keep", "offload"))
            seconds, peak = price(costs, needs, Choices(keep, move, none, none))
            if peak <= limit:
                best = min(best, seconds)
        chosen = best_choice(costs, needs, limit)
        if chosen is None:
            assert best == math.inf
            continue
        seconds, peak = price(costs, needs, chosen)
        assert peak <= limit * (1 + 1e-6)
        assert seconds == pytest.approx(best, rel=2e-3)


def one(**changes: float) -> tuple[PolicyCosts, Recomputation]:
    """An argument of a block of 8 bytes, which a node needs."""
    amounts = {"moved": 0.5, "shared": 0.0, "copies": 0.0, "room": 0.0} | changes
    costs = PolicyCosts(
        node_seconds=np.array([1.0]),
        node_bytes=np.zeros((1, 1)),
        keep_seconds=np.zeros(1),
        move_seconds=np.array([amounts["moved"]]),
        share_seconds=np.array([amounts["shared"]]),
        kept_bytes=np.zeros((1, 1)),
        freed_bytes=np.array([[8.0]]),
        shared_bytes=np.array([[amounts["copies"]]]),
        bytes=np.array([16.0]),
        busy_seconds=2.0,
    )
    user, node, residual = (np.array([number]) for number in (-1, 0, -1))
    return costs, Recomputation(1, user, node, residual, np.zeros(1, dtype=bool))


def test_offloaded_arguments_of_blocks_make_room() -> None:
    costs, needs = one()
    kept, moved = best_choice(costs, needs, 16.0), best_choice(costs, needs, 8.0)
    assert kept is not None
    assert moved is not None
    assert (kept.move.any(), moved.move.all()) == (False, True)
    assert best_choice(costs, needs, 7.0) is None


@pytest.mark.parametrize(("limit", "shared"), [(16.0, False), (20.0, True)])
def test_weights_stay_gathered_if_there_is_room(limit: float, shared: bool) -> None:
    costs, needs = one(shared=0.25, copies=4.0, moved=np.inf)
    chosen = best_choice(costs, needs, limit)
    assert chosen is not None
    assert bool(chosen.shared[0, 0]) is shared


def test_blocks_without_residuals_are_recomputed() -> None:
    none = np.zeros(0)
    wide = np.zeros((0, 1))
    costs = PolicyCosts(none, wide, none, none, none, wide, wide, wide, np.ones(1), 1.0)
    needs = Recomputation(0, *(np.zeros(0, dtype=np.int64),) * 4)
    chosen = best_choice(costs, needs, 2.0)
    assert chosen is not None
    assert chosen.keep.shape == (1, 0)


@pytest.mark.parametrize(("limit", "kept"), [(8.0, True), (7.0, None)])
def test_what_cannot_run_again_is_kept(limit: float, kept: bool | None) -> None:
    wide, none = np.zeros((1, 1)), np.zeros(1)
    costs = PolicyCosts(
        np.array([np.inf]), wide, none, np.array([np.inf]), none, np.array([[8.0]]), wide, wide,
        none, 1.0,
    )  # fmt: skip
    user, node, residual = (np.array([number]) for number in (-1, 0, 0))
    needs = Recomputation(1, user, node, residual, np.zeros(1, dtype=bool))
    chosen = best_choice(costs, needs, limit)
    assert (None if chosen is None else chosen.keep.all()) == kept
