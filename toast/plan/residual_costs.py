"""What it costs to keep, recompute or offload each residual, from the plan of a survey.

The program of a survey recomputes everything, and its residuals have names
(:func:`toast.program.survey`).  Between named values lie the ops that compute one from others.  To
keep a residual spares those ops that nothing else needs.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator

from toast.cost.breakdown import break_down
from toast.cost.liveness import PASSED_ON
from toast.plan.plan import Plan
from toast.program import Block, Program, element_bytes, label_parts, residual_label
from toast.space import BOUNDARY

#: Values of these ops come from outside of what is recomputed.
_OUTSIDE = frozenset({"argument", "carry", "optimization_barrier", "constant"}) | BOUNDARY

#: Ops that only cut an argument of the program or pass it on.
_CUTTING = PASSED_ON | {
    "dynamic_slice", "slice", "reshape", "convert", "transpose", "sdy_sharding_constraint", "carry",
}  # fmt: skip

#: How often a residual that is kept goes through memory.  A loop copies it into an array of all
#: iterations, and from there.
_PASSES, _LOOP_PASSES = 2, 4


@dataclasses.dataclass(frozen=True)
class ResidualCost:
    """A residual of a block under the shardings of a plan."""

    block: str
    name: str
    #: Bytes on a device of all runs that wait for the backward pass.
    bytes: float
    #: Seconds per step to write them to memory and to read them again.
    keep_seconds: float
    #: Whether it is an argument of the block, which exists anyway.
    is_input: bool
    #: Seconds per step to move it to the memory of the host and back; infinite if that is
    #: impossible, or frees nothing.
    offload_seconds: float


@dataclasses.dataclass(frozen=True)
class Recomputation:
    """What the backward pass of a step computes again, as a graph.

    A node is an op of one run of a block.
    """

    #: The names of the blocks.
    blocks: tuple[str, ...]
    residuals: tuple[ResidualCost, ...]
    #: ``[nodes]`` seconds of a step that the runs of each take.
    seconds: tuple[float, ...]
    #: ``(user, node, residual)``: a node, or the backward pass (-1), needs the value of another
    #: node.  If it has the number of a residual (or -1), it may be kept instead.
    needs: tuple[tuple[int, int, int], ...]

    def recomputed_seconds(self, present: Iterable[int]) -> float:
        """Seconds of a step for recomputation if the residuals with these numbers are kept."""
        present = frozenset(present)
        below: dict[int, list[int]] = collections.defaultdict(list)
        for user, node, residual in self.needs:
            if residual not in present:
                below[user].append(node)
        alive: set[int] = set()
        waiting = [*below[-1]]
        while waiting:
            node = waiting.pop()
            if node not in alive:
                alive.add(node)
                waiting += below[node]
        return math.fsum(self.seconds[node] for node in sorted(alive))


def recomputation(plan: Plan) -> Recomputation:
    """The costs of the residuals of a survey under the shardings of its plan."""
    program = plan.analysis.program
    assert program.memory is not None
    parts = break_down(plan.model, plan.state)
    seconds = parts.product_seconds + parts.memory_seconds
    for collective in parts.collectives:
        seconds[collective.op] += collective.seconds
    residuals: list[ResidualCost] = []
    node_seconds: list[float] = []
    needs: list[tuple[int, int, int]] = []
    for block in program.memory.blocks:
        graph = _BlockGraph(program, block)
        if not graph.names:
            continue
        first, nodes = len(residuals), {op: len(node_seconds) + n for n, op in enumerate(graph.ops)}
        numbers = {name: first + n for n, name in enumerate(graph.names)}
        residuals += [
            _cost(plan, block, name, graph.named[name], graph.from_arguments(name))
            for name in graph.names
        ]
        node_seconds += [float(seconds[op]) * graph.copies for op in graph.ops]
        needs += [
            (nodes.get(user, -1), nodes[op], numbers[name] if name else -1)
            for user, op, name in graph.needs()
        ]
    blocks = tuple(block.name for block in program.memory.blocks)
    return Recomputation(blocks, tuple(residuals), tuple(node_seconds), tuple(needs))


def _cost(plan: Plan, block: Block, name: str, value: int, from_arguments: bool) -> ResidualCost:
    """The cost of a residual, whose recomputed value is number ``value``."""
    program = plan.analysis.program
    type_, spec = program.values[value].type, plan.shardings.of(program, value)
    sizes = dict(plan.mesh.axes)
    shards = math.prod(sizes[axis] for axes in spec for axis in axes)
    once = math.prod(type_.shape) * element_bytes(type_.dtype) / shards
    is_input = any(r.name == name and r.kind == "input" for r in block.residuals)
    offload = 2.0 * once * block.runs / plan.hardware.host_bytes_per_s
    if from_arguments or not math.isfinite(plan.hardware.host_bytes_per_s):
        offload = math.inf
    passes = _LOOP_PASSES if program.repeats[program.values[value].op] > 1 else _PASSES
    return ResidualCost(
        block.name, name, once * block.runs / plan.microbatches,
        0.0 if is_input else passes * once * block.runs / plan.hardware.memory_bytes_per_s,
        is_input, offload,
    )  # fmt: skip


class _BlockGraph:
    """The ops that one run of a block computes again, in program order."""

    def __init__(self, program: Program, block: Block) -> None:
        self._program = program
        labels = {residual_label(block.name, name): name for name in block.names}
        places: dict[str, list[int]] = collections.defaultdict(list)
        #: Values of which gradients use the results before they have their names.
        self._results: set[int] = set()
        for value in sorted(program.labels, key=lambda v: program.values[v].op):
            label, of_result = label_parts(program.labels[value])
            if label in labels:
                places[labels[label]].append(value)
                if of_result:
                    self._results.add(value)
        #: How often the program has the block, loops apart.
        self.copies = self._copies(block, max(places.values(), key=self._often, default=[]))
        ends = [
            program.values[values[self.copies - 1]].op
            for values in places.values() if len(values) >= 2 * self.copies
        ]  # fmt: skip
        self._begin = max(ends, default=len(program.ops))
        self._forward = {name: values[0] for name, values in places.items()}
        #: The names of the values of the last run, and the last value of each name.
        self._name: dict[int, str] = {}
        self.named: dict[str, int] = {}
        for name in block.names:
            again = [v for v in places[name] if program.values[v].op > self._begin]
            for value in again[-(len(again) // self.copies) :] if again else ():
                self._name[value], self.named[name] = name, value
        self.names = tuple(self.named)
        self.ops = tuple(sorted(self._chain()))

    def _often(self, values: list[int]) -> tuple[int, int]:
        """How many values there are, and how often all of them are computed in a step."""
        program = self._program
        return len(values), sum(program.repeats[program.values[value].op] for value in values)

    def _copies(self, block: Block, values: list[int]) -> int:
        """How many of the values of one name belong to all runs of a block."""
        runs = 0
        for number, value in enumerate(values):
            runs += self._program.repeats[self._program.values[value].op]
            if runs >= block.runs:
                return number + 1
        return max(1, len(values))

    def _chain(self) -> set[int]:
        """The ops from which the named values follow."""
        program = self._program
        chain: set[int] = set()
        waiting = [program.values[value].op for value in self._name]
        while waiting:
            op = waiting.pop()
            if op in chain or op <= self._begin or program.kind(op) in _OUTSIDE:
                continue
            chain.add(op)
            waiting += [program.values[value].op for value in program.ops[op].operands]
        return chain

    def needs(self) -> Iterator[tuple[int, int, str]]:
        """Who needs which op: an op of these, or -1 for the backward pass; and the value's name."""
        program, mine = self._program, {*self.ops}
        for user, op in enumerate(program.ops):
            for value in {*op.operands}:
                maker = program.values[value].op
                if maker in mine:
                    inside = user in mine
                    named = inside or value not in self._results
                    name = self._name.get(value, "") if named else ""
                    yield (user if inside else -1), maker, name

    def from_arguments(self, name: str) -> bool:
        """Whether a residual is a part of an argument of the program, which exists anyway."""
        program, value = self._program, self._forward[name]
        while True:
            op = program.values[value].op
            if program.kind(op) == "argument":
                return True
            if program.kind(op) not in _CUTTING or not program.ops[op].operands:
                return False
            value = program.ops[op].operands[0]


__all__ = ["Recomputation", "ResidualCost", "recomputation"]
