"""Closures of relations: the functions of ``rules/built_in.lp``, instead of ``rules/closure.lp``.

Each function takes whole relations and returns pairs.  Nodes are terms; the smallest node
represents its class.  Arrays ``[edges, 2]`` contain numbered nodes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from toast.graphs import components as components_of_numbers

Ints = npt.NDArray[np.int64]
Node = TypeVar("Node", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Edges:
    """A relation between numbered nodes that is too large for facts."""

    count: int  #: nodes are 0 to count - 1
    pairs: Ints  # [edges, 2]

    @functools.cached_property
    def components(self) -> Ints:
        """``[count]`` the smallest node of each node's connected component."""
        return components_of_numbers(self.count, self.pairs)


#: Nodes per sweep of a graph, which limits the memory of the bitsets.
_SOURCES = 4096


def components(
    edges: Iterable[tuple[Node, Node]], nodes: Iterable[Node]
) -> list[tuple[Node, Node]]:
    """For each of ``nodes``, the smallest node of its connected component (union-find)."""
    pairs = list(edges)
    asked = list(nodes)
    every = _sorted({*asked, *(node for pair in pairs for node in pair)})
    number = {node: index for index, node in enumerate(every)}
    joined = np.array([(number[a], number[b]) for a, b in pairs], dtype=np.int64).reshape(-1, 2)
    label = Edges(len(every), joined).components.tolist()
    return [(node, every[label[number[node]]]) for node in asked]


def paths(edges: Ints, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pairs with a path from the first to the second node.

    ``edges`` (``[edges, 2]``) lead from smaller to larger nodes and are sorted, so one sweep visits
    every edge after all edges into its source.  The bitset of a node contains the sources that
    reach it.
    """
    wanted = sorted(set(pairs))
    connected: list[tuple[int, int]] = []
    sources = sorted({source for source, _ in wanted})
    targets: dict[int, list[int]] = defaultdict(list)
    for source, target in wanted:
        targets[source].append(target)
    for start in range(0, len(sources), _SOURCES):
        part = sources[start : start + _SOURCES]
        bit = {source: 1 << index for index, source in enumerate(part)}
        reached: dict[int, int] = {}
        for source, target in edges[edges[:, 0] >= part[0]].tolist():
            bits = reached.get(source, 0) | bit.get(source, 0)
            if bits:
                reached[target] = reached.get(target, 0) | bits
        for source in part:
            connected += [(source, t) for t in targets[source] if reached.get(t, 0) & bit[source]]
    return connected


def twins(
    looks: Iterable[tuple[Node, Hashable]],
    steps: Iterable[tuple[Node, Hashable, Node]],
) -> list[tuple[Node, Node]]:
    """For each node, the smallest bisimilar node (partition refinement).

    The nodes are those of ``looks``.  Two nodes are different if their looks differ, or if
    ``steps`` of one kind lead from them to different nodes.
    """
    look: dict[Node, set[Hashable]] = defaultdict(set)
    for node, seen in looks:
        look[node].add(seen)
    near: dict[Node, set[tuple[Hashable, Node]]] = {node: set() for node in look}
    for node, kind, following in steps:
        if node in near and following in near:
            near[node].add((kind, following))
    label = _numbered((node, frozenset(seen)) for node, seen in look.items())
    count = 0
    while len(set(label.values())) > count:
        count = len(set(label.values()))
        label = _numbered(
            (node, (label[node], frozenset((kind, label[other]) for kind, other in near[node])))
            for node in look
        )
    return _first_of_each(label)


def same(items: Iterable[tuple[Node, Hashable]]) -> list[tuple[Node, Node]]:
    """For each member, the smallest member with the same set of items."""
    held: dict[Node, set[Hashable]] = defaultdict(set)
    for member, item in items:
        held[member].add(item)
    return _first_of_each(_numbered((m, frozenset(has)) for m, has in held.items()))


def _numbered(keys: Iterable[tuple[Node, Hashable]]) -> dict[Node, int]:
    numbers: dict[Hashable, int] = {}
    return {node: numbers.setdefault(key, len(numbers)) for node, key in keys}


def _first_of_each(label: dict[Node, int]) -> list[tuple[Node, Node]]:
    first: dict[int, Node] = {}
    return [(node, first.setdefault(label[node], node)) for node in _sorted(label)]


def _sorted(nodes: Iterable[Node]) -> list[Node]:
    listed: list[Any] = list(nodes)
    try:
        return sorted(listed)
    except TypeError:  # numbers and names
        return sorted(listed, key=_order)


def _order(term: Any) -> tuple[Any, ...]:
    """A sort key: numbers, then constants, then functions, as in clingo."""
    if isinstance(term, tuple):
        return 2, len(term), *term[:1], tuple(map(_order, term[1:]))
    return (0, term) if isinstance(term, int) else (1, str(term))
