"""The memory policy that a survey chooses, by the names of residuals."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable

import numpy as np

from toast.cost import (
    Choices,
    CostModel,
    PolicyCosts,
    PolicyMemo,
    PolicyModel,
    PricedPolicy,
    Residuals,
)
from toast.cost.policy_programs import NotWritten
from toast.errors import TargetError
from toast.hardware import Hardware
from toast.plan.plan import Plan
from toast.program import PRESETS, BlockPolicy, MemoryPolicy, Program, RunRange, preset
from toast.program.memory_policy import UNNAMED
from toast.records import uncached_copy
from toast.search import best_policy, grow

#: A share of the runs: so far from the estimate, other numbers are tried first.
_NEAR = 16

#: The share by which a policy that says more must be better than one that says less.
GAIN = 0.01

#: A program with more ops takes seconds to write and to price: of such surveys, presets with much
#: longer steps, by quick estimates, are not written.
_MOST_OPS = 6_000

#: How often a limit is corrected by what the program of a policy needs, and the share of the limit
#: by which it may be off.
_CORRECTIONS, _OFF = 2, 0.01

#: Of policies that decide differently for some layers, so many are written: the best by estimates;
#: one of a large program.
_WRITTEN = 3

#: Shares by which the step and the memory of a policy may differ from quick estimates.
_UNSURE_TIME, _UNSURE_MEMORY = 0.05, 0.15


@dataclasses.dataclass(frozen=True)
class SurveyedChoice:
    """A policy under the shardings of a survey, and its price as estimated from these."""

    policy: MemoryPolicy
    step_seconds: float
    peak_bytes: float
    #: Bytes to compare with the limit (:meth:`Plan.needed_bytes`), and whether they are within it.
    needed_bytes: float
    fits: bool
    #: Seconds of what runs again, before overlap, and the bytes at the peak that it frees.
    recomputed_seconds: float
    freed_bytes: float
    #: Whether its prices are those of its program, written from the survey, rather than those of
    #: the survey less what does not run.
    written: bool = False


def is_survey(program: Program) -> bool:
    """Whether a program recomputes everything, and its residuals have names."""
    policy = program.memory and program.memory.policy
    return bool(policy and policy.surveys)


def with_policies(model: CostModel, memory_bytes: float) -> CostModel:
    """A model that prices the states of a survey with their best policies; others stay."""
    program = model.space.analysis.program
    if not is_survey(program):
        return model
    return PolicyModel(model, memory_bytes, tuple(_presets(program, model.hardware).values()))


def without_policies(model: CostModel) -> CostModel:
    """The model of the program as it is."""
    return model.plain if isinstance(model, PolicyModel) and model.plain else model


def _presets(program: Program, hardware: Hardware) -> dict[str, MemoryPolicy]:
    """The presets that a program may have, by name, with the names of its residuals.

    Without a link to the host, none that offloads.
    """
    found: dict[str, MemoryPolicy] = {}
    assert program.memory is not None
    for name in PRESETS:
        with contextlib.suppress(TargetError):  # no residual has one of its names
            found[name] = preset(name).resolved(program.memory.blocks)
    return {
        name: policy for name, policy in found.items()
        if hardware.has_host_link or not policy.offloads
    }  # fmt: skip


class SurveyPolicies:
    """The policies of a survey under the shardings of its plan."""

    def __init__(self, surveyed: Plan) -> None:
        program = surveyed.analysis.program
        self._plan, self._presets = surveyed, _presets(program, surveyed.hardware)
        self._memory = program.memory
        self._model = PolicyModel(
            surveyed.model, surveyed.memory_bytes, tuple(self._presets.values()), surveyed.state
        )
        self._memo: PolicyMemo = self._model.memo(surveyed.memory_bytes)
        self._programs = surveyed.policy_prices
        self._by_layers: dict[float, SurveyedChoice | None] = {}  # by limit
        self._cuts: dict[str, tuple[int, ...]] = {}
        self._known: dict[tuple[tuple[str, tuple[int, ...]], ...], SurveyPolicies] = {(): self}
        assert self._memory is not None
        named = {residual.block for residual in self._model.policies.residuals.named}
        #: How often each block with residuals runs in a microbatch.
        self._runs = {
            block.name: block.runs // self._memory.microbatches
            for block in self._memory.blocks if block.name in named
        }  # fmt: skip

    @functools.cached_property
    def _costs(self) -> PolicyCosts:
        """What residuals and nodes cost under the shardings of the plan."""
        return self._memo.costs(self._plan.state)

    @property
    def _residuals(self) -> Residuals:
        return self._model.policies.residuals

    @property
    def _is_large(self) -> bool:
        """Whether it takes seconds to write and to price a program."""
        return len(self._plan.analysis.program.ops) > _MOST_OPS

    @property
    def limit(self) -> float:
        """The bytes of a device."""
        return self._plan.memory_bytes

    def best(self, limit: float | None = None) -> SurveyedChoice:
        """The policy with the shortest step that fits, or with the least memory.

        ``limit`` are other bytes than those of a device.
        """
        most = aim = self.limit if limit is None else limit
        tried: dict[str, SurveyedChoice] = {}
        for _ in range(1 + _CORRECTIONS):
            choice = self._choice(self._shortest(aim))
            if str(choice.policy) in tried:
                break
            tried[str(choice.policy)] = found = self.written(choice)
            # The survey needs as much less or more than the program with other policies, too.
            off = found.needed_bytes / max(choice.needed_bytes, 1.0)
            binding = max(found.needed_bytes, choice.needed_bytes * max(1.0, off)) > (
                (1.0 - _OFF) * most
            )
            near = abs(aim * off - most) <= _OFF * most
            enough = self._is_large and found.needed_bytes <= most
            if not found.written or not binding or near or enough:
                break
            # What is far off its estimate says little about others.
            aim = max(most / off, aim / 2)
        fitting = [each for each in tried.values() if each.needed_bytes <= most]
        if fitting:
            return min(fitting, key=lambda each: each.step_seconds)
        return min(tried.values(), key=lambda each: each.needed_bytes)

    def _shortest(self, limit: float) -> PricedPolicy:
        """The policy with the shortest step that needs at most ``limit`` bytes, by estimates."""
        return best_policy(self._memo.within(limit), self._plan.state)

    def presets(self) -> dict[str, SurveyedChoice]:
        """The presets that the program may have, by name, with quick estimates of prices."""
        return {name: self._estimated(policy) for name, policy in self._presets.items()}

    def shortest(
        self, choices: Iterable[SurveyedChoice], most: float = math.inf
    ) -> SurveyedChoice | None:
        """The choice with the shortest step of those that fit, by the price of its program.

        Quick estimates say whose programs are written: only those whose steps may take ``most``
        seconds.
        """
        unsure, more = (0.0, 0.0) if self._is_large else (_UNSURE_TIME, _UNSURE_MEMORY)
        likely = [c for c in choices if c.needed_bytes <= self.limit * (1.0 + more)]
        best: SurveyedChoice | None = None
        for choice in sorted(likely, key=lambda each: each.step_seconds):
            longest = min(most, best.step_seconds) if best else most
            if choice.step_seconds > longest * (1.0 + unsure):
                break
            found = self.written(choice)
            if found.fits and (best is None or found.step_seconds < best.step_seconds):
                best = found
        return best

    def written(self, choice: SurveyedChoice) -> SurveyedChoice:
        """A choice with the price of its program.

        If its program is not written, it is as it is; with ranges of runs, it is as far off as the
        policies of the ranges are for all runs.
        """
        if choice.written:
            return choice
        cuts = {name: choice.policy.cuts(name) for name in self._runs if choice.policy.cuts(name)}
        residuals = self._cut(cuts)._residuals
        try:
            prices = self._programs.price(residuals, residuals.choices([choice.policy]))
        except NotWritten:
            return self._corrected(choice) if cuts else choice
        (peak,), (arguments,) = prices.peak_bytes.tolist(), prices.argument_bytes.tolist()
        needed = float(self._plan.model.needed_bytes(arguments, peak))
        return dataclasses.replace(
            choice, step_seconds=float(prices.seconds[0]), peak_bytes=peak, needed_bytes=needed,
            fits=needed <= self._plan.memory_bytes, written=True,
        )  # fmt: skip

    def by_layers(self, limit: float | None = None) -> SurveyedChoice | None:
        """The best policy under which the first runs of blocks decide otherwise than the others.

        ``None`` if none is better than that of :meth:`best`, by :data:`GAIN`.
        """
        room = self.limit if limit is None else limit
        if room not in self._by_layers:
            self._by_layers[room] = self._better_by_layers(room)
        return self._by_layers[room]

    def _better_by_layers(self, room: float) -> SurveyedChoice | None:
        uniform, most = self.best(room), max(self._runs.values(), default=0)
        unlimited, limited = self._choice(self._shortest(math.inf)), uniform
        if self._is_large:
            limited = self._estimated(uniform.policy)
        else:
            unlimited = self.written(unlimited)
        if unlimited.step_seconds > limited.step_seconds * (1.0 - GAIN):
            return None
        grow(self._memo, self._plan.state)
        front = self._memo.front(self._plan.state)
        # By how much the program of the policy for all runs is off its estimate, others are, too.
        estimated = self._estimated(uniform.policy)
        aim = room * estimated.needed_bytes / max(uniform.needed_bytes, 1.0)
        for _ in range(1 if self._is_large else 1 + _CORRECTIONS):
            written = self._by_ranges(front, most, aim)
            if uniform.needed_bytes > room:
                return min(written, key=lambda choice: choice.needed_bytes, default=None)
            fitting = [choice for choice in written if choice.needed_bytes <= room]
            if fitting or not written:
                break
            aim *= room / min(choice.needed_bytes for choice in written)
        best = min(fitting, key=lambda choice: choice.step_seconds, default=None)
        worth = best and best.step_seconds < uniform.step_seconds * (1.0 - GAIN)
        return best if worth else None

    def _by_ranges(self, front: Choices, most: int, limit: float) -> list[SurveyedChoice]:
        """The shortest policies of two ranges of ``most`` runs, with the prices of their programs.

        By quick estimates, they need at most ``limit`` bytes.
        """
        tried: dict[int, SurveyedChoice | None] = {}
        step = max(1, most // _NEAR)
        number = self._first_number(front, most, limit)
        numbers = [number]
        while numbers:
            for each in numbers:
                if 0 < each < most and each not in tried:
                    cut = self._cut(self._cuts_at(each / most))
                    pairs = cut._residuals.pairs(self._residuals, front)
                    tried[each] = cut._best_ranges(pairs, limit)
            fitting = [(c.step_seconds, n) for n, c in tried.items() if c is not None]
            number = min(fitting)[1] if fitting else number + 2 * step
            numbers = [number - step, number + step] if step else []
            step //= 2
        ranked = sorted(
            (choice for choice in tried.values() if choice is not None),
            key=lambda choice: choice.step_seconds,
        )
        return [self.written(choice) for choice in ranked[: 1 if self._is_large else _WRITTEN]]

    def _corrected(self, choice: SurveyedChoice) -> SurveyedChoice:
        """A choice with ranges of runs, as far off as the policies of its ranges for all runs.

        Each range has the share of its runs of the seconds and of the bytes.
        """
        off, total = np.zeros(3), 0.0
        ranges = [RunRange.parse(entry.block) for entry in choice.policy.blocks]
        for number, runs in enumerate(ranges):
            if runs.block not in self._runs or not runs.is_part:
                continue
            # The same decision for all runs; of other blocks, that for their range here.
            like = {
                each.block: entry
                for entry, each in zip(choice.policy.blocks, ranges, strict=True)
                if each.includes(runs) or (each.block != runs.block and not each.is_part)
            }
            for entry, each in zip(choice.policy.blocks, ranges, strict=True):
                like.setdefault(each.block, entry)
            like[runs.block] = choice.policy.blocks[number]
            policy = MemoryPolicy(tuple(
                dataclasses.replace(entry, block=block) for block, entry in like.items()
            ))  # fmt: skip
            estimated = self._cut({})._estimated(policy)
            found = self._cut({}).written(estimated)
            share = (min(runs.end, self._runs[runs.block]) - runs.first) / self._runs[runs.block]
            off += share * np.array([
                found.step_seconds - estimated.step_seconds,
                found.peak_bytes - estimated.peak_bytes,
                found.needed_bytes - estimated.needed_bytes,
            ])  # fmt: skip
            total += share
        step, peak, needed = (off / max(total, 1.0)).tolist()  # the mean of several blocks
        return dataclasses.replace(
            choice,
            step_seconds=choice.step_seconds + step,
            peak_bytes=choice.peak_bytes + peak,
            needed_bytes=choice.needed_bytes + needed,
            fits=choice.needed_bytes + needed <= self._plan.memory_bytes,
        )

    def _first_number(self, front: Choices, most: int, limit: float) -> int:
        """About how many of ``most`` runs decide otherwise, under the best pair of policies.

        Between two policies, steps and memory are about those of their shares.
        """
        prices = [
            self._memo.policy(self._plan.state, front.take(slice(n, n + 1)))
            for n in range(len(front))
        ]
        room = self._memo.within(limit).most_bytes(self._plan.state)
        best = math.inf, most // 2
        for one, other in itertools.combinations(prices, 2):
            if one.peak_bytes < room < other.peak_bytes:
                share = (other.peak_bytes - room) / (other.peak_bytes - one.peak_bytes)
                seconds = share * one.step_seconds + (1.0 - share) * other.step_seconds
                best = min(best, (seconds, math.ceil(share * most)))
        return min(max(1, best[1]), most - 1)

    def _cuts_at(self, share: float) -> dict[str, tuple[int, ...]]:
        """Where each block is cut if ``share`` of its runs decide otherwise than the others."""
        cuts = {block: round(share * runs) for block, runs in self._runs.items()}
        return {block: (at,) for block, at in cuts.items() if 0 < at < self._runs[block]}

    def _cut(self, cuts: dict[str, tuple[int, ...]]) -> SurveyPolicies:
        """The policies with decisions of their own between ``cuts``."""
        key = tuple(sorted(cuts.items()))
        if key in self._known:
            return self._known[key]
        other = self._known[key] = uncached_copy(self)
        other._cuts, other._by_layers = cuts, {}
        other._model = self._model.cut(cuts, tuple(self._presets.values()))
        other._memo = other._model.memo(self._plan.memory_bytes)
        return other

    def _best_ranges(self, others: Choices, limit: float) -> SurveyedChoice | None:
        """The best policy that fits, of the integer program or of others, as it will be traced."""
        memo = self._memo.within(limit)
        found = self._named(best_policy(memo, self._plan.state, others).choices)
        # Values without names may be recomputed where all others are kept.
        names = tuple(
            dataclasses.replace(each, recompute=(UNNAMED,)) if each.keeps_all else each
            for each in found.blocks
        )
        choices = [
            self._estimated(policy) for policy in (found, dataclasses.replace(found, blocks=names))
        ]
        fitting = [choice for choice in choices if choice.needed_bytes <= limit]
        return min(fitting, key=lambda choice: choice.step_seconds, default=None)

    def priced(self, policy: MemoryPolicy) -> SurveyedChoice:
        """A policy with the names of residuals."""
        return self.written(self._estimated(policy))

    def _estimated(self, policy: MemoryPolicy) -> SurveyedChoice:
        """A policy with the price of the survey less what does not run."""
        cuts = {name: policy.cuts(name) for name in self._runs if policy.cuts(name)}
        if cuts != self._cuts:
            return self._cut(cuts)._estimated(policy)
        choices = self._model.policies.residuals.choices([policy])
        priced = self._memo.policy(self._plan.state, choices)
        return dataclasses.replace(self._choice(priced), policy=policy)

    def _choice(self, priced: PricedPolicy) -> SurveyedChoice:
        costs, model = self._costs, self._plan.model
        residuals, choices = self._model.policies.residuals, priced.choices
        again = residuals.running(choices)[0] & ~residuals.running(residuals.everything)[0]
        highest = int(np.argmax(costs.bytes + costs.kept_bytes.sum(axis=0)))
        lost = ~choices.keep[0] & ~self._model.policies.is_input
        needed = model.needed_bytes(priced.argument_bytes, priced.peak_bytes)
        return SurveyedChoice(
            policy=self._named(choices),
            step_seconds=priced.step_seconds,
            peak_bytes=priced.peak_bytes,
            needed_bytes=float(needed),
            fits=bool(needed <= self._plan.memory_bytes),
            recomputed_seconds=float(costs.node_seconds[again].sum()),
            freed_bytes=float(
                costs.kept_bytes[lost, highest].sum()
                + costs.freed_bytes[choices.move[0], highest].sum()
            ),
        )

    def _named(self, choices: Choices) -> MemoryPolicy:
        """One policy by names; it is a preset if one says the same."""
        residuals, (key,) = self._model.policies.residuals, choices.keys()
        for name, policy in self._presets.items():
            if residuals.choices([policy]).keys() == [key]:
                return dataclasses.replace(policy, preset=name)
        names: dict[str, dict[str, list[str]]] = {block: {} for block in residuals.blocks}
        for number, residual in enumerate(residuals.named):
            choice = "recompute"
            if choices.move[0, number]:
                choice = "offload"
            elif choices.shared[0, number]:
                choice = "gathered"
            elif choices.keep[0, number] or residual.is_input:
                choice = "keep"
            names[residual.block].setdefault(choice, []).append(residual.name)
        ranges: dict[str, list[str]] = {}
        for block in names:
            ranges.setdefault(RunRange.parse(block).block, []).append(block)
        for block, parts in ranges.items():
            if len(parts) > 1 and all(names[part] == names[parts[0]] for part in parts):
                names[block] = names[parts[0]]
                for part in parts:
                    del names[part]
        return MemoryPolicy(
            tuple(
                BlockPolicy(block, **{choice: tuple(some) for choice, some in choices.items()})
                for block, choices in names.items()
            )
        )


__all__ = [
    "GAIN",
    "SurveyPolicies",
    "SurveyedChoice",
    "is_survey",
    "with_policies",
    "without_policies",
]
