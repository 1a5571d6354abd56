"""Op classes: ops that have the same state forever, or are to have it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toast.space.constraints import Holders

if TYPE_CHECKING:
    from toast.analysis import Analysis
    from toast.analysis.names import Names

Ints = npt.NDArray[np.int64]

#: Classes that there may be after each round that tells ops apart by their neighbours.
_MOST = (1300, *[450] * 20)

#: Kinds of ops that do most of the work.
PRODUCTS = frozenset({"dot_general", "dot", "convolution"})

#: Sets what is drawn for operand 1 apart from what is for operand 2; any odd number does.
_ODD = -7046029254386353131


@dataclasses.dataclass(frozen=True)
class Classes:
    """Op classes; ``K`` classes, at most ``F`` factors each."""

    of_op: Ints  # [ops] class of each op
    representative: Ints  # [K] one op of each class
    count: Ints  # [K] ops in each class, times their repeats
    divisor: Ints  # [K, F] a sharding of the factor divides this; 1 where it takes no axis
    family: Ints  # [K] a number that classes share which their neighbours alone tell apart


def behaviours(
    group_of_name: Ints,
    wanted: dict[int, frozenset[tuple[int, int]]],
    shardable: npt.NDArray[np.bool_],
) -> Ints:
    """A number per name; names with equal numbers are touched by the same actions."""
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
    """The op classes: what names do (``behaviour``) and constraints say (``holding``) is alike.

    So are neighbours, as far as :data:`_MOST` allows.  Without ``collapse`` every op is one.
    Ops that differ in ``apart`` (``[ops, axes]``) are of different classes in any case.
    """
    names = analysis.names
    widest = max(1, int(np.diff(names.first_name).max(initial=1)))
    rows = np.full((len(names.signature), widest), -1, dtype=np.int64)
    factor = np.arange(names.count) - names.first_name[names.name_op]
    rows[names.name_op, factor] = behaviour
    divisor = np.ones_like(rows)
    divisor[names.name_op, factor] = np.where(names.shardable, names.divisor, 1)
    alike = np.concatenate([names.signature[:, None], rows, holding], axis=1)
    family = np.unique(alike, axis=0, return_inverse=True)[1].reshape(-1)
    of_op = _apart(names, family) if collapse else np.arange(len(rows))
    if apart is not None:
        key = np.concatenate([of_op[:, None], apart], axis=1)
        of_op = np.unique(key, axis=0, return_inverse=True)[1].reshape(-1)
    _, first, of_op = np.unique(of_op, return_index=True, return_inverse=True)
    repeats = np.array(analysis.program.repeats, dtype=np.float64)
    count = np.bincount(of_op, weights=repeats).astype(np.int64)
    # Number the classes in program order, so that states read in that order too.
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    first = first[order]
    return Classes(rank[of_op], first, count[order], divisor[first], family[first])


def _apart(names: Names, of_op: Ints) -> Ints:
    """Classes of which the ops have like neighbours, too, as far as their number allows: ``[ops]``.

    The first layer of a network and the second may have equal sizes and want other shardings all
    the same: their neighbours tell them apart.  Each round looks one op further.
    """
    for most in _MOST:
        finer = _by_neighbours(names, of_op)
        if not of_op.max() < finer.max() < most:
            break
        of_op = finer
    return of_op


def _by_neighbours(names: Names, of_op: Ints) -> Ints:
    """Classes of ops in one class before, whose operands and users were: ``[ops]``."""
    user, operand, maker = names.use_op, names.use_index, names.value_op[names.use_value]
    drawn = np.random.default_rng(0).integers(2**63, size=(2, int(of_op.max()) + 1))
    place = np.arange(1, int(operand.max(initial=0)) + 2) * _ODD
    seen = np.zeros((len(of_op), 2), dtype=np.int64)
    # Sums of what is drawn for each class, which wrap around.
    np.add.at(seen[:, 0], user, drawn[0, of_op[maker]] * place[operand])
    # Several users of a class are as one: copies are shared.
    once = np.unique(np.stack([maker, of_op[user], operand]), axis=1)
    np.add.at(seen[:, 1], once[0], drawn[1, once[1]] * place[once[2]])
    key = np.concatenate([of_op[:, None], seen], axis=1)
    return np.asarray(np.unique(key, axis=0, return_inverse=True)[1]).reshape(-1)
