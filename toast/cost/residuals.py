"""The residuals of a survey, and the ops that compute each again from others.

The program of a survey recomputes everything, and its residuals have names
(:func:`toast.program.survey`).  Between named values lie the ops that compute one from others: a
graph, whose nodes stand for the same op in all runs of a block.  A memory policy keeps, recomputes
or offloads residuals; it decides which nodes run again.

Runs of a block may decide differently: then each range of runs has its own residuals and nodes.  A
loop over several ranges computes a share of each.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from toast.cost.entities import Bools, Floats, Ints
from toast.cost.liveness import PASSED_ON
from toast.cost.program_loops import loops_of
from toast.program import (
    Block,
    MemoryPolicy,
    Program,
    RunRange,
    TensorType,
    label_parts,
    residual_label,
)
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

    #: The name of the block, with a range of runs if these are not all.
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
    #: The share of each pair of values that these runs have: less than 1 if a loop has others.
    shares: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Choices:
    """What ``P`` policies do with ``R`` residuals: ``[P, R]`` each."""

    keep: Bools
    move: Bools
    #: Arguments of blocks of which the backward pass uses the copies of the forward pass: gathered
    #: weights stay gathered.
    shared: Bools
    #: Whether its block keeps all and is none, so that nothing keeps values that XLA would rather
    #: compute again in its kernels.
    bare: Bools

    def __len__(self) -> int:
        return len(self.keep)

    @property
    def present(self) -> Bools:
        """``[P, R]`` the residuals that are not computed again."""
        return self.keep | self.move

    def take(self, rows: Ints | slice) -> Choices:
        """Some of the policies."""
        return Choices(self.keep[rows], self.move[rows], self.shared[rows], self.bare[rows])

    def keys(self) -> list[bytes]:
        """What tells each policy from others."""
        every = np.concatenate([self.keep, self.move, self.shared, self.bare], axis=1)
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
    #: ``[E]`` a residual of the block, if the value is needed because the block names results (else
    #: -1): without the block, it is there.
    named_result: Ints

    def running(self, choices: Choices) -> Bools:
        """``[P, N]`` the nodes that run again under policies."""
        runs = np.zeros((len(choices), self.nodes + 1), dtype=bool)  # the last one: backward pass
        runs[:, -1] = True
        none = np.zeros((len(choices), 1), dtype=bool)
        there = np.concatenate([choices.present, none], axis=1)
        bare = np.concatenate([choices.bare, none], axis=1)
        needed = ~there[:, self.residual] & ~bare[:, self.named_result]  # [P, E]
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

    ``R`` residuals, ``N`` nodes: ops of one run of a block.
    """

    #: The names of blocks, with ranges.
    blocks: tuple[str, ...]
    named: tuple[NamedResidual, ...]
    #: ``[I]`` ops, in order; the node that each is; and the share of its work for this node.
    ops: Ints
    nodes: Ints
    shares: Floats
    #: ``[R]`` and ``[N]`` the number of the block of each residual and of each node.
    residual_block: Ints
    node_block: Ints
    graph: Recomputation

    def running(self, choices: Choices) -> Bools:
        """``[P, N]`` the nodes that run again under policies."""
        return self.graph.running(choices)

    @property
    def everything(self) -> Choices:
        """The policy that keeps everything with a name."""
        every = np.ones((1, len(self.named)), dtype=bool)
        return Choices(every, ~every, ~every, ~every)

    def pairs(self, before: Residuals, choices: Choices) -> Choices:
        """Policies with one policy in the first runs of each block, and a later one in the others.

        ``choices`` are those of ``before``, the residuals without ranges.
        """
        number = {(r.block, r.name): n for n, r in enumerate(before.named)}
        ranges = [RunRange.parse(r.block) for r in self.named]
        of = np.array([
            number[runs.block, r.name] for runs, r in zip(ranges, self.named, strict=True)
        ])  # fmt: skip
        in_first = np.array([runs.first == 0 for runs in ranges], dtype=bool)
        one, other = np.triu_indices(len(choices), 1)
        fields = (getattr(choices, field.name) for field in dataclasses.fields(Choices))
        return Choices(
            *(np.where(in_first, each[one][:, of], each[other][:, of]) for each in fields)
        )

    def choices(self, policies: Sequence[MemoryPolicy]) -> Choices:
        """What policies, with resolved names, do with the residuals."""
        keep, move, shared, bare = np.zeros((4, len(policies), len(self.named)), dtype=bool)
        for row, policy in enumerate(policies):
            for column, residual in enumerate(self.named):
                of_block = policy.of(residual.block)
                bare[row, column] = of_block.keeps_all
                move[row, column] = residual.name in of_block.offload
                stacked = of_block.keeps_all and residual.computed and not residual.apart
                keep[row, column] = residual.name in of_block.keep and (
                    not residual.is_input or stacked
                )
                shared[row, column] = (
                    residual.is_input and residual.apart
                    and (of_block.keeps_all or residual.name in of_block.gathered)
                )  # fmt: skip
        return Choices(keep & ~move, move, shared, bare)


