"""Names, definitions and uses of a whole program, as arrays (paper, sections 3.1 and 3.2).

``rules/names.lp`` defines them for one op per signature, and for one use per pair of signatures.
Array joins repeat the results for every op and use.  A name is (op, factor) and has the number
``first_name[op] + factor``.  Names of later ops have larger numbers, so the order of names is a
topological order of the dimension graph.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from toast.analysis.rules import SignatureRule, Signatures
from toast.program import Program

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Names:
    """Named dimensions of a program: ``N`` names, ``U`` uses, ``V`` values, ``D`` dimensions."""

    signature: Ints  #: [ops] signature of each op
    first_name: Ints  #: [ops + 1] names of op i are first_name[i] : first_name[i + 1]
    name_op: Ints  #: [N] op of each name
    divisor: Ints  #: [N] a sharding of the name divides this
    shardable: Bools  #: [N] may take a mesh axis
    value_op: Ints  #: [V] op that defines each value
    value_dim: Ints  #: [V + 1] dimensions of value v are rows value_dim[v] : value_dim[v + 1]
    def_name: Ints  #: [D] name of each dimension where its value is defined
    dim_size: Ints  #: [D] elements along each dimension
    use_op: Ints  #: [U] op that uses
    use_index: Ints  #: [U] operand number
    use_value: Ints  #: [U] value used
    use_dim: Ints  #: [U + 1] dimensions of use u are rows use_dim[u] : use_dim[u + 1]
    use_name: Ints  #: [rows] name of each dimension at the use
    use_def_name: Ints  #: [rows] name of the same dimension where the value is defined
    edges: Ints  #: [edges, 2] M: from definition name to use name; sorted, without duplicates
    tied: Ints  #: [pairs, 2] names of tied ops that are the same: they have one color

    @property
    def count(self) -> int:
        """The number of names."""
        return len(self.name_op)


def instantiate(program: Program, signatures: Signatures) -> Names:
    """The names of a program, by joining every op with the solved rule of its signature."""
    nothing = np.zeros((0, 2), dtype=np.int64)
    names = joined(program, signatures.rules, nothing, nothing)
    return dataclasses.replace(
        names,
        edges=_edges(program, signatures, names), tied=_tied(program, signatures, names.first_name),
    )  # fmt: skip


def joined(program: Program, rules: Sequence[SignatureRule], edges: Ints, tied: Ints) -> Names:
    """The names of a program whose ``edges`` and ``tied`` names are known."""
    signature = np.array([op.signature for op in program.ops], dtype=np.int64)
    factor_counts = np.array([len(rule.factors) for rule in rules], dtype=np.int64)
    first_name = np.concatenate([[0], np.cumsum(factor_counts[signature])])
    name_op = np.repeat(np.arange(len(signature)), factor_counts[signature])
    by_rule = np.concatenate([[0], np.cumsum(factor_counts)])
    row = by_rule[signature[name_op]] + np.arange(len(name_op)) - first_name[name_op]
    factors = [factor for rule in rules for factor in rule.factors]
    divisor = np.array([f.divisor for f in factors], dtype=np.int64)[row]
    shardable = np.array([f.shardable for f in factors], dtype=bool)[row]

    result_rows, _, value_op = _places(signature, first_name, [rule.results for rule in rules])
    value_dim = np.concatenate([[0], np.cumsum([len(v.type.shape) for v in program.values])])
    sizes = [size for value in program.values for size in value.type.shape]
    operand_rows, use_index, use_op = _places(
        signature, first_name, [rule.operands for rule in rules]
    )
    use_value = np.array([v for op in program.ops for v in op.operands], dtype=np.int64)
    ranks = np.diff(value_dim)[use_value]
    use_dim = np.concatenate([[0], np.cumsum(ranks)])
    starts = np.repeat(value_dim[use_value] - use_dim[:-1], ranks)
    return Names(
        signature=signature,
        first_name=first_name,
        name_op=name_op,
        divisor=divisor,
        shardable=shardable,
        value_op=value_op,
        value_dim=value_dim,
        def_name=result_rows,
        dim_size=np.array(sizes, dtype=np.int64),
        use_op=use_op,
        use_index=use_index,
        use_value=use_value,
        use_dim=use_dim,
        use_name=operand_rows,
        use_def_name=result_rows[starts + np.arange(len(operand_rows))],
        edges=edges,
        tied=tied,
    )


def _edges(program: Program, signatures: Signatures, names: Names) -> Ints:
    """The edges of every use: those of its link."""
    signature, first_name, used = names.signature, names.first_name, names.use_value
    value_result = np.array([value.result for value in program.values], dtype=np.int64)
    # Ops and places, as links are.
    uses = np.stack(
        [names.value_op[used], value_result[used], names.use_op, names.use_index], axis=1
    )
    key = uses.copy()
    key[:, 0], key[:, 2] = signature[uses[:, 0]], signature[uses[:, 2]]
    wide = key.max(axis=0, initial=0) + 1
    link = np.searchsorted(_mixed(signatures.links, wide), _mixed(key, wide))
    first = np.searchsorted(signatures.edges[:, 0], np.arange(len(signatures.links) + 1))
    count = np.diff(first)[link]
    use = np.repeat(np.arange(len(uses)), count)
    row = first[link[use]] + np.arange(len(use)) - (np.cumsum(count) - count)[use]
    name = first_name[uses[use, 0]] + signatures.edges[row, 1]
    use_name = first_name[uses[use, 2]] + signatures.edges[row, 2]
    keys = np.unique(name * first_name[-1] + use_name)
    return np.stack([keys // first_name[-1], keys % first_name[-1]], axis=1)


def _mixed(rows: Ints, wide: Ints) -> Ints:
    """A number for each row that preserves the order of rows; column ``c`` is below ``wide[c]``."""
    number = np.zeros(len(rows), dtype=np.int64)
    for column, most in zip(rows.T, wide, strict=True):
        number = number * most + column
    return number


def _places(
    signature: Ints, first_name: Ints, sides: list[tuple[tuple[tuple[int, ...], ...], ...]]
) -> tuple[Ints, Ints, Ints]:
    """Names of all dimensions on one side of all ops; index and op of each tensor."""
    majors = [[dim[0] for tensor in tensors for dim in tensor] for tensors in sides]
    rows = np.array([len(m) for m in majors], dtype=np.int64)
    first = np.concatenate([[0], np.cumsum(rows)])
    flat = np.array([f for m in majors for f in m], dtype=np.int64)
    counts = rows[signature]
    starts = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(starts, counts)
    names = flat[np.repeat(first[signature], counts) + within] + np.repeat(first_name[:-1], counts)
    tensors = np.array([len(t) for t in sides], dtype=np.int64)[signature]
    index = np.arange(tensors.sum()) - np.repeat(np.cumsum(tensors) - tensors, tensors)
    return names, index, np.repeat(np.arange(len(signature)), tensors)


def _tied(program: Program, signatures: Signatures, first_name: Ints) -> Ints:
    """``[pairs, 2]`` names of tied ops that are equal."""
    of: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for one, other, *factors in signatures.same_names.tolist():
        of[one, other].append(factors)
    pairs = [
        (first_name[op] + one, first_name[other] + two)
        for op, other in program.ties
        for one, two in of[program.ops[op].signature, program.ops[other].signature]
    ]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)
