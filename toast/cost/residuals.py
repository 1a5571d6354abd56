"""The residuals of a survey, and the ops that compute each again from others.

The program of a survey recomputes everything, and its residuals have names
(:func:`toast.program.survey`).  Between named values lie the ops that compute one from others: a
graph, whose nodes stand for the same op in all runs of a block.  A memory policy keeps, recomputes
or offloads residuals; it decides which nodes run again.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from toast.cost.entities import Bools, Ints
from toast.cost.liveness import PASSED_ON, loops_of
from toast.program import Block, MemoryPolicy, Program, label_parts, residual_label
from toast.space import BOUNDARY

#: Values of these ops come from outside of what is recomputed.
_OUTSIDE = frozenset({"argument", "carry", "optimization_barrier", "constant"}) | BOUNDARY

#: Ops that only cut an argument of the program or pass it on.
_CUTTING = PASSED_ON | {
    "dynamic_slice", "slice", "reshape", "convert", "transpose", "sdy_sharding_constraint",
}  # fmt: skip


#: Stands for the name of a result that a gradient uses before it has a name.
_RESULT = "\0"


@dataclasses.dataclass(frozen=True)
class NamedResidual:
    """A residual of a block, and its values in the program of a survey."""

    block: str
    name: str
    #: Whether it is an argument of the block, which exists anyway.
    is_input: bool
    #: Whether it is a part of an argument of the program, which stays on the device.
    from_arguments: bool
    #: Whether the block computes it from an argument, by rounding.  Without blocks, a loop keeps
    #: such values, too.
    computed: bool
    #: Whether its values are apart: those of a loop wait in one array of all iterations.
    apart: bool
    #: Its values in the forward pass, and those of the backward pass in the same order: those of
    #: the first run first, all values of a run together.
    forward: tuple[int, ...]
    again: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Choices:
    """What ``P`` policies do with ``R`` residuals: ``[P, R]`` each."""

    keep: Bools
    move: Bools
    #: Arguments of blocks of which the backward pass uses the copies of the forward pass: gathered
    #: weights stay gathered.
    shared: Bools
    #: ``[P]`` whether there are no blocks at all, so that nothing keeps values that XLA would
    #: rather compute again in its kernels.
    bare: Bools

    def __len__(self) -> int:
        return len(self.bare)

    @property
    def present(self) -> Bools:
        """``[P, R]`` the residuals that are not computed again."""
        return self.keep | self.move

    def take(self, rows: Ints | slice) -> Choices:
        """Some of the policies."""
        return Choices(self.keep[rows], self.move[rows], self.shared[rows], self.bare[rows])

    def keys(self) -> list[bytes]:
        """What tells each policy from others."""
        every = np.concatenate([self.keep, self.move, self.shared, self.bare[:, None]], axis=1)
        return [row.tobytes() for row in every]

    @staticmethod
    def joined(parts: Sequence[Choices]) -> Choices:
        """The policies of all parts, in order."""
        fields = (
            np.concatenate([getattr(part, field.name) for part in parts])
            for field in dataclasses.fields(Choices)
        )
        return Choices(*fields)


@dataclasses.dataclass(frozen=True)
class Recomputation:
    """A graph of what can run again: ``N`` nodes, and ``E`` needs for the value of a node."""

    nodes: int
    #: ``[E]`` who needs the value of node ``node``: a later node, or the backward pass (-1).  If
    #: the value is a residual (else -1), it may be kept instead.
    user: Ints
    node: Ints
    residual: Ints
    #: ``[E]`` whether it is needed because blocks name results: without any, it is there.
    named_result: Bools

    def running(self, choices: Choices) -> Bools:
        """``[P, N]`` the nodes that run again under policies."""
        runs = np.zeros((len(choices), self.nodes + 1), dtype=bool)  # the last one: backward pass
        runs[:, -1] = True
        there = np.concatenate([choices.present, np.zeros((len(choices), 1), dtype=bool)], axis=1)
        needed = ~there[:, self.residual] & ~(choices.bare[:, None] & self.named_result)  # [P, E]
        # Users come after what they need, so that one pass from the last user on is enough.
        order = np.argsort(-np.where(self.user < 0, self.nodes, self.user), kind="stable")
        edges = zip(self.user[order].tolist(), self.node[order].tolist(), needed.T[order],
                    strict=True)  # fmt: skip
        for user, node, missing in edges:
            runs[:, node] |= runs[:, user] & missing
        return runs[:, :-1]


@dataclasses.dataclass(frozen=True)
class Residuals:
    """What the backward pass of a survey computes again.

    ``R`` residuals; the nodes are ops of one run of a block.
    """

    blocks: tuple[str, ...]
    named: tuple[NamedResidual, ...]
    #: ``[ops]`` the node of each op, -1 for none.
    node_of_op: Ints
    graph: Recomputation

    def running(self, choices: Choices) -> Bools:
        """``[P, N]`` the nodes that run again under policies."""
        return self.graph.running(choices)

    @property
    def everything(self) -> Choices:
        """The policy that keeps everything with a name."""
        every = np.ones((1, len(self.named)), dtype=bool)
        return Choices(every, ~every, ~every, np.zeros(1, dtype=bool))

    def choices(self, policies: Sequence[MemoryPolicy]) -> Choices:
        """What policies, with resolved names, do with the residuals."""
        keep, move, shared = np.zeros((3, len(policies), len(self.named)), dtype=bool)
        bare = np.zeros(len(policies), dtype=bool)
        for row, policy in enumerate(policies):
            bare[row] = all(policy.of(name).keeps_all for name in self.blocks)
            for column, residual in enumerate(self.named):
                of_block = policy.of(residual.block)
                move[row, column] = residual.name in of_block.offload
                stacked = bare[row] and residual.computed and not residual.apart
                keep[row, column] = residual.name in of_block.keep and (
                    not residual.is_input or stacked
                )
                shared[row, column] = (
                    residual.is_input and residual.apart
                    and (bare[row] or residual.name in of_block.gathered)
                )  # fmt: skip
        return Choices(keep & ~move, move, shared, bare)


def residuals_of(program: Program) -> Residuals:
    """The residuals of a survey."""
    assert program.memory is not None
    node_of_op = np.full(len(program.ops), -1, dtype=np.int64)
    named: list[NamedResidual] = []
    needs: list[tuple[int, int, int, bool]] = []
    nodes = 0
    for block in program.memory.blocks:
        found = _BlockRuns(program, block)
        if not found.names:
            continue
        first = len(named)
        number = {name: first + n for n, name in enumerate(found.names)}
        named += [found.residual(name) for name in found.names]
        chain = found.nodes()
        for op, node in chain.items():
            node_of_op[op] = nodes + node
        needs += [
            (nodes + user if user >= 0 else -1, nodes + node, number.get(name, -1), name == _RESULT)
            for user, node, name in found.needs(chain)
        ]
        nodes += 1 + max(chain.values(), default=-1)
    users, needed, numbers, of_result = np.array(sorted({*needs}), dtype=np.int64).reshape(-1, 4).T
    blocks = tuple(block.name for block in program.memory.blocks)
    graph = Recomputation(nodes, users, needed, numbers, of_result.astype(bool))
    return Residuals(blocks, tuple(named), node_of_op, graph)


class _BlockRuns:
    """The values with names in all runs of a block, and the ops that compute them again."""

    def __init__(self, program: Program, block: Block) -> None:
        self._program, self._block = program, block
        labels = {residual_label(block.name, name): name for name in block.names}
        places: dict[str, list[int]] = collections.defaultdict(list)
        #: Values of whose operations JAX computes gradients from the results.
        self._results: set[int] = set()
        for value in sorted(program.labels, key=lambda v: program.values[v].op):
            label, of_result = label_parts(program.labels[value])
            if label in labels:
                places[labels[label]].append(value)
                self._results |= {value} if of_result else set()
        #: How often the program has the block, loops apart.
        self._copies = self._copies_of(max(places.values(), key=self._runs_of, default=[]))
        #: Values of each name in the forward pass, and the same recomputed: by run and name.
        self._forward: dict[str, list[list[int]]] = {}
        self._again: dict[str, list[list[int]]] = {}
        op_of = {value: program.values[value].op for values in places.values() for value in values}
        ends = [
            op_of[values[self._copies - 1]] for values in places.values()
            if len(values) == 2 * self._copies
        ]  # fmt: skip
        #: The last op of the forward pass with a name.
        self._begin = max(ends, default=len(program.ops))
        for name in block.names:
            forward = [value for value in places[name] if op_of[value] <= self._begin]
            again = [value for value in places[name] if op_of[value] > self._begin]
            if not forward or not again:  # the backward pass does not need it
                continue
            self._forward[name] = _parts(forward, self._copies)
            # What ran first in the forward pass runs last in the backward pass.
            self._again[name] = _parts(again, self._copies)[::-1]
        self.names = tuple(self._again)
        self._name = {
            value: name for name, parts in self._again.items() for part in parts for value in part
        }

    def _runs_of(self, values: list[int]) -> tuple[int, int]:
        """How many values there are, and how often all of them are computed in a step."""
        repeats = (self._program.repeats[self._program.values[value].op] for value in values)
        return len(values), sum(repeats)

    def _copies_of(self, values: list[int]) -> int:
        """How many of the values of one name belong to all runs of the block."""
        runs = 0
        for number, value in enumerate(values):
            runs += self._program.repeats[self._program.values[value].op]
            if runs >= self._block.runs:
                return number + 1
        return max(1, len(values) // 2)

    def residual(self, name: str) -> NamedResidual:
        """The residual with a name."""
        is_input = any(r.name == name and r.kind == "input" for r in self._block.residuals)
        return NamedResidual(
            self._block.name, name, is_input, self._from_arguments(name),
            self._program.kind(self._program.values[self._again[name][-1][-1]].op) == "convert",
            self._apart(name),
            tuple(value for part in self._forward[name] for value in part),
            tuple(value for part in self._again[name] for value in part),
        )  # fmt: skip

    def nodes(self) -> dict[int, int]:
        """The node of each op that computes named values again, in all runs."""
        chains = [self._chain(run) for run in range(self._copies)]
        longest = max(range(self._copies), key=lambda run: (len(chains[run]), -run), default=0)
        if not chains:
            return {}
        node = {op: number for number, op in enumerate(sorted(chains[longest]))}
        every = dict(node)
        for run, chain in enumerate(chains):
            if run != longest:
                every.update(self._alike(longest, run, node, chain))
        return every

    def _chain(self, run: int) -> set[int]:
        """The ops from which the named values of a run follow."""
        program = self._program
        chain: set[int] = set()
        parts = (parts[run] for parts in self._again.values() if run < len(parts))
        waiting = [program.values[value].op for part in parts for value in part]
        while waiting:
            op = waiting.pop()
            if op in chain or op <= self._begin or program.kind(op) in _OUTSIDE:
                continue
            chain.add(op)
            waiting += [program.values[value].op for value in program.ops[op].operands]
        return chain

    def _alike(
        self, one: int, other: int, node: Mapping[int, int], chain: set[int]
    ) -> dict[int, int]:
        """The nodes of the ops of another run: they compute the same from the same names."""
        program, found = self._program, dict[int, int]()
        waiting: list[tuple[int, int]] = []
        for parts in self._again.values():
            if max(one, other) < len(parts):
                waiting += zip(parts[one], parts[other], strict=False)
        while waiting:
            here, there = waiting.pop()
            op, like = program.values[here].op, program.values[there].op
            if op not in node or like not in chain or like in found:
                continue
            if program.kind(op) != program.kind(like):
                continue
            found[like] = node[op]
            waiting += zip(program.ops[op].operands, program.ops[like].operands, strict=False)
        return found

    def needs(self, chain: Mapping[int, int]) -> Iterator[tuple[int, int, str]]:
        """Who needs which node: a node of these, or -1 for the backward pass; the value's name."""
        program = self._program
        for value in self._results:
            if program.values[value].op in chain:
                yield -1, chain[program.values[value].op], _RESULT
        for op in range(self._begin, len(program.ops)):
            for value in {*program.ops[op].operands}:
                maker = program.values[value].op
                if maker in chain:
                    yield chain.get(op, -1), chain[maker], self._name.get(value, "")

    def _apart(self, name: str) -> bool:
        """Whether its values of both passes are in the same loop, or in none."""
        program = self._program
        ops = [program.values[v].op for v in (self._forward[name][0][0], self._again[name][0][0])]
        inside = [
            {loop for loop in loops_of(program) if loop.last_carry < op <= loop.end} for op in ops
        ]
        return inside[0] == inside[1]

    def _from_arguments(self, name: str) -> bool:
        program, value = self._program, self._forward[name][-1][0]
        while True:
            op = program.values[value].op
            if program.kind(op) == "argument":
                return True
            if program.kind(op) not in _CUTTING or not program.ops[op].operands:
                return False
            value = program.ops[op].operands[0]


def _parts(values: list[int], parts: int) -> list[list[int]]:
    """``values`` in parts of equal size; the last ones may be smaller."""
    size = max(1, -(-len(values) // parts))
    return [values[first : first + size] for first in range(0, len(values), size)]


__all__ = ["Choices", "NamedResidual", "Recomputation", "Residuals", "residuals_of"]