def residuals_of(program: Program, cuts: Mapping[str, tuple[int, ...]] | None = None) -> Residuals:
    """The residuals of a survey.

    ``cuts`` are the numbers of the runs of blocks at which ranges begin that decide on their own.
    """
    assert program.memory is not None
    blocks: list[str] = []
    named: list[NamedResidual] = []
    needs: list[tuple[int, int, int, int]] = []
    items: list[tuple[int, int, float]] = []
    residual_block: list[int] = []
    node_block: list[int] = []
    for block in program.memory.blocks:
        found = _BlockRuns(program, block)
        if not found.names:
            blocks.append(block.name)
            continue
        chain = found.nodes()
        count = 1 + max((node for node, _ in chain.values()), default=-1)
        needed = [*found.needs({op: node for op, (node, _) in chain.items()})]
        for runs, shares in found.ranges((cuts or {}).get(block.name, ())):
            nodes, first = len(node_block), len(named)
            number = {name: first + n for n, name in enumerate(found.names)}
            named += [found.residual(name, str(runs), shares) for name in found.names]
            items += [
                (op, nodes + node, shares[run])
                for op, (node, run) in chain.items() if shares[run] > 0
            ]  # fmt: skip
            needs += [
                (nodes + user if user >= 0 else -1, nodes + node, number.get(name, -1),
                 first if name == _RESULT else -1)
                for user, node, name in needed
            ]  # fmt: skip
            residual_block += [len(blocks)] * len(found.names)
            node_block += [len(blocks)] * count
            blocks.append(str(runs))
    users, needed_nodes, numbers, of_result = np.array(
        sorted({*needs}), dtype=np.int64
    ).reshape(-1, 4).T  # fmt: skip
    items.sort()
    return Residuals(
        tuple(blocks), tuple(named),
        np.array([op for op, _, _ in items], dtype=np.int64),
        np.array([node for _, node, _ in items], dtype=np.int64),
        np.array([share for _, _, share in items]),
        np.array(residual_block, dtype=np.int64), np.array(node_block, dtype=np.int64),
        Recomputation(len(node_block), users, needed_nodes, numbers, of_result),
    )  # fmt: skip


