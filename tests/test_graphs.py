"""Components of graphs."""

from __future__ import annotations

import numpy as np
import pytest

from toast import graphs


def test_components_of_few_edges_and_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    for count in (1, 10, 60):
        edges = random.integers(0, count, (count // 2, 2))
        few = graphs.components(count, edges)
        with monkeypatch.context() as patched:
            patched.setattr(graphs, "_FEW", -1)
            assert (graphs.components(count, edges) == few).all()
