"""Equivalence and path closures, built in: what ``rules/closure.lp`` says in pure logic.

The rules there are quadratic; union-find, bitsets and partition refinement are not.  A test holds
the two equal on every small fact base.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toast import lazy
from toast.graphs import components

if TYPE_CHECKING:
    from scipy import sparse
    from scipy.sparse import csgraph
else:
    sparse, csgraph = lazy.module("scipy.sparse"), lazy.module("scipy.sparse.csgraph")

Ints = npt.NDArray[np.int64]
Pair = tuple[int, int]

#: Corners per sweep of the dimension graph: bounds the memory of the bitsets.
_CORNERS = 4096


def crossings(edges: Ints, boxes: Iterable[tuple[int, int, int, int]]) -> list[Pair]:
    """Corner pairs (N, R) and (O, L) of boxes that a path of the dimension graph joins (3.5).

    ``edges`` go from smaller to larger names and are sorted, so one sweep in order visits every
    edge after all edges into its source; a node's bitset holds the corners that reach it.
    """
    wanted = sorted({pair for n, o, left, right in boxes for pair in ((n, right), (o, left))})
    found: list[Pair] = []
    corners = sorted({corner for corner, _ in wanted})
    targets: dict[int, list[int]] = defaultdict(list)
    for corner, target in wanted:
        targets[corner].append(target)
    for start in range(0, len(corners), _CORNERS):
        part = corners[start : start + _CORNERS]
        bit = {corner: 1 << index for index, corner in enumerate(part)}
        reached: dict[int, int] = {}
        for source, target in edges[edges[:, 0] >= part[0]].tolist():
            bits = reached.get(source, 0) | bit.get(source, 0)
            if bits:
                reached[target] = reached.get(target, 0) | bits
        for corner in part:
            found += [(corner, t) for t in targets[corner] if reached.get(t, 0) & bit[corner]]
    return found


def choice_classes(
    conflicts: Sequence[Pair], compatible: Iterable[tuple[int, int, int, int]]
) -> dict[Pair, Pair]:
    """The class of each oriented conflict under compatibility, named after its smallest member."""
    nodes = sorted({pair for n, o in conflicts for pair in ((n, o), (o, n))})
    number = {pair: index for index, pair in enumerate(nodes)}
    edges = [(number[n, o], number[left, right]) for n, o, left, right in compatible]
    label = components(len(nodes), np.array(edges, dtype=np.int64).reshape(-1, 2))
    return {pair: nodes[label[index]] for pair, index in number.items()}


def isomorphic_sets(
    sets: Mapping[Pair, Sequence[Pair]],
    edges: Iterable[Pair],
    kind_of: Mapping[int, Hashable],
) -> dict[Pair, Pair]:
    """Group compatibility sets whose sub-graphs of the dimension graph look alike (3.6).

    ``sets`` maps a set to its conflicts (chosen, other).  Names are refined by what they are, by
    their side and by their neighbours within the set until nothing more is told apart; sets with
    the same kinds of names form a group, named after the smallest.
    """
    if len(sets) == 1:
        return {only: only for only in sets}
    members = _members(sets)
    label = _told_apart(sets, edges, kind_of)
    first: dict[frozenset[int], Pair] = {}
    return {s: first.setdefault(frozenset(label[n] for n in members[s]), s) for s in sorted(sets)}


def isomorphic_conflicts(
    sets: Mapping[Pair, Sequence[Pair]],
    edges: Iterable[Pair],
    kind_of: Mapping[int, Hashable],
) -> dict[Pair, Pair]:
    """Group single conflicts whose surroundings in their sets look alike: repeated layers.

    Arguments as in :func:`isomorphic_sets`; a group is named after its smallest conflict.
    """
    label = _told_apart(sets, edges, kind_of)
    first: dict[Pair, Pair] = {}
    return {
        (n, o): first.setdefault((label[n], label[o]), (n, o))
        for n, o in sorted(pair for pairs in sets.values() for pair in pairs)
    }


def _members(sets: Mapping[Pair, Sequence[Pair]]) -> dict[Pair, set[int]]:
    return {s: {name for pair in pairs for name in pair} for s, pairs in sets.items()}


def _told_apart(
    sets: Mapping[Pair, Sequence[Pair]],
    edges: Iterable[Pair],
    kind_of: Mapping[int, Hashable],
) -> dict[int, int]:
    """A number for each name in a set; equal where no walk within the sets tells names apart."""
    members = _members(sets)
    sides: dict[int, set[int]] = defaultdict(set)
    neighbours: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for pairs in sets.values():
        for chosen, other in pairs:
            sides[chosen].add(0)
            sides[other].add(1)
            neighbours[chosen].add(("over", other))
            neighbours[other].add(("under", chosen))
    within: dict[int, set[Pair]] = defaultdict(set)
    for s, names in members.items():
        for name in names:
            within[name].add(s)
    for source, target in edges:
        if source in within and target in within and within[source] & within[target]:
            neighbours[source].add(("to", target))
            neighbours[target].add(("from", source))
    label: dict[int, int] = _numbered({n: (kind_of[n], frozenset(sides[n])) for n in within})
    count = 0
    while len(set(label.values())) > count:
        count = len(set(label.values()))
        label = _numbered(
            {n: (label[n], frozenset((how, label[m]) for how, m in neighbours[n])) for n in within}
        )
    return label


def _numbered(keys: Mapping[int, Hashable]) -> dict[int, int]:
    numbers: dict[Hashable, int] = {}
    return {node: numbers.setdefault(key, len(numbers)) for node, key in keys.items()}


def key_groups(keys: Mapping[int, Hashable]) -> dict[int, int]:
    """Group members with equal keys, each group named after its first member (4.4)."""
    first: dict[Hashable, int] = {}
    return {member: first.setdefault(key, member) for member, key in keys.items()}
