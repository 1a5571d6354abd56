"""Recomputation, offload and sharding chosen together.

Searches find shardings, and an integer program finds the memory policy for given shardings; they
take turns.  Every policy that is considered is traced and searched, so that prices are those of the
program that runs; the integer program only proposes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from toast.errors import SearchError, TargetError
from toast.hardware import Hardware
from toast.plan.plan import Plan
from toast.plan.policy_choice import PolicyChoice, best_choice, priced
from toast.plan.residual_costs import recomputation
from toast.program import PRESETS, MemoryPolicy, preset, survey
from toast.units import size_text, time_text

#: Policies that are traced and searched, beside those that keep and recompute everything.
_MOST_POLICIES = 4

#: Presets that are tried as well, and the share of the step by which they may seem longer.
_MOST_PRESETS, _LONGER = 3, 0.1

#: The share of the limit that a policy may leave free before another one is tried.
_FREE = 0.03

#: The share by which a policy of its own must be better than one that keeps or recomputes all.
_GAIN = 0.01


class PlanWith(Protocol):
    """A function that plans the program with a memory policy."""

    def __call__(self, policy: str | MemoryPolicy, /, start: Plan | None = None) -> Plan:
        """The plan; the search may begin with another one.  Errors are those of toast.plan."""


def joint_plan(
    plan_with: PlanWith, machine: Hardware, progress: Callable[[Any], None] | None = None
) -> Plan:
    """The plan with the shortest step that fits, of those with the policies that are tried.

    If none fits, it is that with the smallest peak.  The ``note`` of the result lists the others.

    :raises toast.errors.SearchError: if no plan is within the limit of the user.
    :raises toast.errors.TargetError: if the program has nothing to recompute.
    """
    return _JointSearch(plan_with, machine, progress).run()


class _JointSearch:
    """The plans that were made, and what is known from them."""

    def __init__(
        self, plan_with: PlanWith, machine: Hardware, progress: Callable[[Any], None] | None
    ) -> None:
        self._plan_with, self._machine, self._progress = plan_with, machine, progress
        #: By the text of the policy.
        self._plans: dict[str, Plan] = {}
        self._too_large: SearchError | None = None

    def run(self) -> Plan:
        self._plan("none")
        surveyed = self._attempt(survey(), "survey")
        if surveyed is not None:
            surveyed = self._improve(surveyed)
            self._try_presets(surveyed)
        if surveyed is None or not any(plan.fits for plan in self._plans.values()):
            self._plan("full")
        if not self._plans:
            assert self._too_large is not None
            raise self._too_large
        ranked = sorted(self._plans, key=self._rank)
        best = self._plans[ranked[0]]
        tried = [self._text(name) for name in ranked]
        note = f"remat=auto chose the first of {len(tried)} policies: {'; '.join(tried)}"
        if surveyed is not None and best.policy is not None:
            note += _gain_text(surveyed, best)
        return dataclasses.replace(best, note="\n".join(filter(None, [note, best.note])))

    def _improve(self, surveyed: Plan) -> Plan:
        """Tries the policies that the integer program proposes; returns the last survey."""
        extra = 0.0  # bytes that a policy took beyond those that were proposed
        for _ in range(_MOST_POLICIES):
            choice = self._proposed(surveyed, extra)
            if choice is None or str(choice.policy) in self._plans:
                break
            plan = self._plan(choice.policy)
            if plan is None:
                extra += _FREE * surveyed.memory_bytes
                continue
            needed = plan.needed_bytes(plan.after)
            proposed = surveyed.needed_bytes(surveyed.after) + choice.bytes
            if plan.fits and needed > (1.0 - _FREE) * plan.memory_bytes:
                break
            if not plan.fits:
                extra += max(needed - plan.memory_bytes, _FREE * plan.memory_bytes)
            elif needed < proposed:
                # The search has found shardings with less memory: what is recomputed under these?
                again = self._attempt(survey(), "survey", start=plan)
                if again is None:
                    break
                surveyed, extra = again, 0.0
        return surveyed

    def _try_presets(self, surveyed: Plan) -> None:
        """Tries the presets that seem little longer.

        Proposals do not know what is hidden behind products, so a preset may be better.
        """
        memory = surveyed.analysis.program.memory
        best = self._plans[min(self._plans, key=self._rank)] if self._plans else None
        if best is None or not best.fits or best.policy is None or memory is None:
            return
        costs = recomputation(surveyed)
        room = surveyed.memory_bytes - surveyed.needed_bytes(surveyed.after)
        longest = priced(costs, best.policy).seconds + _LONGER * best.after.step_seconds
        likely = []
        for name in PRESETS:
            with contextlib.suppress(TargetError):  # no residual has one of its names
                choice = priced(costs, preset(name).resolved(memory.blocks))
                if choice.bytes <= room and choice.seconds <= longest:
                    likely.append((choice.seconds, name, str(choice.policy)))
        for _, name, policy in sorted(likely)[:_MOST_PRESETS]:
            if policy not in self._plans:
                self._plan(name, start=best)

    def _proposed(self, surveyed: Plan, extra: float) -> PolicyChoice | None:
        room = surveyed.memory_bytes - surveyed.needed_bytes(surveyed.after) - extra
        return best_choice(recomputation(surveyed), room)

    def _plan(self, policy: str | MemoryPolicy, start: Plan | None = None) -> Plan | None:
        """The plan with a policy, which is kept; ``None`` if it is beyond the limit of the user."""
        name = policy if isinstance(policy, str) else "proposed"
        plan = self._attempt(policy, name, start)
        if plan is not None:
            self._plans.setdefault(str(plan.policy), plan)
        return plan

    def _attempt(
        self, policy: str | MemoryPolicy, name: str, start: Plan | None = None
    ) -> Plan | None:
        if self._progress:
            self._progress(f"remat {name}")
        try:
            return self._plan_with(policy, start=start)
        except SearchError as error:  # no plan is within the limit of the user
            self._too_large = error
            return None

    def _rank(self, name: str) -> tuple[bool, float]:
        plan = self._plans[name]
        price, own = plan.after, not (plan.policy and plan.policy.preset)
        seconds = price.step_seconds * (1.0 + _GAIN * own)
        return not plan.fits, seconds if plan.fits else price.peak_bytes

    def _text(self, name: str) -> str:
        plan = self._plans[name]
        policy = plan.policy
        label = (policy and policy.preset) or "a policy of its own"
        fits = "" if plan.fits else " (does not fit)"
        price = plan.after
        return f"{label} {time_text(price.step_seconds)}, {size_text(price.peak_bytes)}{fits}"


def _gain_text(surveyed: Plan, plan: Plan) -> str:
    """About how long recomputation takes in a plan, and what it frees; empty without any."""
    assert plan.policy is not None
    costs = recomputation(surveyed)
    choice = priced(costs, plan.policy)
    every = sum(r.bytes for r in costs.residuals if not r.is_input)
    freed = every - max(choice.bytes, 0.0)
    if not choice.recomputed_seconds or freed <= 0.0:
        return ""
    return (
        f"\nrecomputation takes about {time_text(choice.recomputed_seconds)} "
        f"({choice.recomputed_seconds / plan.after.step_seconds:.0%} of the step before overlap) "
        f"and frees about {size_text(freed)}"
    )
