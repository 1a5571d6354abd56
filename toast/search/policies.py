"""A stage that finds memory policies for the best state of a survey's search."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from toast.cost import Choices, PolicyMemo, PricedPolicy
from toast.search.ledger import Ledger
from toast.search.policy_program import best_choice
from toast.search.stage import Budget, Stage
from toast.space import States

#: Other limits for which policies are found: shares of the way from the least to the most memory.
_SHARES = (0.1, 0.3, 0.5, 0.75)

#: Times that a limit is corrected by what a policy leaves free, and the least share of the limit.
_CORRECTIONS, _FREE = 2, 0.01


@dataclasses.dataclass(frozen=True)
class BestPolicies:
    """A stage: adds the best policies of the best state to the family, for several limits.

    It does nothing in the search of a program that is no survey.
    """

    def __call__(self, ledger: Ledger, budget: Budget) -> None:
        """Price the best trajectory again, if there are new policies."""
        memo = ledger.memo
        if not isinstance(memo, PolicyMemo):
            return
        best = ledger.best if np.isfinite(ledger.best.rank) else ledger.begin()
        if ledger.memory.get(BestPolicies) == best.actions:
            return
        if grow(memo, ledger.replay(best.actions)):
            best = ledger.price_again(best)
        ledger.memory[BestPolicies] = best.actions


def with_best_policies(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages of a survey's search: policies are found before each of ``stages``."""
    return tuple(each for stage in stages for each in (BestPolicies(), stage))


def grow(memo: PolicyMemo, state: States) -> int:
    """Adds policies that may be the best for states like this one; returns how many are new."""
    costs = memo.costs(state)
    most = float((costs.bytes + costs.kept_bytes.sum(axis=0)).max(initial=0.0))
    least = float(costs.bytes.max(initial=0.0))
    limits = [np.inf, *(least + share * (most - least) for share in _SHARES)]
    found = [best_choice(costs, memo.recomputation, limit) for limit in limits]
    found.append(_within(memo, state))
    return memo.add(Choices.joined([choices for choices in found if choices is not None]))


def best_policy(memo: PolicyMemo, state: States, others: Choices | None = None) -> PricedPolicy:
    """The best policy for a state: that of the integer program, one of the family, or another."""
    memo.add(_within(memo, state))
    return memo.best_of(state, others)


def _within(memo: PolicyMemo, state: States) -> Choices:
    """The policy of the integer program within the limit; that with the least memory otherwise."""
    costs, most = memo.costs(state), memo.most_bytes(state)
    best, limit = None, most
    for _ in range(1 + _CORRECTIONS):
        choices = best_choice(costs, memo.recomputation, limit)
        if choices is None:
            break
        priced = memo.policy(state, choices)
        over = priced.peak_bytes - most
        if over <= 0 and (best is None or priced.step_seconds < best.step_seconds):
            best = priced
        if -_FREE * most < over <= 0 or (over <= 0 and choices.keep.all()):
            break
        limit -= over
    if best is not None:
        return best.choices
    moved = np.isfinite(costs.move_seconds) & (costs.freed_bytes.max(axis=1, initial=0.0) > 0)
    nothing = np.zeros((1, len(moved)), dtype=bool)
    return Choices(nothing, moved[None], nothing, nothing)


__all__ = ["BestPolicies", "best_policy", "grow", "with_best_policies"]