class _BlockRuns:
    """The values with names in all runs of a block, and the ops that compute them again."""

    def __init__(self, program: Program, block: Block) -> None:
        self._program, self._block = program, block
        self._loops = loops_of(program)
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
            if not again:  # the backward pass does not need it
                continue
            self._forward[name] = _parts(forward, self._copies)
            # What ran first in the forward pass runs last in the backward pass.
            self._again[name] = _parts(again, self._copies)[::-1]
        self._find_results()
        self.names = tuple(self._again)
        self._name = {
            value: name for name, parts in self._again.items() for part in parts for value in part
        }

    def _find_results(self) -> None:
        """Finds values of the forward pass that only the backward pass needs.

        They have no names there: they are results of ops that have other results with names.
        """
        program, makers = self._program, self._program.makers
        forward: dict[int, int] = {}  # the op that computes the same first
        for name, parts in self._forward.items():
            for one, two in zip(parts, self._again[name], strict=False):
                befores, afters = (dict.fromkeys(makers[v] for v in part) for part in (one, two))
                if [*map(self._results_of, befores)] == [*map(self._results_of, afters)]:
                    forward.update(zip(afters, befores, strict=True))
        for name, parts in [*self._again.items()]:
            every = [value for part in parts for value in part]
            if sum(map(len, self._forward[name])) >= len(every):
                continue
            if all(makers[value] in forward for value in every):
                self._forward[name] = [
                    [
                        program.ops[forward[makers[value]]].results[program.values[value].result]
                        for value in part
                    ]
                    for part in parts
                ]
            elif not self._forward[name]:  # nothing in the forward pass is known to be the same
                del self._forward[name], self._again[name]

    def _results_of(self, op: int) -> tuple[str, list[TensorType]]:
        """The kind of an op, and the types of its results."""
        results = self._program.ops[op].results
        return self._program.kind(op), [self._program.values[value].type for value in results]

    def _runs_of(self, values: list[int]) -> tuple[bool, int, int]:
        """Whether each run of both passes computes one of the values; and how many there are.

        The third number is how often a step computes them.  Values of a scan inside of a block are
        computed more often than the block runs.
        """
        runs = sum(self._program.repeats[self._program.values[value].op] for value in values)
        return runs == 2 * self._block.runs, len(values), runs

    def _copies_of(self, values: list[int]) -> int:
        """How many of the values of one name belong to all runs of the block."""
        runs = 0
        for number, value in enumerate(values):
            runs += self._program.repeats[self._program.values[value].op]
            if runs >= self._block.runs:
                return number + 1
        return max(1, len(values) // 2)

    def ranges(self, cuts: tuple[int, ...]) -> list[tuple[RunRange, list[float]]]:
        """The ranges of runs between ``cuts``, and the share of each copy that is in the range."""
        assert self._program.memory is not None
        # Some values of a copy may be before its loop, or in loops of its own.
        lengths = [
            statistics.mode(
                self._program.repeats[self._program.values[value].op]
                for parts in self._forward.values() if copy < len(parts) for value in parts[copy]
            ) / self._program.memory.microbatches
            for copy in range(self._copies)
        ]  # fmt: skip
        ends = [*itertools.accumulate(lengths)]
        found = []
        for runs in RunRange(self._block.name).cut(cuts):
            inside = [
                max(0.0, min(end, runs.end) - max(end - length, runs.first)) / length
                for end, length in zip(ends, lengths, strict=True)
            ]
            if any(inside):
                found.append((runs, inside))
        return found

    def residual(self, name: str, block: str, shares: Sequence[float]) -> NamedResidual:
        """The residual with a name, for the range of runs of which copies have ``shares``."""
        is_input = any(r.name == name and r.kind == "input" for r in self._block.residuals)
        parts = zip(self._forward[name], self._again[name], shares, strict=False)
        pairs = [
            (before, after, share)
            for forward, again, share in parts if share > 0
            for before, after in zip(forward, again, strict=False)
        ]  # fmt: skip
        before, after, share = zip(*pairs, strict=True)
        return NamedResidual(
            block, name, is_input, self._from_arguments(name),
            self._program.kind(self._program.values[self._again[name][-1][-1]].op) == "convert",
            self._apart(name), before, after, share,
        )  # fmt: skip

    def nodes(self) -> dict[int, tuple[int, int]]:
        """The node of each op that computes named values again, and its copy of the block."""
        chains = [self._chain(run) for run in range(self._copies)]
        longest = max(range(self._copies), key=lambda run: (len(chains[run]), -run), default=0)
        if not chains:
            return {}
        node = {op: number for number, op in enumerate(sorted(chains[longest]))}
        every = {op: (number, longest) for op, number in node.items()}
        for run, chain in enumerate(chains):
            if run != longest:
                alike = self._alike(longest, run, node, chain)
                every.update({op: (number, run) for op, number in alike.items()})
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
        inside = [{loop for loop in self._loops if loop.last_carry < op <= loop.end} for op in ops]
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
