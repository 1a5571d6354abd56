"""Why two dimensions have one color: the shortest chain of identities and def-use edges.

A place is a dimension of a value at its definition or at a use.  Steps connect places: two places
of one op with the same name (identities I: the same factor of the op), the definition of a
dimension and its uses (edges M), and places of ops with shared names (a value around a loop, a
result in a donated argument).  Two places are connected by a chain if and only if their names have
one color (sections 3.1 and 3.2 of the paper).
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toast import lazy
from toast.analysis.analysis import Analysis
from toast.analysis.dimensions import Dimension, dimension_of, find_dimension
from toast.analysis.evidence import Chain, ChainStep, Kind, Place, Role
from toast.analysis.names import Ints
from toast.analysis.rules import (
    Factor,
    RuleLine,
    RuleLines,
    SignatureRule,
    rule_lines,
    stratum_line,
)
from toast.graphs import components

if TYPE_CHECKING:
    from scipy import sparse
    from scipy.sparse import csgraph

else:
    sparse, csgraph = lazy.module("scipy.sparse"), lazy.module("scipy.sparse.csgraph")


def chain(analysis: Analysis, one: str | Dimension, other: str | Dimension) -> Chain:
    """The implementation of :meth:`toast.Analysis.explain`."""
    program, first = analysis.program, analysis.names.value_dim
    ends = [d if isinstance(d, Dimension) else find_dimension(program, d) for d in (one, other)]
    return between(analysis, *(int(first[end.value]) + end.d for end in ends))


def between(analysis: Analysis, one: int, other: int) -> Chain:
    """The shortest chain between two places, given by their numbers in :class:`Places`."""
    places = Places(analysis)
    color = analysis.color[places.name[[one, other]]]
    tied = bool(color[0] == color[1])
    rows = places.shortest(one, other, apart=not tied)
    signatures = analysis.names.signature[places.op[rows]].tolist()
    lines = rule_lines(analysis.program, analysis.rules, signatures)
    steps = tuple(_step(places, lines, *pair) for pair in itertools.pairwise(rows))
    return Chain(places.dimension(one), places.dimension(other), tied, steps)


class Places:
    """The places of an analyzed program: definitions, then uses, in the order of ``Names``."""

    def __init__(self, analysis: Analysis) -> None:
        names = analysis.names
        self.analysis = analysis
        defined = np.repeat(np.arange(len(names.value_op)), np.diff(names.value_dim))
        ranks = np.diff(names.use_dim)
        used = np.repeat(np.arange(len(names.use_op)), ranks)
        #: ``[places]`` the place of the definition of the same dimension.
        self.definition: Ints = np.concatenate([
            np.arange(len(defined)),
            np.arange(len(used)) + np.repeat(
                names.value_dim[names.use_value] - names.use_dim[:-1], ranks
            ),
        ])  # fmt: skip
        #: ``[places]`` name, value, op and operand number of each place; -1 for definitions.
        self.name: Ints = np.concatenate([names.def_name, names.use_name])
        self.value: Ints = np.concatenate([defined, names.use_value[used]])
        self.op: Ints = np.concatenate([names.value_op[defined], names.use_op[used]])
        self.operand: Ints = np.concatenate([np.full(len(defined), -1), names.use_index[used]])

    @property
    def count(self) -> int:
        """The number of places."""
        return len(self.name)

    def shortest(self, one: int, other: int, *, apart: bool) -> list[int]:
        """The places on a shortest path, including both ends; empty if there is no path.

        With ``apart``, a step may also connect two dimensions of one op with different factors; a
        path with fewer such steps is shorter.  Of several shortest paths, the result is the one
        over the earliest places.
        """
        names, count = self.analysis.names, self.count
        rows = np.arange(count)
        shared = components(names.count, names.tied)[self.name]
        uses = rows[self.operand >= 0]
        # Every step has length 2: a name, or an op, is a node between its places.
        edges: list[tuple[Ints, Ints, float | npt.NDArray[np.float64]]] = [
            (rows, count + shared, 1.0),
            (uses, self.definition[uses], 2.0),
        ]
        if apart:
            price = np.array([_price(rule) for rule in self.analysis.rules])
            price = price[names.signature[self.op]]
            have = rows[np.isfinite(price)]
            edges.append((have, count + names.count + self.op[have], 4.0 * count + price[have]))
        source = np.concatenate([a for a, _, _ in edges])
        target = np.concatenate([b for _, b, _ in edges])
        weight = np.concatenate([np.broadcast_to(w, a.shape) for a, _, w in edges])
        size = count + names.count + len(names.signature)
        graph = sparse.csr_array((weight, (source, target)), shape=(size, size))
        graph = graph + graph.T
        left = csgraph.dijkstra(graph, indices=[other])[0]
        if np.isinf(left[one]):
            return []
        # Lengths are whole numbers, so this path does not depend on how scipy breaks ties.
        path = [one]
        while path[-1] != other:
            row = slice(*graph.indptr[path[-1] : path[-1] + 2])
            near = graph.indices[row]
            path.append(int(near[left[near] + graph.data[row] == left[path[-1]]].min()))
        return [node for node in path if node < count]

    def dimension(self, row: int) -> Dimension:
        """The dimension at a place."""
        value = int(self.value[row])
        d = int(self.definition[row] - self.analysis.names.value_dim[value])
        return dimension_of(self.analysis.program, value, d)

    def tensor(self, row: int) -> tuple[str, int]:
        """``("operand", 0)`` or ``("result", 0)``."""
        operand = int(self.operand[row])
        if operand >= 0:
            return "operand", operand
        return "result", self.analysis.program.values[int(self.value[row])].result

    def place(self, row: int) -> Place:
        """The description of a place."""
        analysis, op, name = self.analysis, int(self.op[row]), int(self.name[row])
        program = analysis.program
        factor = analysis.rules[program.ops[op].signature].factors[
            name - int(analysis.names.first_name[op])
        ]
        return Place(
            op=op,
            op_kind=program.kind(op),
            location=program.location(op),
            tensor="{}({})".format(*self.tensor(row)),
            dimension=self.dimension(row),
            factor=factor.label,
            role=_role(factor),
        )

    def factors(self, row: int) -> list[str]:
        """The factors of the dimension at a place, major to minor."""
        op = self.analysis.program.ops[int(self.op[row])]
        rule = self.analysis.rules[op.signature]
        side, index = self.tensor(row)
        dims = (rule.operands if side == "operand" else rule.results)[index]
        return [rule.factors[f].label for f in dims[self.dimension(row).d]]


def _price(rule: SignatureRule) -> float:
    """The price of a step between two factors of an op; lower if the op explains more.

    It is infinite for an op with a single tensor (an argument), and higher for ops whose tensors
    all have the same dimensions.
    """
    tensors = [*rule.operands, *rule.results]
    if len(tensors) < 2:
        return math.inf
    return 2.0 if len(set(tensors)) == 1 else 0.0


def _role(factor: Factor) -> Role:
    if factor.need_replication:
        return "need_replication"
    if factor.permutation:
        return "permutation"
    return "reduction" if factor.combiner else "pass_through"


def _step(places: Places, lines: RuleLines, one: int, other: int) -> ChainStep:
    """The step between two consecutive places of a path."""
    ends = places.place(one), places.place(other)
    if other == places.definition[one] or one == places.definition[other]:
        return ChainStep("def_use", *ends, (stratum_line("names", "edge/4"),))
    if ends[0].op != ends[1].op:
        kinds = {end.op_kind for end in ends}
        kind: Kind = "donation" if "return" in kinds else "loop"
        return ChainStep(kind, *ends, (stratum_line("names", "same_name/2"),))
    signature = int(places.analysis.names.signature[ends[0].op])
    rules = [
        line
        for end in ends
        for line in lines.of(signature, end.tensor, end.dimension.d, end.factor)[:1]
    ]
    if places.name[one] == places.name[other]:
        return ChainStep("identity", *ends, tuple(dict.fromkeys(rules)))
    reason, more = _reason(places, lines, one, other)
    return ChainStep("apart", *ends, tuple(dict.fromkeys([*rules, *more])), reason)


def _reason(
    places: Places, lines: RuleLines, one: int, other: int
) -> tuple[str, tuple[RuleLine, ...]]:
    """Why two dimensions of an op have different factors, and the rules that state it."""
    analysis, op = places.analysis, int(places.op[one])
    signature = int(analysis.names.signature[op])
    if analysis.rules[signature].missing:
        return "this op has no rule, so its dimensions are not sharded", ()
    for row, against in ((one, other), (other, one)):
        place, factors = places.place(row), places.factors(row)
        if (signature, place.factor) in lines.need_replication:
            return f"{place.where} cannot be sharded", lines.need_replication[
                signature, place.factor
            ]
        if places.place(against).factor in factors[1:]:
            listed = ", ".join(factors)
            return (
                f"{place.where} consists of factors {listed}, major to minor, and has the name of "
                "the first",
                lines.of(signature, place.tensor, place.dimension.d, factors[1]),
            )
    return "two different factors", ()
