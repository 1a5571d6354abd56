"""Graphs as arrays of edges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toast import lazy

if TYPE_CHECKING:
    from scipy import sparse
    from scipy.sparse import csgraph
else:
    sparse, csgraph = lazy.module("scipy.sparse"), lazy.module("scipy.sparse.csgraph")

Ints = npt.NDArray[np.int64]

#: Up to this number of edges, a loop is faster than the import of scipy's algorithm.
_FEW = 500


def components(count: int, edges: Ints) -> Ints:
    """Connected components of an undirected graph.

    :param count: the number of nodes.
    :param edges: ``[edges, 2]`` pairs of nodes.
    :returns: ``[count]`` the smallest node of each node's component.
    """
    if len(edges) <= _FEW:
        return _components_of_few(count, edges)
    ones = np.ones(len(edges), dtype=np.int8)
    graph = sparse.coo_array((ones, (edges[:, 0], edges[:, 1])), shape=(count, count))
    _, label = csgraph.connected_components(graph, directed=False)
    smallest = np.full(label.max(initial=-1) + 1, count, dtype=np.int64)
    np.minimum.at(smallest, label, np.arange(count))
    return np.asarray(smallest[label], dtype=np.int64)


def _components_of_few(count: int, edges: Ints) -> Ints:
    component_of: dict[int, set[int]] = {}
    for one, other in edges.tolist():
        joined = component_of.get(one, {one}) | component_of.get(other, {other})
        component_of |= dict.fromkeys(joined, joined)
    smallest = np.arange(count)
    for node, component in component_of.items():
        smallest[node] = min(component)
    return smallest
