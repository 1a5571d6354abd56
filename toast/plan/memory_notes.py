"""Notes on the memory policy of a plan: what is recomputed, offloaded and kept, and what that does.

If the price of the program with everything kept is known, the note compares it with the plan's.
Else, it has the seconds of what runs again and the bytes that need not wait, from the plan's own
program and shardings: every policy has these, and they are more than what the policy changes.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Sequence

from toast.plan.plan import Plan
from toast.program import (
    Block,
    BlockPolicy,
    Choice,
    Residual,
    RunRange,
    Spec,
    element_bytes,
)
from toast.program.memory_policy import (
    CHOICES,
    DONE,
    MARKED_WITH_POLICY,
    OWN_CHECKPOINT,
    UNNAMED,
)
from toast.units import listed, size_text

#: The most names that a note lists for a choice.
_NAMED = 4

#: Smaller shares of a price count as equal.
_SAME = 1e-3

#: The end of the line for a ``jax.checkpoint`` of the program.
_INSTEAD = "; toast.checkpoint in its place lets plans decide"

#: Parts of the line for a plan alone.
_SPENT, _FREED = "recomputation takes", "less waits on the device for the backward pass"


def memory_notes(plan: Plan) -> list[str]:
    """A line for each block of the plan's policy; without a policy, for what stays as it is.

    There is none for a survey, which nobody runs.
    """
    memory = plan.analysis.program.memory
    if memory is None or (memory.policy and memory.policy.surveys):
        return []
    notes = []
    if memory.microbatches > 1:
        notes.append(f"the batch is cut into {memory.microbatches} microbatches")
    sizes, policy = ResidualSizes(plan), memory.policy
    label = f"remat {policy.preset}".strip() if policy else ""
    decided = [(block, policy.of(block.name)) for block in memory.blocks if policy]
    for block, decision in decided:
        parts = []
        for choice in ("recompute", "offload", "keep"):
            if shown := _names(block, decision, choice, sizes):
                parts.append(f"{DONE[choice]}: {listed(shown, _NAMED)}")
        if len(parts) == 1 and parts[0].startswith("kept"):
            apart = f" but what {listed(block.recomputes, _NAMED)} recomputes"
            parts = [f"everything is kept{apart if block.recomputes else ''}"]
        if gathered := decision.gathered:
            parts.append(f"uses copies of {listed(gathered, _NAMED)} again")
        if block.origin == MARKED_WITH_POLICY:
            parts.append("toast.checkpoint(policy=) counts outside of plans only")
        runs = _runs_text(block, memory.blocks)
        notes.append(f"{label}, {runs}; {'; '.join(parts) or 'nothing is kept'}")
    if effect := gross_effect(plan):
        notes.append(effect)
    for text in memory.own:
        notes.append(f"left as it is: {text}{_INSTEAD if OWN_CHECKPOINT in text else ''}")
    return notes


def gross_effect(plan: Plan) -> str:
    """What a policy costs and frees at most, from the plan alone; empty if it changes nothing.

    The seconds are those of all that runs again, before overlap.  They are left out if the program
    recomputes something whatever the policy is.  The bytes are those of all residuals that do not
    wait on the device; XLA would not store some of them anyway.
    """
    memory = plan.analysis.program.memory
    if memory is None or memory.policy is None:
        return ""
    sizes, freed, again = ResidualSizes(plan), 0.0, False
    for block in memory.blocks:
        decision = memory.policy.of(block.name)
        again = again or bool(_names(block, decision, "recompute"))
        freed += sizes.of_names(block, (*decision.recompute, *decision.offload))
    parts = []
    share = recomputed_seconds(plan) / max(plan.after.step_seconds, 1e-300)
    if again and share and not memory.own:
        parts.append(f"{_SPENT} about {_share_text(share)} of the step")
    if freed:
        parts.append(f"at most {size_text(freed)} {_FREED}")
    return ", and ".join(parts)


def is_gross_effect(note: str) -> bool:
    """Whether a line of a note is one of :func:`gross_effect`."""
    return note.startswith(_SPENT) or note.endswith(_FREED)


def net_effect(plan: Plan, kept_seconds: float, kept_bytes: float) -> str:
    """What a policy changes, by the price of the plan's shardings with everything kept."""
    longer = plan.after.step_seconds / kept_seconds - 1.0
    lower = kept_bytes - plan.after.peak_bytes
    step = f"about {_share_text(abs(longer))} {'longer' if longer > 0 else 'less'}"
    peak = f"about {size_text(abs(lower))} {'lower' if lower > 0 else 'higher'}"
    return (
        "compared with everything kept under the same shardings, the step takes "
        f"{'as long' if abs(longer) < _SAME else step}, and the peak is "
        f"{'as high' if abs(lower) < _SAME * kept_bytes else peak}"
    )


