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

#: Edges that take less time one by one than the import of scipy's algorithm.
_FEW = 500


def components(count: int, edges: Ints) -> Ints:
    """Connected components of an undirected graph: ``[count]``, the smallest node of each."""
    if len(edges) <= _FEW:
        return _components_of_few(count, edges)
    ones = np.ones(len(edges), dtype=np.int8)
    graph = sparse.coo_array((ones, (edges[:, 0], edges[:, 1])), shape=(count, count))
    _, label = csgraph.connected_components(graph, directed=False)
    smallest = np.full(label.max(initial=-1) + 1, count, dtype=np.int64)
    np.minimum.at(smallest, label, np.arange(count))
    return np.asarray(smallest[label], dtype=np.int64)


def _components_of_few(count: int, edges: Ints) -> Ints:
    of: dict[int, set[int]] = {}
    for one, other in edges.tolist():
        joined = of.get(one, {one}) | of.get(other, {other})
        of |= dict.fromkeys(joined, joined)
    found = np.arange(count)
    for node, joined in of.items():
        found[node] = min(joined)
    return found
