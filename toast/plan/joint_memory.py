"""Recomputation, offload and sharding chosen together.

Searches find shardings, and an integer program finds the memory policy for given shardings; they
take turns.  Every policy that is considered is traced and searched, so that prices are those of the
program that runs; the integer program only proposes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from toast.errors import SearchError, TargetError
from toast.plan.plan import Plan
from toast.plan.policy_bound import policy_bound
from toast.plan.policy_choice import PolicyChoice, best_choice, priced
from toast.plan.residual_costs import recomputation
from toast.program import PRESETS, MemoryPolicy, preset, survey
from toast.units import size_text, time_text

#: Policies that are traced and searched, beside those that keep and recompute everything.
_MOST_POLICIES = 4

#: Presets that are tried as well, and the share of the step by which they may seem longer.
_MOST_PRESETS, _LONGER = 3, 0.1

#: The most microbatches that are tried.
_MOST_MICROBATCHES = 64

#: The share of the limit that a policy may leave free before another one is tried.
_FREE = 0.03

#: The share by which a policy of its own must be better than one that keeps or recomputes all.
_GAIN = 0.01


class PlanWith(Protocol):
    """A function that plans the program with a memory policy."""

    def __call__(
        self, policy: str | MemoryPolicy, /, start: Plan | None = None,
        microbatches: int | None = None,
    ) -> Plan:  # fmt: skip
        """The plan; the search may begin with another one.  Errors are those of toast.plan.

        Without a number of microbatches, it is that of the user or of the program.
        """


def joint_plan(
    plan_with: PlanWith,
    progress: Callable[[Any], None] | None = None,
    *,
    may_cut_batch: bool = False,
) -> Plan:
    """The plan with the shortest step that fits, of those with the policies that are tried.

    If none fits, and the batch may be cut, the program is planned with more microbatches.  If none
    fits then, it is the plan with the smallest peak.  The ``note`` of the result lists the others.

    :param may_cut_batch: whether the number of microbatches is free.
    :raises toast.errors.SearchError: if no plan is within the limit of the user.
    :raises toast.errors.TargetError: if the program has nothing to recompute.
    """
    searches = [_JointSearch(plan_with, progress, None)]
    try:
        searches[0].run()
    except TargetError as error:
        raise TargetError(re.sub(r"remat (none|full): ", "remat auto: ", str(error))) from None
    if may_cut_batch and not searches[0].fits:
        searches += _with_microbatches(plan_with, progress)
    every = [plan for search in searches for plan in search.plans.values()]
    if not every:
        assert searches[0].too_large is not None
        raise searches[0].too_large
    every.sort(key=_rank)
    best = every[0]
    tried = "; ".join(_text(plan) for plan in every)
    note = f"remat=auto chose the first of {len(every)} policies: {tried}"
    return dataclasses.replace(
        best,
        note="\n".join(filter(None, [note, best.note])),
        policies_bound_seconds=_bound(searches, every, may_cut_batch=may_cut_batch),
    )


def _bound(
    searches: Sequence[_JointSearch], plans: Sequence[Plan], *, may_cut_batch: bool
) -> float:
    """The seconds that every plan takes at least; 0 if padding or several meshes were tried."""
    surveys = [search.surveyed for search in searches if search.surveyed is not None]
    if not surveys or any(plan.padding or plan.meshes for plan in [*surveys, *plans]):
        return 0.0
    most = _MOST_MICROBATCHES if may_cut_batch else 1
    return min(
        policy_bound(plan, most_microbatches=max(1, most // plan.microbatches)) for plan in surveys
    )


def _with_microbatches(
    plan_with: PlanWith, progress: Callable[[Any], None] | None
) -> Iterator[_JointSearch]:
    """Searches with the smallest power of two of microbatches that fits, and with the next one."""
    count, fits = 1, False
    while count < _MOST_MICROBATCHES:
        count *= 2
        search = _JointSearch(plan_with, progress, count)
        try:
            if not fits and not search.survey_fits():
                continue
            search.run()
        except TargetError:  # no gradients are accumulated, or the number does not divide the batch
            return
        yield search
        if fits:
            return
        fits = search.fits


def _rank(plan: Plan) -> tuple[bool, float]:
    price, own = plan.after, not (plan.policy and plan.policy.preset)
    seconds = price.step_seconds * (1.0 + _GAIN * own)
    return not plan.fits, seconds if plan.fits else price.peak_bytes


def _text(plan: Plan) -> str:
    label = (plan.policy and plan.policy.preset) or "a policy of its own"
    if plan.microbatches > 1:
        label += f" in {plan.microbatches} microbatches"
    fits = "" if plan.fits else " (does not fit)"
    return f"{label} {time_text(plan.after.step_seconds)}, {size_text(plan.after.peak_bytes)}{fits}"


class _JointSearch:
    """The plans with one number of microbatches, and what is known from them."""

    def __init__(
        self,
        plan_with: PlanWith,
        progress: Callable[[Any], None] | None,
        microbatches: int | None,
    ) -> None:
        self._plan_with, self._progress = plan_with, progress
        self._microbatches = microbatches
        #: By the text of the policy.
        self.plans: dict[str, Plan] = {}
        self.surveyed: Plan | None = None
        self.too_large: SearchError | None = None

    @property
    def fits(self) -> bool:
        """Whether a plan fits."""
        return any(plan.fits for plan in self.plans.values())

    def survey_fits(self) -> bool:
        """Whether the program fits if everything is recomputed."""
        self.surveyed = self._attempt(survey(), "survey")
        return self.surveyed is not None and self.surveyed.fits

    def run(self) -> None:
        """Plans the program with several policies."""
        self._plan("none")
        if self.surveyed is None:
            try:
                self.survey_fits()
            except TargetError:  # what the program recomputes itself stays, and the note says so
                known = [plan.analysis.program.memory for plan in self.plans.values()]
                if any(memory.own for memory in known if memory):
                    return
                raise
        if self.surveyed is not None:
            self.surveyed = self._improve(self.surveyed)
            self._try_presets(self.surveyed)
        if not self.fits:
            self._plan("full")

    def _improve(self, surveyed: Plan) -> Plan:
        """Tries the policies that the integer program proposes; returns the last survey."""
        extra = 0.0  # bytes that a policy took beyond those that were proposed
        for _ in range(_MOST_POLICIES):
            choice = self._proposed(surveyed, extra)
            if choice is None or str(choice.policy) in self.plans:
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
        best = (
            self.plans[min(self.plans, key=lambda text: _rank(self.plans[text]))]
            if self.plans
            else None
        )
        if best is None or not best.fits or best.policy is None or memory is None:
            return
        costs = recomputation(surveyed)
        room = surveyed.memory_bytes - surveyed.needed_bytes(surveyed.after)
        longest = priced(costs, best.policy).seconds + _LONGER * best.after.step_seconds
        likely = []
        linked = math.isfinite(best.hardware.host_bytes_per_s)
        for name in PRESETS:
            if preset(name).offloads and not linked:
                continue
            with contextlib.suppress(TargetError):  # no residual has one of its names
                choice = priced(costs, preset(name).resolved(memory.blocks))
                if choice.bytes <= room and choice.seconds <= longest:
                    likely.append((choice.seconds, name, str(choice.policy)))
        for _, name, policy in sorted(likely)[:_MOST_PRESETS]:
            if policy not in self.plans:
                self._plan(name, start=best)

    def _proposed(self, surveyed: Plan, extra: float) -> PolicyChoice | None:
        room = surveyed.memory_bytes - surveyed.needed_bytes(surveyed.after) - extra
        return best_choice(recomputation(surveyed), room)

    def _plan(self, policy: str | MemoryPolicy, start: Plan | None = None) -> Plan | None:
        """The plan with a policy, which is kept; ``None`` if it is beyond the limit of the user."""
        name = policy if isinstance(policy, str) else "proposed"
        plan = self._attempt(policy, name, start)
        if plan is not None:
            self.plans.setdefault(str(plan.policy), plan)
        return plan

    def _attempt(
        self, policy: str | MemoryPolicy, name: str, start: Plan | None = None
    ) -> Plan | None:
        if self._progress:
            count = f", {self._microbatches} microbatches" if self._microbatches else ""
            self._progress(f"remat {name}{count}")
        try:
            return self._plan_with(policy, start=start, microbatches=self._microbatches)
        except SearchError as error:  # no plan is within the limit of the user
            self.too_large = error
            return None