def _runs_text(block: Block, blocks: Sequence[Block]) -> str:
    """The runs that a decision is for: ``16 runs of layer``, ``first 4 of 16 runs of layer``.

    Ranges are those of one microbatch: each of these runs all layers.
    """
    runs = RunRange.parse(block.name)
    if not runs.is_part:
        return f"{block.runs} runs of {block.name}" if block.runs > 1 else block.name
    alike = [b for b in blocks if RunRange.parse(b.name).block == runs.block]
    times = block.repeats if len({b.repeats for b in alike}) == 1 else 1
    every = sum(b.runs for b in alike) // times
    some = f"{block.runs // times} of {every} runs of {runs.block}"
    if runs.first and runs.end < math.inf:
        some += f", from number {runs.first + 1} on"
    else:
        some = f"{'last' if runs.first else 'first'} {some}"
    return f"{some}, in each of {times} microbatches" if times > 1 else some


def recomputed_seconds(plan: Plan) -> float:
    """Seconds of a step, before overlap, for what the backward pass computes again."""
    program, parts = plan.analysis.program, plan.breakdown
    again = [here == "recomputed" for here in program.passes]
    spent = (parts.product_seconds + parts.memory_seconds).tolist()
    seconds = math.fsum(time for time, here in zip(spent, again, strict=True) if here)
    return seconds + math.fsum(c.seconds for c in parts.collectives if again[c.op])


def _share_text(share: float) -> str:
    return f"{100 * share:.2g} %"


class ResidualSizes:
    """The bytes of residuals on a device under the shardings of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._program = plan, plan.analysis.program
        self._axes = dict(plan.mesh.axes)
        self._of_type: dict[str, list[int]] = collections.defaultdict(list)
        for value, known in enumerate(self._program.values):
            self._of_type[str(known.type)].append(value)

    def of(self, block: Block, residual: Residual) -> float:
        """The bytes of all runs of a block that wait for the backward pass."""
        return math.fsum(
            self._bytes(text, residual.source) * block.runs / self._plan.microbatches
            for text in residual.types
        )

    def of_names(self, block: Block, names: Sequence[str]) -> float:
        """The bytes of the residuals with these names, without arguments of the block."""
        return math.fsum(
            self.of(block, residual) for residual in block.residuals
            if residual.name in names and residual.kind != "input"
        )  # fmt: skip

    def _bytes(self, type_text: str, source: str) -> float:
        """The bytes on a device of a value with a type, from a place in the program."""
        values = self._of_type.get(type_text, [])
        if not values:
            return 0.0
        here = [value for value in values if self._is_at(value, source)]
        chosen = (here or values)[-1]  # the backward pass has the last one
        type_ = self._program.values[chosen].type
        spec: Spec = self._plan.shardings.of(self._program, chosen)
        shards = math.prod(self._axes[axis] for axes in spec for axis in axes)
        return math.prod(type_.shape) * element_bytes(type_.dtype) / shards

    def _is_at(self, value: int, source: str) -> bool:
        place = self._program.location(self._program.values[value].op)
        return bool(source) and source.startswith(f"{place.file.rpartition('/')[2]}:{place.line} ")


# -- names for people ------------------------------------------------------------------------------


def _names(
    block: Block, decision: BlockPolicy, choice: Choice, sizes: ResidualSizes | None = None
) -> list[str]:
    """What is kept, recomputed or offloaded, the largest first, as people call it.

    The values inside a statement count as its result if the choice for all of them is the same.
    """
    choices = {name: c for c in CHOICES for name in getattr(decision, c)}
    stems: dict[str, set[Choice]] = collections.defaultdict(set)
    for residual in block.residuals:
        stems[_stem(residual)].add(choices.get(residual.name, "recompute"))
    totals: dict[str, float] = {}
    for residual in block.residuals:
        mine = choices.get(residual.name, "recompute") == choice
        if not mine or (residual.kind == "input" and choice != "offload"):
            continue
        alike = len(stems[_stem(residual)]) == 1
        shown = _stem(residual) if alike else residual.name
        totals[shown] = totals.get(shown, 0.0) + (sizes.of(block, residual) if sizes else 0.0)
    names = sorted(totals, key=lambda name: -totals[name])
    return [*names, *(["values without names"] if UNNAMED in getattr(decision, choice) else [])]


def _stem(residual: Residual) -> str:
    """What a residual belongs to: ``scores`` for ``scores.exp``, ``silu (step.py:14)``.

    The latter is for ``layer.silu``, the result of a call in the function ``layer``.
    """
    if residual.own or residual.kind == "input":
        return residual.name
    first, dot, rest = residual.name.partition(".")
    match = re.fullmatch(r"(\S+:\d+) \((.*)\)", residual.source)
    if dot and match and re.sub(r"\W", "", match[2]).strip("_") in (first, ""):
        return f"{'product' if residual.kind.endswith('product') else _plain(rest)} ({match[1]})"
    return first


def _plain(name: str) -> str:
    """A name without the number that tells it from others."""
    return re.sub(r"(?<=[a-z])_\d+$", "", name)


__all__ = [
    "ResidualSizes", "gross_effect", "is_gross_effect", "memory_notes", "net_effect",
    "recomputed_seconds",
]  # fmt: skip
