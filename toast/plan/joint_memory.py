"""Recomputation, offload and sharding chosen together.

The program is traced as a survey, which recomputes everything.  One search in it moves shardings
and policy at once: the price of a state is that with its best policy
(:mod:`toast.cost.policy_prices`).
The program is then traced with the policy that wins, and searched from the survey's shardings on,
so that prices are those of the program that runs.  If it accumulates gradients, the number of
microbatches is chosen as well.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from toast.errors import PlanError, SearchError, TargetError
from toast.garbage import older_objects_stay
from toast.plan.memory_notes import is_gross_effect, net_effect
from toast.plan.plan import Plan
from toast.plan.policy_bound import policy_bound
from toast.plan.same_shardings import with_same_shardings
from toast.plan.survey_policies import GAIN, SurveyedChoice, SurveyPolicies
from toast.plan.written_policies import kept_price
from toast.program import MemoryPolicy, RunRange, survey
from toast.units import size_text, time_text

#: The most policies of the integer program, and the most presets, that are traced and searched.
_MOST_POLICIES, _MOST_PRESETS = 3, 3

#: The share of the step by which a preset may seem longer than the best plan.
_LONGER = 0.04

#: The share by which a step is longer than expected if other shardings make a policy fit; and the
#: share of the limit that is left free then.
_SQUEEZED, _SPARE = 0.08, 0.15

#: Presets whose own searches may find other shardings, and the most ops of a program for which they
#: are tried: such a program is traced and searched in seconds.
_OTHER_WAYS, _FEW_OPS = ("minimal", "full", "minimal_with_context"), 3_000

#: Further presets, which are tried if the survey's shardings do not suit them: if their steps would
#: take so many times as long as that of the best plan that fits.
_UNSUITED_WAYS, _UNSUITED = ("save_qkv_proj",), 1.3

#: A program with more ops takes half a minute to trace and to search several times: its best plan
#: is not searched again.  If it fits, the batch is cut once at most, and only if the step is then
#: expected to be shorter by this share.
_MORE_OPS, _WORTH_SECONDS = 20_000, 0.03

#: The most microbatches that are tried.
_MOST_MICROBATCHES = 64

#: The share of the limit that a policy may leave free before another one is tried; and the share
#: that is left free after one did not fit.
_FREE, _MARGIN = 0.03, 0.005


#: How the note of a joint plan begins.
_CHOSE = "remat=auto chose"


class PlanWith(Protocol):
    """A function that plans the program with a memory policy."""

    def __call__(
        self, policy: str | MemoryPolicy, /, start: Plan | None = None,
        microbatches: int | None = None,
    ) -> Plan:  # fmt: skip
        """The plan; the search may begin with another one.  Errors are those of toast.plan.

        Without a number of microbatches, it is that of the user or of the program.
        """


class _TimedPlans:
    """Plans with policies, and adds up the seconds of their stages."""

    def __init__(self, plan_with: PlanWith) -> None:
        self._plan_with = plan_with
        self._spent: collections.Counter[str] = collections.Counter()
        #: The plans that were counted: a plan may be asked for again.
        self._counted: list[weakref.ref[Plan]] = []

    def __call__(
        self, policy: str | MemoryPolicy, /, start: Plan | None = None,
        microbatches: int | None = None,
    ) -> Plan:  # fmt: skip
        try:
            plan = self._plan_with(policy, start=start, microbatches=microbatches)
        except SearchError as error:
            self._count(error.plan)
            raise
        self._count(plan)
        return plan

    def stages(self, seconds: float) -> dict[str, float]:
        """The seconds of all plans by stage, and of ``seconds``, those that are left."""
        chosen = {"memory policies": max(0.0, seconds - sum(self._spent.values()))}
        return {**self._spent, **chosen}

    def _count(self, plan: Plan | None) -> None:
        if plan is not None and all(plan is not known() for known in self._counted):
            self._counted.append(weakref.ref(plan))
            self._spent.update(plan.seconds)


@older_objects_stay()
def joint_plan(
    plan_with: PlanWith,
    progress: Callable[[Any], None] | None = None,
    *,
    may_cut_batch: bool = False,
) -> Plan:
    """The plan with the shortest step that fits, of those with the policies that are tried.

    If the batch may be cut, the program is also planned with more microbatches: if no policy fits,
    or if it takes less time to recompute less of smaller ones.  If no plan fits, it is the plan
    with the smallest peak.  The ``note`` of the result lists the others.

    :param may_cut_batch: whether the number of microbatches is free.
    :raises toast.errors.SearchError: if no plan is within the limit of the user.
    :raises toast.errors.TargetError: if the program has nothing to recompute.
    """
    begin = time.perf_counter()
    plan_with = clock = _TimedPlans(plan_with)
    searches = [_JointSearch(plan_with, progress, None)]
    try:
        searches[0].run()
    except TargetError as error:
        text = re.sub(r"remat (none|full): ", "remat auto: ", str(error))
        raise TargetError(text) from None
    if may_cut_batch:
        if not searches[0].fits:
            searches += _with_microbatches(plan_with, progress)
        else:
            choices = searches[0].in_more_microbatches()
            searches += _in_microbatches(plan_with, progress, choices)
    every = [plan for search in searches for plan in search.plans.values()]
    every.sort(key=_rank)
    too_large = [error for search in searches for error in search.too_large]
    if too_large and not (every and every[0].fits):
        raise min(too_large, key=lambda error: error.smallest_peak)
    best = every[0]
    tried = "; ".join(_text(plan) for plan in every)
    several = f"the first of {len(every)} policies: " if len(every) > 1 else ""
    note = f"{_CHOSE} {several}{tried}"
    return dataclasses.replace(
        best,
        note="\n".join(filter(None, [note, _with_effect(best, searches)])),
        policies_bound_seconds=_bound(searches, every, may_cut_batch=may_cut_batch),
        seconds=clock.stages(time.perf_counter() - begin),
    )


def is_joint(plan: Plan) -> bool:
    """Whether the policy of a plan was chosen together with its shardings."""
    return any(line.startswith(_CHOSE) for line in plan.note.splitlines())


def _with_effect(best: Plan, searches: Sequence[_JointSearch]) -> str:
    """The note of the best plan, with what its policy changes at its own shardings."""
    lines = best.note.splitlines()
    place = next((n for n, line in enumerate(lines) if is_gross_effect(line)), None)
    if place is None:
        return best.note
    for search in searches:
        with older_objects_stay():
            kept = search.price_of_keeping(best)
        if kept is not None:
            lines[place] = net_effect(best, *kept)
            return "\n".join(lines)
    return best.note


def _bound(
    searches: Sequence[_JointSearch], plans: Sequence[Plan], *, may_cut_batch: bool
) -> float | None:
    """The seconds that every plan takes at least; none if padding or several meshes were tried."""
    surveys = [search.surveyed for search in searches if search.surveyed is not None]
    if not surveys or any(plan.padding or plan.meshes for plan in [*surveys, *plans]):
        return None
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


def _in_microbatches(
    plan_with: PlanWith,
    progress: Callable[[Any], None] | None,
    choices: Sequence[tuple[int, MemoryPolicy]],
) -> Iterator[_JointSearch]:
    """Searches with policies in so many microbatches each, and in twice as many if need be."""
    for count, policy in choices:
        for number in (count, 2 * count):
            if number > _MOST_MICROBATCHES:
                break
            search = _JointSearch(plan_with, progress, number)
            try:
                search.plan_with_policy(policy)
            except TargetError:  # the number does not divide the batch
                return
            yield search
            if search.fits:
                break


def _rank(plan: Plan) -> tuple[bool, float]:
    price, own = plan.after, not (plan.policy and plan.policy.preset)
    seconds = price.step_seconds * (1.0 + GAIN * own)
    return not plan.fits, seconds if plan.fits else price.peak_bytes


def _text(plan: Plan) -> str:
    policy = plan.policy
    label = (policy and policy.preset) or "a policy of its own"
    if policy and any(RunRange.parse(entry.block).is_part for entry in policy.blocks):
        label = "a policy by layers"
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
        self.too_large: list[SearchError] = []
        self._policies: SurveyPolicies | None = None
        #: The policies that were searched without the survey's shardings, as texts.
        self._searched_anew: set[str] = set()
        #: What was expected of each plan, by the text of its policy.
        self._expected: dict[str, SurveyedChoice] = {}

    @property
    def fits(self) -> bool:
        """Whether a plan fits."""
        return any(plan.fits for plan in self.plans.values())

    @property
    def _is_large(self) -> bool:
        return self.surveyed is not None and len(self.surveyed.analysis.program.ops) > _MORE_OPS

    def in_more_microbatches(self) -> list[tuple[int, MemoryPolicy]]:
        """Numbers of microbatches that may be better than one for each of the plans, with policies.

        The memory that a microbatch leaves free is for a policy that recomputes less: these are
        twice as many microbatches with the best policy that fits then, and the number, a power of
        two, for which this policy has the shortest step.  There are none if the step is no shorter
        than that of the best plan, or if the program is large or does not accumulate gradients.
        """
        best = min(self.plans.values(), key=_rank)
        memory = best.analysis.program.memory
        if self._policies is None or not (memory and memory.accumulates):
            return []
        held = best.after.argument_bytes
        beside, room = self._policies.best(math.inf).needed_bytes - held, best.memory_bytes - held
        choices: dict[int, SurveyedChoice] = {}
        parts = 1
        while parts * room < beside and 2 * parts * best.microbatches <= _MOST_MICROBATCHES:
            parts *= 2
            choices[parts] = self._policies.best(held + parts * room)
        shortest = min(choices, key=lambda parts: choices[parts].step_seconds, default=0)
        tried, gain = ((shortest,), _WORTH_SECONDS) if self._is_large else ((2, shortest), GAIN)
        return [
            (parts * best.microbatches, choice.policy)
            for parts, choice in choices.items()
            if parts in tried and choice.step_seconds * (1.0 + gain) < best.after.step_seconds
        ]

    def price_of_keeping(self, plan: Plan) -> tuple[float, float] | None:
        """Seconds and peak with everything kept, under the shardings of one of the plans.

        ``None`` for plans of another search, or if the program with everything kept is not known,
        as that of a large program, which takes seconds to write.
        """
        if all(plan is not mine for mine in self.plans.values()):
            return None
        for mine in self.plans.values():
            alike = mine.padding == plan.padding
            if alike and mine.policy and mine.policy.preset == "none":
                other = with_same_shardings(plan, mine.analysis).after
                return other.step_seconds, other.peak_bytes
        prices = None
        if self.surveyed is not None and not self._is_large:
            prices = kept_price(plan, self.surveyed)
        return (float(prices.seconds[0]), float(prices.peak_bytes[0])) if prices else None

    def plan_with_policy(self, policy: MemoryPolicy) -> None:
        """Plans the program with one policy."""
        self._plan(policy)

    def survey_fits(self) -> bool:
        """Whether a policy is expected to fit."""
        self.surveyed = self._attempt(survey(), "survey")
        if self.surveyed is None:
            return False
        self._policies = SurveyPolicies(self.surveyed)
        return self._policies.best().fits

    def run(self) -> None:
        """Plans the program with the policy that its survey chooses, and with those beside it."""
        if self.surveyed is None:
            try:
                self.survey_fits()
            except TargetError:  # what the program recomputes itself stays, and the note says so
                plan = self._plan("none")
                memory = plan and plan.analysis.program.memory
                if memory and memory.own:
                    return
                raise
        if self._policies is not None:
            self._try_best(self._policies)
            self._try_presets(self._policies)
            self._try_anew(self._policies)
            self._try_other_ways()
            self._try_layers()
        if not self.fits:
            self._plan("full")

    def _try_best(self, policies: SurveyPolicies) -> None:
        """Tries the policies of the integer program; the limit is corrected by what they take.

        Tracing and searching a large program takes seconds: if a policy by layers is expected to
        be better, it is tried at once.
        """

        def choose(limit: float) -> SurveyedChoice:
            by_layers = policies.by_layers(limit) if self._is_large else None
            return by_layers or policies.best(limit)

        self._try(choose, policies.limit)

    def _try_layers(self) -> None:
        """Tries policies under which the first layers decide otherwise than the others.

        They are traced if they are expected to be better than the best plan so far.
        """
        assert self._policies is not None
        policies = self._policies

        def choose(limit: float) -> SurveyedChoice | None:
            choice = policies.by_layers(limit)
            best = min(self.plans.values(), key=_rank, default=None)
            if choice is None or best is None or not best.fits:
                return choice
            worth = best.after.step_seconds * (1.0 - GAIN) / self._longer(best)
            return choice if choice.step_seconds < worth else None

        self._try(choose, policies.limit)

    def _longer(self, plan: Plan) -> float:
        """By how much the step of a plan is longer than expected, as a factor; at most 1."""
        expected = self._expected.get(str(plan.policy))
        if expected is None:
            return 1.0
        return min(1.0, plan.after.step_seconds / expected.step_seconds)

    def _try(self, choose: Callable[[float], SurveyedChoice | None], most: float) -> None:
        """Tries what is chosen for a limit, which is corrected by what the plans take."""
        limit = most
        for _ in range(_MOST_POLICIES):
            choice = choose(limit)
            if choice is None or str(choice.policy) in self._expected:
                return
            plan = self._plan(choice.policy, choice)
            if plan is None:
                limit -= _FREE * most
                continue
            needed = plan.needed_bytes(plan.after)
            over = needed - plan.memory_bytes
            if -_FREE * plan.memory_bytes < over <= 0.0:
                if plan.after.step_seconds < choice.step_seconds * (1.0 + _SQUEEZED):
                    return
                # It only fits under slower shardings than those of the survey.
                limit = min(limit, choice.needed_bytes) - _SPARE * most
                continue
            limit = min(limit, choice.needed_bytes) - over - (over > 0.0) * _MARGIN * most
            if over <= 0.0:
                better = choose(limit)
                if better is None or better.step_seconds > choice.step_seconds * (1.0 - GAIN):
                    return

    def _try_presets(self, policies: SurveyPolicies) -> None:
        """Tries presets that are expected to be better than the best plan so far."""
        for _ in range(_MOST_PRESETS):
            best = min(self.plans.values(), key=_rank, default=None)
            if best is None:
                return
            # Steps that are longer, by what is expected of their policies, are not of use.
            most = best.after.step_seconds * (1.0 + _LONGER) / self._longer(best)
            most = most if best.fits else math.inf
            others = [
                choice
                for choice in policies.presets().values()
                if str(choice.policy) not in self._expected
            ]
            choice = policies.shortest(others, most)
            if choice is None or choice.step_seconds > most:
                return
            name = choice.policy.preset
            # A search of its own may find other shardings than that of the survey.
            self._plan(name, choice, anew=True)

    def _try_anew(self, policies: SurveyPolicies) -> None:
        """Searches the shardings of the best plan again, from none on, if its policy is a preset.

        So the joint plan is never slower than a plan with the preset.
        """
        best = min(self.plans.values(), key=_rank, default=None)
        if best is None or self._is_large:
            return
        if str(best.policy) in self._searched_anew:
            return
        for choice in policies.presets().values():
            if str(choice.policy) == str(best.policy):
                self._plan(choice.policy.preset, anew=True)
                return

    def _try_other_ways(self) -> None:
        """Tries presets for other shardings than those of the survey.

        If one is better, a survey that begins with its shardings is searched as well.
        """
        assert self.surveyed is not None
        if len(self.surveyed.analysis.program.ops) > _FEW_OPS:
            return
        for name in (*_OTHER_WAYS, *_UNSUITED_WAYS):
            assert self._policies is not None
            best = min(self.plans.values(), key=_rank, default=None)
            choice = self._policies.presets().get(name)
            if best is None or choice is None or str(choice.policy) in self.plans:
                continue
            suits = best.fits and choice.step_seconds < _UNSUITED * best.after.step_seconds
            if name in _UNSUITED_WAYS and suits:
                continue
            plan = self._plan(name, self._policies.written(choice), anew=True)
            if plan is None or _rank(plan) >= _rank(best):
                continue
            again = self._attempt(survey(), "survey", plan)
            if again is not None:
                self.surveyed, self._policies = again, SurveyPolicies(again)
                choice = self._policies.best()
                self._plan(choice.policy, choice)

    def _plan(
        self,
        policy: str | MemoryPolicy,
        expected: SurveyedChoice | None = None,
        *,
        anew: bool = False,
    ) -> Plan | None:
        """The plan with a policy, which is kept; ``None`` if it is beyond the limit of the user.

        Its search begins with the shardings of the survey, or ``anew``.
        """
        name = policy if isinstance(policy, str) else policy.preset or "proposed"
        if expected is not None:
            self._expected[str(expected.policy)] = expected
        plan = self._attempt(policy, name, None if anew else self.surveyed)
        if plan is not None:
            text = str(plan.policy)
            self.plans[text] = min(plan, self.plans.get(text, plan), key=_rank)
            if anew:
                self._searched_anew.add(text)
        return plan

    def _attempt(
        self, policy: str | MemoryPolicy, name: str, start: Plan | None = None
    ) -> Plan | None:
        if self._progress:
            count = f", {self._microbatches} microbatches" if self._microbatches else ""
            self._progress(f"remat {name}{count}")
        try:
            return self._plan_with(policy, start=start, microbatches=self._microbatches)
        except PlanError:
            if start is None:
                raise
            # The start may shard nothing but ops that do not run with this policy.
            return self._attempt(policy, name)
        except SearchError as error:  # the plan is not within the limit of the user
            self.too_large.append(error)
            plan: Plan | None = error.plan
            return plan
