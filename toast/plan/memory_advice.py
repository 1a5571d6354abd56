"""What to recompute or offload in a program that cannot be traced again, such as a file.

The passes are recognised by the paths that JAX gives ops.  **Residuals** are values of the forward
pass that the backward pass uses, or stacks of them from all iterations of a loop.  Those of alike
layers get one decision, by the integer program that chooses policies
(:mod:`toast.search.policy_program`), under the shardings of the plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from toast.cost import Choices, PolicyCosts, Recomputation
from toast.cost.breakdown import break_down
from toast.cost.entities import Ints
from toast.plan.plan import Plan
from toast.program import Choice, Program, element_bytes
from toast.search.policy_program import best_choice
from toast.units import listed, size_text, time_text

#: Ops between a value and the stack of all iterations.
_AROUND = frozenset({"broadcast_in_dim", "reshape", "convert"})

#: Ops whose results are outside of what can be computed again.
_OUTSIDE = frozenset({"argument", "constant", "iota"})

#: Ops that only cut arguments of the program.
_CUTS = frozenset({"dynamic_slice", "slice", "reshape", "transpose", "optimization_barrier"})

#: Times that the way to the least limit is halved, if nothing fits.
_HALVINGS = 8


@dataclasses.dataclass(frozen=True)
class AdvisedValue:
    """Residuals of alike layers."""

    #: The op and the type: ``dot_general bf16[16,2048,4096]``.
    value: str
    #: ``model.py:12``; empty if unknown.
    place: str
    #: The number of such values, iterations of loops included.
    count: int
    #: The bytes on a device of all of them.
    bytes: float
    #: Whether to recompute, offload or keep them.
    choice: Choice


@dataclasses.dataclass(frozen=True)
class MemoryAdvice:
    """What to keep, recompute and offload, and about what that does to the plan."""

    #: What to do with each group of residuals.
    values: tuple[AdvisedValue, ...]
    #: Seconds of a step for recomputation.
    seconds: float
    #: The bytes that it frees.
    freed_bytes: float
    #: The peak that remains.
    peak_bytes: float
    #: Whether the peak is within the limit.
    fits: bool

    def of(self, choice: Choice) -> tuple[AdvisedValue, ...]:
        """The values with a choice, the largest first."""
        return tuple(value for value in self.values if value.choice == choice)

    @property
    def text(self) -> str:
        """The advice in a line."""
        parts = []
        for choice in ("recompute", "offload"):
            names = [v.value for v in self.of(choice)]
            if names:
                parts.append(f"{choice} {listed(names)}")
        rest = "which fits" if self.fits else "which still does not fit"
        return (
            f"{'; '.join(parts)}: adds about {time_text(self.seconds)} to the step and frees about "
            f"{size_text(self.freed_bytes)}; {size_text(self.peak_bytes)} remain, {rest}"
        )


def memory_advice(plan: Plan) -> MemoryAdvice | None:
    """What to recompute and to offload so that a plan fits, with the least longer step.

    ``None`` if the plan fits, or the program has no residuals: no backward pass is recognised.
    """
    if plan.fits:
        return None
    graph = _Graph(plan)
    needs, costs, kept = graph.recomputation(), graph.costs(), graph.kept
    if not kept.any():
        return None
    choice = best_choice(costs, needs, plan.memory_bytes) or _with_least_memory(costs, needs)
    if choice is None:
        return None
    names: list[Choice] = [
        "offload" if move else "keep" if keep else "recompute"
        for keep, move in zip(choice.keep[0], choice.move[0], strict=True)
    ]
    sizes = costs.kept_bytes[:, 0]
    values = [
        AdvisedValue(*graph.labels[number], graph.counts[number], float(sizes[number]), name)
        for number, name in enumerate(names)
        if kept[number] or name != "recompute"
    ]
    now = dataclasses.replace(choice, keep=kept[None], move=np.zeros_like(choice.move))
    again = needs.running(choice)[0] & ~needs.running(now)[0]
    freed = float(sizes[kept].sum() - sizes[choice.keep[0]].sum())
    needed = plan.needed_bytes(plan.after)
    return MemoryAdvice(
        tuple(sorted(values, key=lambda value: -value.bytes)),
        float(costs.node_seconds[again].sum()),
        freed, plan.after.peak_bytes - freed, needed - freed <= plan.memory_bytes,
    )  # fmt: skip


def _with_least_memory(costs: PolicyCosts, needs: Recomputation) -> Choices | None:
    """The best choice within about the least limit for which one exists."""
    low = float(costs.bytes[0])
    high = low + float(costs.kept_bytes.sum())
    best = best_choice(costs, needs, high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        choice = best_choice(costs, needs, middle)
        low, high = (middle, high) if choice is None else (low, middle)
        best = choice or best
    return best


class _Graph:
    """The residuals of a program, and the ops of the forward pass that compute them."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._program = plan, plan.analysis.program
        program = self._program
        self._passes = program.passes
        parts = break_down(plan.model, plan.state)
        self._seconds = parts.product_seconds + parts.memory_seconds
        for collective in parts.collectives:
            self._seconds[collective.op] += collective.seconds
        self._live = {b.value: b.bytes for b in plan.timeline.at_peak if b.what == "value"}
        self._yielded = self._yields()
        self._runs = _runs_of_uses(program)
        self._numbers: dict[tuple[str, str], int] = {}
        #: What and where each residual is, how many values it has, and their bytes.
        self.labels: list[tuple[str, str]] = []
        self.counts: list[int] = []
        self._bytes: list[float] = []
        #: The residual of each value.
        self._of_value: dict[int, int] = {}
        #: The values that the backward pass uses.
        self._needed: list[int] = []
        for buffer, value in self._residuals():
            self._needed.append(value)
            self._find(buffer, value)
        in_memory = len(self.labels)
        #: The ops that can run again, in program order, and the values that each needs.
        self._chain, self._asked = self._chain_of()
        #: ``[R]`` the residuals that are in memory now.
        self.kept = np.arange(len(self.labels)) < in_memory

    def _find(self, buffer: int, value: int) -> None:
        """Adds what is in memory for a value that the backward pass uses.

        If it is not in memory itself, XLA computes it, as a part of the kernels that use it, from
        values that are.
        """
        program, waiting, seen = self._program, [(buffer, value)], {value}
        while waiting:
            buffer, value = waiting.pop()
            if value in self._of_value:
                continue
            if buffer in self._live:
                self._add(value, self._live[buffer])
                continue
            op = program.values[value].op
            if program.kind(op) != "carry":
                new = {*program.ops[op].operands} - seen
                seen |= new
                waiting += [(v, v) for v in new if not self._is_outside(program.values[v].op)]

    def _yields(self) -> dict[int, int]:
        """The value that a loop yields, by the result of the loop."""
        program = self._program
        return {
            op.results[0]: op.operands[0]
            for number, op in enumerate(program.ops)
            if program.kind(number) == "yield" and op.results and op.operands
        }

    def _residuals(self) -> Iterator[tuple[int, int]]:
        """The buffers between the passes, and the value of the forward pass that each has.

        The buffer of a stack is what its loop carries.
        """
        program = self._program
        seen: set[int] = set()
        for user, op in enumerate(program.ops):
            if self._passes[user] not in ("backward", "recomputed"):
                continue
            for used in op.operands:
                maker = program.values[used].op
                if used in seen or self._passes[maker] != "forward":
                    continue
                seen.add(used)
                if used in self._yielded:
                    yield from self._stacked(self._yielded[used])
                elif not self._is_outside(maker) and program.kind(maker) != "carry":
                    yield used, used

    def _stacked(self, stack: int) -> Iterator[tuple[int, int]]:
        """The buffer of a stack, and the value of which a loop makes it; none for other results."""
        program = self._program
        update = program.ops[program.values[stack].op]
        if program.kind(program.values[stack].op) != "dynamic_update_slice":
            return
        buffer, value = update.operands[:2]
        while program.kind(program.values[value].op) in _AROUND:
            value = program.ops[program.values[value].op].operands[0]
        if not self._is_outside(program.values[value].op):
            yield buffer, value

    def _size(self, value: int) -> float:
        """The bytes of a value on a device."""
        type_ = self._program.values[value].type
        sizes = dict(self._plan.mesh.axes)
        spec = self._plan.shardings.of(self._program, value)
        shards = math.prod(sizes[axis] for axes in spec for axis in axes)
        return math.prod(type_.shape) * element_bytes(type_.dtype) / shards

    def _add(self, value: int, size: float) -> int:
        """The residual of a value, with those of alike layers."""
        program, op = self._program, self._program.values[value].op
        place = self._place(op)
        label = f"{program.kind(op)} {program.values[value].type}", place
        number = self._numbers.setdefault(label, len(self.labels))
        if number == len(self.labels):
            self.labels.append(label)
            self.counts.append(0)
            self._bytes.append(0.0)
        carried = program.kind(op) == "carry"
        self.counts[number] += int(self._runs[value]) if carried else program.repeats[op]
        self._bytes[number] += size
        self._of_value[value] = number
        return number

    def _place(self, op: int) -> str:
        """The source line of an op; for one of a function that JAX lowers once, that before it."""
        first = len(self._program.arguments)
        for before in range(op, first - 1, -1):
            location = self._program.location(before)
            if location.file:
                near = "" if before == op else "after "
                return f"{near}{location.shown_file}:{location.line}"
        return ""

    def _chain_of(self) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
        """The ops that compute residuals, and the values that these and the backward pass need.

        What a loop carries from one iteration to the next cannot be computed again, so that it is
        a residual, too.
        """
        program = self._program
        chain: set[int] = set()
        asked = [(-1, value) for value in self._needed]
        waiting = list(self._needed)
        while waiting:
            value = waiting.pop()
            op = program.values[value].op
            if op in chain or self._is_outside(op):
                continue
            chain.add(op)
            if program.kind(op) != "carry":
                asked += [(op, operand) for operand in {*program.ops[op].operands}]
                waiting += program.ops[op].operands
            elif value not in self._of_value:
                self._add(value, self._size(value) * float(self._runs[value]))
        return sorted(chain), asked

    def recomputation(self) -> Recomputation:
        """What can run again, and who needs it."""
        node = {op: number for number, op in enumerate(self._chain)}
        needs = [
            (node.get(user, -1), node[self._program.values[value].op],
             self._of_value.get(value, -1))
            for user, value in self._asked if self._program.values[value].op in node
        ]  # fmt: skip
        user, needed, residual = np.array(sorted({*needs}), dtype=np.int64).reshape(-1, 3).T
        return Recomputation(len(node), user, needed, residual, np.full(len(user), -1))

    def costs(self) -> PolicyCosts:
        """What it costs to keep, recompute and offload each residual; memory has one moment."""
        plan, sizes, nodes = self._plan, np.array(self._bytes), len(self._chain)
        carried = [self._program.kind(op) == "carry" for op in self._chain]
        move = 2.0 * sizes / plan.hardware.host_bytes_per_s
        if not plan.hardware.has_host_link:
            move[:] = np.inf
        if plan.hardware.lanes > 1:  # outside of loops, values stay until they come back
            move[[
                number for value, number in self._of_value.items()
                if self._program.repeats[self._program.makers[value]] == 1
            ]] = np.inf  # fmt: skip
        none, wide = np.zeros(len(sizes)), np.zeros((len(sizes), 1))
        rest = plan.needed_bytes(plan.after) - sizes[self.kept].sum()
        # What is kept now costs nothing: advice should change little.
        return PolicyCosts(
            node_seconds=np.where(carried, np.inf, self._seconds[list(self._chain)]),
            node_bytes=np.zeros((nodes, 1)),
            keep_seconds=none, move_seconds=move, share_seconds=none,
            kept_bytes=sizes[:, None], freed_bytes=wide, shared_bytes=wide,
            bytes=np.array([rest]), busy_seconds=plan.after.step_seconds,
        )  # fmt: skip

    def _is_outside(self, op: int) -> bool:
        """Whether the results of an op need not be computed again: arguments, counters of loops."""
        program = self._program
        kind = program.kind(op)
        if kind == "carry":
            type_ = program.values[program.ops[op].results[0]].type
            return math.prod(type_.shape) <= 1
        if kind in _CUTS and program.ops[op].operands:
            return self._is_outside(program.values[program.ops[op].operands[0]].op)
        return kind in _OUTSIDE or self._passes[op] != "forward"


def _runs_of_uses(program: Program) -> Ints:
    """``[values]`` how often the op runs that uses each most often; 1 without uses."""
    runs = np.ones(len(program.values), dtype=np.int64)
    for op, repeats in zip(program.ops, program.repeats, strict=True):
        operands = list(op.operands)
        runs[operands] = np.maximum(runs[operands], repeats)
    return runs


__all__ = ["AdvisedValue", "MemoryAdvice", "memory_advice"]
