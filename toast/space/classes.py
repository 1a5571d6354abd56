"""Op classes: ops that share one state."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toast.distinct import distinct_rows
from toast.space.constraints import Holders

if TYPE_CHECKING:
    from toast.analysis import Analysis
    from toast.analysis.names import Names

Ints = npt.NDArray[np.int64]

#: The most classes after each round of splitting classes by the neighbours of their ops.
_MOST = (1300, *[450] * 20)

#: Kinds of ops that do most of the work.
PRODUCTS = frozenset({"dot_general", "dot", "convolution"})

#: A factor that distinguishes the hashes of operand 1 and operand 2; any odd number works.
_ODD = -7046029254386353131


@dataclasses.dataclass(frozen=True)
class Classes:
    """``K`` op classes with at most ``F`` factors each."""

    of_op: Ints  #: [ops] the class of each op
    representative: Ints  #: [K] one op of each class
    count: Ints  #: [K] the number of ops in each class, times their repeats
    divisor: Ints  #: [K, F] shards of the factor divide this; 1 if it takes no axis
    family: Ints  #: [K] a number; equal for classes that differ only in their neighbours


def behaviours(
    group_of_name: Ints,
    wanted: dict[int, frozenset[tuple[int, int]]],
    shardable: npt.NDArray[np.bool_],
) -> Ints:
    """``[names]`` a number; names with equal numbers are changed by the same actions.

    :param group_of_name: ``[names]`` the color group of each name.
    :param wanted: the (resolution group, bit) pairs that pick each name in conflict.
    :param shardable: ``[names]`` whether actions may shard a name.
    """
    kinds: dict[frozenset[tuple[int, int]], int] = {frozenset(): 0}
    need = np.zeros(len(group_of_name), dtype=np.int64)
    for name, pairs in wanted.items():
        need[name] = kinds.setdefault(pairs, len(kinds))
    return np.where(shardable, group_of_name * len(kinds) + need + 1, 0)


def classes_of(
    analysis: Analysis,
    behaviour: Ints,
    holding: Holders,
    *,
    collapse: bool = True,
    apart: npt.NDArray[np.int8] | None = None,
) -> Classes:
    """Groups ops into classes.

    Ops in one class have equal signatures, behaviour and constraints, and similar neighbours as far
    as :data:`_MOST` allows.

    :param analysis: the analysis of the program.
    :param behaviour: ``[names]``, from :func:`behaviours`.
    :param holding: ``[ops, axes]`` the constraints (``Resolved.holders``).
    :param collapse: if false, every op has its own class.
    :param apart: ``[ops, axes]``; ops with different rows have different classes.
    """
    names = analysis.names
    rows = _by_factor(names, behaviour, -1)
    alike = np.concatenate([names.signature[:, None], rows, holding], axis=1)
    family = distinct_rows(alike).label
    of_op = _apart(names, family) if collapse else np.arange(len(rows))
    if apart is not None:
        of_op = distinct_rows(np.concatenate([of_op[:, None], apart], axis=1)).label
    return numbered(of_op, names, analysis.program.repeats, family)


def numbered(of_op: Ints, names: Names, repeats: Sequence[int], family: Ints) -> Classes:
    """Classes in program order, so that states have that order too.

    :param of_op: ``[ops]`` equal numbers for the ops of a class.
    :param repeats: ``[ops]`` how often each runs.
    :param family: ``[ops]`` the family of each.
    """
    _, first, of_op = np.unique(of_op, return_index=True, return_inverse=True)
    count = np.bincount(of_op, weights=np.array(repeats, dtype=np.float64)).astype(np.int64)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    first = first[order]
    divisor = _by_factor(names, np.where(names.shardable, names.divisor, 1), 1)
    return Classes(rank[of_op], first, count[order], divisor[first], family[first])


def _by_factor(names: Names, of_name: Ints, other: int) -> Ints:
    """``[ops, F]`` a number of each name of an op, ``other`` beyond its names."""
    widest = max(1, int(np.diff(names.first_name).max(initial=1)))
    rows = np.full((len(names.signature), widest), other, dtype=np.int64)
    rows[names.name_op, np.arange(names.count) - names.first_name[names.name_op]] = of_name
    return rows


def _apart(names: Names, of_op: Ints) -> Ints:
    """``[ops]`` classes whose ops also have similar neighbours, while there are few enough.

    The first and the second layer of a network may have equal sizes but different best shardings;
    they differ in their neighbours.  Each round includes neighbours that are one op further away.
    """
    for most in _MOST:
        finer = _by_neighbours(names, of_op)
        if not of_op.max() < finer.max() < most:
            break
        of_op = finer
    return of_op


def _by_neighbours(names: Names, of_op: Ints) -> Ints:
    """``[ops]`` classes split by the classes of the ops' operands and users."""
    user, operand, maker = names.use_op, names.use_index, names.value_op[names.use_value]
    random = np.random.default_rng(0).integers(2**63, size=(2, int(of_op.max()) + 1))
    place = np.arange(1, int(operand.max(initial=0)) + 2) * _ODD
    hashes = np.zeros((len(of_op), 2), dtype=np.int64)
    # Sums of a random number per class; they wrap around.
    np.add.at(hashes[:, 0], user, random[0, of_op[maker]] * place[operand])
    # Several users of one class count once: they share copies.
    once = distinct_rows(np.stack([maker, of_op[user], operand], axis=1)).rows
    np.add.at(hashes[:, 1], once[:, 0], random[1, once[:, 1]] * place[once[:, 2]])
    return distinct_rows(np.concatenate([of_op[:, None], hashes], axis=1)).label
